"""Reads two records side by side, once, and notes where their words differ."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rjax.digests import Tensor
from rjax.repro.bits import Bits, decode, relative
from rjax.repro.comparison import (
    ColumnDifference,
    Difference,
    GradientDifference,
    StateDifference,
)
from rjax.repro.format import Rows
from rjax.repro.opened import Opened, ascending, comparable, pairs
from rjax.repro.timeline import Timeline, Watcher
from rjax.repro.tracks import Track, Tracker

# At one step: what goes into it, what comes out, what is decided, what is counted.
# Metrics come out.
_GRADIENT = "the gradient"
_CAUSES = (
    "scale", "learning_rate", "loss", "", _GRADIENT, "grad_norm", "offender",
    "bad_stats", "applied", "skipped", "consecutive_skips",
)  # fmt: skip
# The same for the fields of a state that are not in their place in it already.
_FIELDS = ("key", "frozen", "batch_stats", "opt_state", "mu", "nu", "master")


@dataclasses.dataclass(frozen=True)
class Steps:
    """What the rows of the steps gave.

    Attributes:
        tracks: course of each run.
        common: number of steps that both have.
        columns: those that differ, the earliest first.
        timeline: of all columns that both have.
    """

    tracks: tuple[Track, Track]
    common: int
    columns: tuple[ColumnDifference, ...]
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class Digests:
    """What the rows of digests gave, those of the state or those of the gradients.

    The number of a row is that of the steps the state has seen, or of the gradient's
    step.

    Attributes:
        common: number of rows that both have.
        alone: number of rows, within the steps that both have, that one has alone.
        last: number of the last row that both have, -1 without any.
        equal: number of the last of those before the first that differs, -1 without
            any.
        compared: how many tensors a row was compared in.
        step: number of the first that differs, `None` if none does.
        tensors: those that differ there, causes before effects.
        a: digest of the first of them in the first record, in hex.
        b: the same in the second.
        timeline: of the regions, and of the state's fields outside all of them.
    """

    common: int
    alone: tuple[int, int]
    last: int
    equal: int
    compared: int
    step: int | None
    tensors: tuple[Tensor, ...]
    a: str
    b: str
    timeline: Timeline


def scan_steps(a: Opened, b: Opened) -> Steps:
    """Compare the numbers of all steps."""
    trackers = Tracker(a), Tracker(b)
    columns = [
        _Column(name, a.columns[name], b.columns[name])
        for name in a.columns
        if name in b.columns
    ]
    common, rows = 0, min(a.steps.count, b.steps.count)
    watcher = Watcher([column.name for column in columns], rows)
    for steps, left, right in pairs(trackers[0].rows(), trackers[1].rows()):
        common += len(steps)
        differ = np.zeros((len(steps), len(columns)), bool)
        apart = np.zeros(differ.shape)
        for i, column in enumerate(columns):
            at, distances = column.add(steps, left, right)
            differ[at, i], apart[at, i] = True, distances
        watcher.add(steps, differ, apart)
    found = [column.found for column in columns if column.found is not None]
    found.sort(key=when)
    tracks = trackers[0].track(), trackers[1].track()
    return Steps(tracks, common, tuple(found), watcher.timeline())


class _Column:
    """Collects where one column differs."""

    def __init__(self, name: str, a: tuple[int, str], b: tuple[int, str]) -> None:
        self.name, self._a, self._b = name, a, b
        self.found: ColumnDifference | None = None

    def add(
        self, steps: np.ndarray, left: np.ndarray, right: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which of some rows differ, and how far those are apart."""
        (place, dtype), (other, other_dtype) = self._a, self._b
        a, b = left[:, place], right[:, other]
        if dtype == other_dtype:
            at = np.flatnonzero(a != b)
            distances = relative(decode(a[at], dtype), decode(b[at], dtype))
        else:  # other bits for equal numbers
            distances = relative(decode(a, dtype), decode(b, other_dtype))
            at = np.flatnonzero(distances)
            distances = distances[at]
        if not len(at):
            return at, distances
        if self.found is None:
            i = at[0]
            values = Bits(int(a[i]), dtype), Bits(int(b[i]), other_dtype)
            self.found = ColumnDifference(int(steps[i]), self.name, *values, 0, 0.0)
        self.found = dataclasses.replace(
            self.found,
            count=self.found.count + len(at),
            largest=max(self.found.largest, float(distances.max())),
        )
        return at, distances


