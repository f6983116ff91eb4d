"""A record taken up again: how much of its files an unbroken run would have by then."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rjax.digests import tensors
from rjax.plan import Plan
from rjax.repro import format as on_disk
from rjax.repro.errors import RecordError
from rjax.state import RegionState


@dataclasses.dataclass(frozen=True)
class Reopened:
    """Where a record goes on.

    Attributes:
        first: number of its first step.
        layout: of its rows.
        keep: how many bytes of each file stay.
    """

    first: int
    layout: on_disk.Layout
    keep: Mapping[str, int]


def reopen(inner: Path, plan: Plan, state: RegionState, every: int) -> Reopened | None:
    """Return where the record in a folder goes on, `None` if it begins with the state.

    What it holds of steps from the state's on goes: snapshots now, rows when the files
    are opened with `keep`. A record that begins anew is removed.

    Args:
        inner: folder of the record.
        plan: the static layout.
        state: before the next step.
        every: steps from one digest to the next.

    Raises:
        RecordError: if the record ends before the state, begins after it, is damaged
            before it, or is of another plan or of other `every`.
    """
    step = int(state.step)
    if step == 0 or _has_no_row(inner):
        if step:
            raise _ends_before(inner, step)
        shutil.rmtree(inner, ignore_errors=True)
        return None
    layout = on_disk.read_layout(inner)
    _check_same(inner, layout, plan, state, every)
    steps = on_disk.Rows(inner / on_disk.STEPS, layout.step_row)
    first = int(steps.read(0, 1)["step"][0])
    if first == step:
        shutil.rmtree(inner, ignore_errors=True)
        return None
    if first > step:
        raise RecordError(
            f"{inner.parent} has a record that begins with step {first}, after the "
            f"{step} that the state has seen; give the run a folder of its own."
        )
    if steps.count < step - first or _last(steps, step - first) != step - 1:
        raise _ends_before(inner, step)
    keep = {on_disk.STEPS: (step - first) * layout.step_row.itemsize}
    keep[on_disk.DIGESTS] = _kept(inner / on_disk.DIGESTS, layout.digest_row, step)
    if layout.gradients:
        path = inner / on_disk.GRADIENTS
        keep[on_disk.GRADIENTS] = _kept(path, layout.gradient_row, step - 1)
    if every and _digested(inner, layout, keep) != max(first, step - step % every):
        raise _ends_before(inner, step)
    _drop_snapshots(inner, step)
    return Reopened(first, layout, keep)


def _has_no_row(inner: Path) -> bool:
    """Whether a record was ended before it held a step."""
    if not (inner / on_disk.LAYOUT).exists():
        return True
    row = on_disk.read_layout(inner).step_row
    return not on_disk.Rows(inner / on_disk.STEPS, row).count


def _check_same(
    inner: Path, layout: on_disk.Layout, plan: Plan, state: RegionState, every: int
) -> None:
    if layout.plan != plan.fingerprint or layout.tensors != tensors(plan, state):
        raise RecordError(
            f"{inner.parent} has a record of another plan; give the run a folder of "
            "its own."
        )
    if layout.every != every:
        raise RecordError(
            f"{inner.parent} has a record of digests every {layout.every} steps, not "
            f"{every}; go on with `every={layout.every}`."
        )


def _last(rows: on_disk.Rows, count: int) -> int:
    """Return the number of the last of the first rows."""
    return int(rows.read(count - 1, 1)["step"][0])


def _kept(path: Path, row: np.dtype, last: int) -> int:
    """Return the bytes of the rows of digests up to one of `last`."""
    kept = 0
    for chunk in on_disk.Rows(path, row).chunks():
        kept += int(np.count_nonzero(chunk["step"].astype(np.int64) <= last))
    return kept * row.itemsize


def _digested(inner: Path, layout: on_disk.Layout, keep: Mapping[str, int]) -> int:
    """Return of which state the last digest is that stays, -1 without any."""
    rows = on_disk.Rows(inner / on_disk.DIGESTS, layout.digest_row)
    count = keep[on_disk.DIGESTS] // layout.digest_row.itemsize
    return _last(rows, count) if count else -1


def _drop_snapshots(inner: Path, step: int) -> None:
    for path in (inner / on_disk.SNAPSHOTS).glob("*.npz"):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink()


def _ends_before(inner: Path, step: int) -> RecordError:
    return RecordError(
        f"{inner.parent} has a record that ends before step {step}, from which the run "
        "is to go on; restore an earlier checkpoint, or give it a folder of its own."
    )
