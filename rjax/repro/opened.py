"""A record opened for reading, and rows of two records side by side."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rjax.digests import Tensor
from rjax.repro import format as on_disk
from rjax.repro.bits import decode
from rjax.repro.errors import RecordError


@dataclasses.dataclass(frozen=True)
class Opened:
    """The record of one run, none of whose rows is kept in memory.

    Attributes:
        folder: of the run.
        layout: of the rows.
        steps: rows of `steps.bin`, at least one.
        digests: rows of `digests.bin`.
        gradients: rows of `gradients.bin`, `None` if they are not recorded.
        first: number of the first step.
        last: number of the last step.
    """

    folder: Path
    layout: on_disk.Layout
    steps: on_disk.Rows
    digests: on_disk.Rows
    gradients: on_disk.Rows | None
    first: int
    last: int

    @property
    def inner(self) -> Path:
        """Folder of the record itself."""
        return self.folder / on_disk.FOLDER

    @property
    def columns(self) -> dict[str, tuple[int, str]]:
        """Place and dtype of each column, by name."""
        pairs = enumerate(self.layout.columns)
        return {name: (place, dtype) for place, (name, dtype) in pairs}

    def snapshot(self, step: int) -> Path:
        """Return where the snapshot after that many steps is, or would be."""
        return on_disk.snapshot_path(self.inner, step)

    def snapshots(self) -> set[int]:
        """Return after how many steps there are snapshots."""
        found = (self.inner / on_disk.SNAPSHOTS).glob("*.npz")
        return {int(path.stem) for path in found if path.stem.isdecimal()}


def open_record(folder: str | os.PathLike[str]) -> Opened:
    """Open the record in a run's folder.

    Raises:
        RecordError: if there is none, or none that can be read, or it has no step.
    """
    inner = Path(folder) / on_disk.FOLDER
    layout = on_disk.read_layout(inner)
    _check(inner / on_disk.LAYOUT, layout)
    steps = on_disk.Rows(inner / on_disk.STEPS, layout.step_row)
    digests = on_disk.Rows(inner / on_disk.DIGESTS, layout.digest_row)
    if not steps.count:
        raise RecordError(
            f"{steps.path} holds no whole step; let the run take one before comparing."
        )
    gradients = None
    if layout.gradients:
        gradients = on_disk.Rows(inner / on_disk.GRADIENTS, layout.gradient_row)
    first, last = (int(steps.read(at, 1)["step"][0]) for at in (0, steps.count - 1))
    return Opened(Path(folder), layout, steps, digests, gradients, first, last)


def _check(path: Path, layout: on_disk.Layout) -> None:
    """Raise if a layout names things twice or dtypes that do not exist."""
    columns = [name for name, _ in layout.columns]
    tensors = [*layout.tensors, *layout.gradients]
    names = [tensor.name for tensor in tensors]
    try:
        for _, dtype in layout.columns:
            decode(np.zeros(1, np.uint32), dtype)
        for tensor in tensors:
            if not tensor.dtype.startswith("key<"):
                np.dtype(tensor.dtype)
        whole = len({*columns}) == len(columns) and len({*names}) == len(names)
    except (TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise RecordError(
            f"{path} is damaged or was not written by rjax; record the run again."
        )


def comparable(
    a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[Sequence[Tensor], np.ndarray, np.ndarray]:
    """Return the tensors of one shape and dtype, and their places in both records."""
    others = {tensor.name: i for i, tensor in enumerate(b)}
    found = [
        (tensor, i, others[tensor.name])
        for i, tensor in enumerate(a)
        if tensor.name in others and _kind(tensor) == _kind(b[others[tensor.name]])
    ]
    tensors, here, there = zip(*found, strict=True) if found else ((), (), ())
    return tensors, np.array(here, int), np.array(there, int)


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def ascending(rows: on_disk.Rows) -> Iterator[np.ndarray]:
    """Yield the rows of a file in chunks whose step numbers rise.

    Raises:
        RecordError: where they do not, or a row is damaged.
    """
    last = -1
    for chunk in rows.chunks():
        steps = chunk["step"].astype(np.int64)
        if (np.diff(steps, prepend=last) <= 0).any():
            raise RecordError(
                f"{rows.path} holds steps out of order; give every run a folder of "
                "its own and record it again."
            )
        last = int(steps[-1])
        yield chunk


def pairs(
    left: Iterable[np.ndarray], right: Iterable[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (steps, words, words) of the rows that two records both have.

    All chunks of both are read, also those that the other has nothing beside.

    Args:
        left: chunks of rows with rising step numbers.
        right: the same of the other record; chunks may be of other lengths.
    """
    left, right = iter(left), iter(right)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        last = min(a["step"][-1], b["step"][-1])
        m, n = (int(np.searchsorted(x["step"], last, side="right")) for x in (a, b))
        if np.array_equal(a["step"][:m], b["step"][:n]):
            yield a["step"][:m], a["words"][:m], b["words"][:n]
        else:
            steps, i, j = np.intersect1d(
                a["step"][:m], b["step"][:n], assume_unique=True, return_indices=True
            )
            if len(steps):
                yield steps, a["words"][i], b["words"][j]
        a = a[m:] if m < len(a) else next(left, None)
        b = b[n:] if n < len(b) else next(right, None)
    for rest in (left, right):
        for _ in rest:
            pass
