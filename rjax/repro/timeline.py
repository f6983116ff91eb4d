"""Where two records agree, in time: groups of tensors against the steps."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Columns of a timeline; more rows of a record share one.
BINS = 240


@dataclasses.dataclass(frozen=True)
class Strip:
    """One group of tensors, or one column of the steps, over time.

    Attributes:
        name: of the region, of the state's field, or of the column.
        size: how many tensors it has.
        differ: for each column of the timeline, in how many of them the runs differ in
            the row where most do.
        largest: for each column of the timeline, the largest |a - b| / max(|a|, |b|);
            empty for tensors, of which only digests are known.
    """

    name: str
    size: int
    differ: tuple[int, ...]
    largest: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Agreement of two records over the rows that both have.

    Attributes:
        bounds: numbers of the first and the last row in each column.
        rows: how many rows each column stands for.
        strips: one for each group, in the order of the record.
    """

    bounds: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    strips: tuple[Strip, ...]


class Watcher:
    """Collects a timeline while the rows of two records go by.

    Args:
        groups: name of the group that each tensor or column belongs to.
        rows: how many rows there can be at the most.
    """

    def __init__(self, groups: Sequence[str], rows: int) -> None:
        self._names = [*dict.fromkeys(groups)]
        place = {name: i for i, name in enumerate(self._names)}
        self._member = np.zeros((len(groups), len(self._names)), np.int64)
        for i, name in enumerate(groups):
            self._member[i, place[name]] = 1
        self._stride = max(1, math.ceil(rows / BINS))
        self._row = 0
        self._bounds: list[tuple[int, int]] = []
        self._rows: list[int] = []
        self._differ: list[np.ndarray] = []
        self._largest: list[np.ndarray] = []

    def add(
        self, steps: np.ndarray, differ: np.ndarray, apart: np.ndarray | None = None
    ) -> None:
        """Take rows.

        Args:
            steps: their numbers, ascending.
            differ: bool[rows, members], where the runs differ.
            apart: float[rows, members], how far, if that is known.
        """
        counts = differ.astype(np.int64) @ self._member
        if apart is not None:
            groups = (apart[:, of] for of in self._member.T.astype(bool))
            far = np.array([group.max(axis=1) for group in groups])
            apart = far.reshape(len(self._names), len(steps)).T
        while len(steps):
            room = self._stride - self._row % self._stride
            most = counts[:room].max(axis=0)
            far = np.zeros(0) if apart is None else apart[:room].max(axis=0)
            last = int(steps[min(room, len(steps)) - 1])
            if room == self._stride:
                self._bounds.append((int(steps[0]), last))
                self._rows.append(len(steps[:room]))
                self._differ.append(most)
                self._largest.append(far)
            else:
                self._bounds[-1] = self._bounds[-1][0], last
                self._rows[-1] += len(steps[:room])
                self._differ[-1] = np.maximum(self._differ[-1], most)
                self._largest[-1] = np.maximum(self._largest[-1], far)
            self._row += len(steps[:room])
            steps, counts = steps[room:], counts[room:]
            apart = None if apart is None else apart[room:]

    def timeline(self) -> Timeline:
        """Return what was seen."""
        sizes = self._member.sum(axis=0).tolist()
        differ = [[int(x) for x in row] for row in zip(*self._differ, strict=True)]
        far = [[float(x) for x in row] for row in zip(*self._largest, strict=True)]
        strips = [
            Strip(
                name,
                sizes[i],
                tuple(differ[i]) if differ else (),
                tuple(far[i]) if far else (),
            )
            for i, name in enumerate(self._names)
        ]
        return Timeline(tuple(self._bounds), tuple(self._rows), tuple(strips))
