"""What one record tells by itself: its loss, its loss scales, its skips, its gaps."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from rjax.repro.bits import decode
from rjax.repro.opened import Opened, ascending

# Points of a curve, and gaps that are listed one by one.
POINTS, _GAPS = 1000, 5


@dataclasses.dataclass(frozen=True)
class Track:
    """The course of one run.

    Attributes:
        folder: of the run.
        first: number of its first step.
        last: number of its last step.
        steps: number of its steps.
        digests: number of its rows of digests of the state.
        gradients: number of its rows of digests of gradients.
        every: steps from one of those to the next, 0 if there are none.
        cut_off: whether a file ends within a row, as a killed run leaves it.
        scales: (step, scale) where the loss scale changed, with the first step's.
        skipped: steps that were skipped, `None` if that was not recorded.
        loss: (step, loss) of at most `POINTS` steps, evenly spaced.
        gaps: (number, next number) where numbers were left out, the first few.
    """

    folder: str
    first: int
    last: int
    steps: int
    digests: int
    gradients: int
    every: int
    cut_off: bool
    scales: tuple[tuple[int, float], ...]
    skipped: int | None
    loss: tuple[tuple[int, float], ...]
    gaps: tuple[tuple[int, int], ...]


class Tracker:
    """Watches the rows of a record go by.

    Args:
        record: the record.
    """

    def __init__(self, record: Opened) -> None:
        self._record = record
        self._columns = record.columns
        self._stride = math.ceil(record.steps.count / POINTS)
        self._row = 0
        self._last: tuple[int, int | None] | None = None  # number, bits of the scale
        self._scales: list[tuple[int, float]] = []
        self._loss: list[tuple[int, float]] = []
        self._gaps: list[tuple[int, int]] = []
        self._skipped = 0

    def rows(self) -> Iterator[np.ndarray]:
        """Yield the rows of the steps, in chunks, watching them."""
        for chunk in ascending(self._record.steps):
            self._watch(chunk)
            yield chunk

    def track(self) -> Track:
        """Return what was seen, after all rows have gone by."""
        record = self._record
        rows = record.steps, record.digests, record.gradients
        return Track(
            str(record.folder),
            record.first,
            record.last,
            record.steps.count,
            record.digests.count,
            0 if record.gradients is None else record.gradients.count,
            record.layout.every,
            any(x is not None and x.cut_off for x in rows),
            tuple(self._scales),
            self._skipped if "applied" in self._columns else None,
            tuple(self._loss),
            tuple(self._gaps),
        )

    def _watch(self, chunk: np.ndarray) -> None:
        steps, words = chunk["step"].astype(np.int64), chunk["words"]
        last = self._last or (int(steps[0]) - 1, None)
        before = np.concatenate([[last[0]], steps[:-1]])
        gaps = np.flatnonzero(steps - before > 1)[: _GAPS - len(self._gaps)]
        self._gaps += [(int(before[i]), int(steps[i])) for i in gaps]
        scale = self._words(words, "scale")
        if scale is not None:
            change = np.append(scale[0] != last[1], scale[1:] != scale[:-1])
            self._scales += self._points("scale", steps[change], scale[change])
        if (applied := self._words(words, "applied")) is not None:
            self._skipped += int(np.count_nonzero(applied == 0))
        if (loss := self._words(words, "loss")) is not None:
            kept = slice(-self._row % self._stride, None, self._stride)
            self._loss += self._points("loss", steps[kept], loss[kept])
        self._row += len(chunk)
        self._last = int(steps[-1]), None if scale is None else int(scale[-1])

    def _words(self, words: np.ndarray, name: str) -> np.ndarray | None:
        return words[:, self._columns[name][0]] if name in self._columns else None

    def _points(
        self, name: str, steps: np.ndarray, words: np.ndarray
    ) -> list[tuple[int, float]]:
        values = decode(words, self._columns[name][1]).astype(np.float64)
        return list(zip(steps.tolist(), values.tolist(), strict=True))