def scan_digests(a: Opened, b: Opened) -> Digests:
    """Compare the digests of all tensors that both have in one shape and dtype."""
    names = comparable(a.layout.tensors, b.layout.tensors)
    both = max(a.first, b.first), min(a.last, b.last) + 1
    return _scan(_Counter(a.digests, both), _Counter(b.digests, both), *names)


def scan_gradients(a: Opened, b: Opened) -> Digests | None:
    """Compare the digests of all gradients that both have; `None` if one has none."""
    if a.gradients is None or b.gradients is None:
        return None
    names = comparable(a.layout.gradients, b.layout.gradients)
    both = max(a.first, b.first), min(a.last, b.last)
    return _scan(_Counter(a.gradients, both), _Counter(b.gradients, both), *names)


def _scan(
    a: "_Counter",
    b: "_Counter",
    tensors: Sequence[Tensor],
    here: np.ndarray,
    there: np.ndarray,
) -> Digests:
    """Compare rows of digests of `tensors`, whose places in a row are given."""
    common, last, equal = 0, -1, -1
    found: tuple[int, tuple[Tensor, ...], str, str] | None = None
    watcher = Watcher([x.region or x.field for x in tensors], min(a.most, b.most))
    for steps, left, right in pairs(a.rows(), b.rows()):
        common, last = common + len(steps), int(steps[-1])
        differ = (left[:, here] != right[:, there]).any(axis=-1)
        watcher.add(steps, differ)
        if found is not None:
            continue
        rows = np.flatnonzero(differ.any(axis=1))
        if not len(rows):
            equal = last
            continue
        row = rows[0]
        equal = int(steps[row - 1]) if row else equal
        differing = np.flatnonzero(differ[row]).tolist()
        order = sorted(differing, key=lambda i: _depth(tensors[i]))
        one, other = left[row, here[order[0]]], right[row, there[order[0]]]
        names = tuple(tensors[i] for i in order)
        found = int(steps[row]), names, _hex(one), _hex(other)
    alone = a.count - common, b.count - common
    first = found or (None, (), "", "")
    timeline = watcher.timeline()
    return Digests(common, alone, last, equal, len(tensors), *first, timeline)


class _Counter:
    """Counts rows between two step numbers, both included."""

    def __init__(self, rows: Rows, bounds: tuple[int, int]) -> None:
        self._rows, self._bounds, self.count = rows, bounds, 0
        self.most = rows.count

    def rows(self) -> Iterator[np.ndarray]:
        """Yield the rows of digests, in chunks, counting them."""
        low, high = self._bounds
        for chunk in ascending(self._rows):
            inside = (chunk["step"] >= low) & (chunk["step"] <= high)
            self.count += int(np.count_nonzero(inside))
            yield chunk


def _hex(lanes: np.ndarray) -> str:
    return f"{lanes[1]:08x}{lanes[0]:08x}"


def when(found: Difference) -> tuple[int, int]:
    """Return the place of a difference among causes and effects, to sort by.

    The state after n steps comes before all of step n; in it, the gradient comes after
    the loss and before its norm.
    """
    if isinstance(found, StateDifference):
        return found.step, -1
    name = _GRADIENT if isinstance(found, GradientDifference) else found.name
    return found.step, _CAUSES.index(name if name in _CAUSES else "")


def _depth(tensor: Tensor) -> int:
    """Return the place of a tensor's field; equal places stay in the state's order."""
    field = tensor.field
    return _FIELDS.index(field) if field in _FIELDS else len(_FIELDS)
