"""Measurements folded into the table that the default choice reads.

For each op and size XLA is measured, and the kernel at every block that may be best.
Sizes and ops measured before, but not now, stay in the table.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence

import jax

from rjax.bench.cases import Case
from rjax.bench.measure import Figure
from rjax.bench.programs import XLA, Variant
from rjax.ops import tuned

# Small ranges take as long as a launch does; larger ones have enough programs for
# every multiprocessor without the least block.
_SMALL = 1 << 18
_SMALL_BLOCKS, _BLOCKS = (128, 512, 2048), (256, 512, 1024, 2048)


def variants(case: Case, n: int) -> list[Variant]:
    """Return what is measured to tune: XLA, and the kernel at every likely block."""
    blocks = case.blocks or (_SMALL_BLOCKS if n <= _SMALL else _BLOCKS)
    likely = [block for block in blocks if case.kernel and block <= n]
    return [XLA, *(Variant("mosaic_gpu", block) for block in likely)]


def tune(
    groups: Iterable[Iterable[Figure]],
    tuning: tuned.Tuning,
    keep: Callable[[tuned.Tuning], None],
) -> tuned.Tuning:
    """Measure, and add to a table what was measured.

    Args:
        groups: the figures of one op at one size each; those without a kernel's are
            for the eye only.
        tuning: what was measured before.
        keep: takes the table after each op and size, so that an interrupt loses little.
    """
    for group in groups:
        figures = list(group)
        if any(figure.implementation == "mosaic_gpu" for figure in figures):
            tuning = added(tuning, figures[0].op, choice(figures))
            keep(tuning)
    return tuning


def choice(figures: Sequence[Figure]) -> tuned.Choice:
    """Return the fastest of one op at one size: XLA's time, the kernel's, its block."""
    xla = min(f.seconds for f in figures if f.implementation == "xla")
    kernels = [f for f in figures if f.implementation == "mosaic_gpu"]
    best = min(kernels, key=lambda figure: figure.seconds)
    assert best.block is not None
    return tuned.Choice(best.n, xla, best.seconds, best.block)


def added(tuning: tuned.Tuning, op: str, new: tuned.Choice) -> tuned.Tuning:
    """Return a table with a choice in place of an older one of that op and size."""
    others = [old for old in tuning.choices.get(op, ()) if old.n != new.n]
    choices = tuple(sorted([*others, new], key=lambda choice: choice.n))
    return dataclasses.replace(tuning, choices={**tuning.choices, op: choices})


def default_path(device: str) -> pathlib.Path:
    """Return the file of a kind of device that is this user's own."""
    return tuned.user_folder() / tuned.file_name(device)


def begin(path: pathlib.Path, device: str) -> tuned.Tuning:
    """Return the table to add to: what the file holds, or what is in force, or none.

    A table of the user's own hides the one that comes with rjax, so it begins with
    what that says of other ops. Damaged, it is deleted: it is about to be written.

    Raises:
        ValueError: if another file is no table, or one of another device.
    """
    found = None
    mine = path == default_path(device)
    if path.exists():
        try:
            found = tuned.read(path)
        except ValueError:
            if not mine:
                raise
            path.unlink()
    if found is None and mine:
        found = tuned.here()
    if found is None:
        return tuned.Tuning(device, jax.__version__, {})
    if found.device != device:
        raise ValueError(
            f"{path} holds measurements of {found.device!r}, this is {device!r}: "
            "give another file"
        )
    return dataclasses.replace(found, jax=jax.__version__)


def save(path: pathlib.Path, tuning: tuned.Tuning) -> None:
    """Write a table, and let the default choice of this process read it anew."""
    tuned.write(path, tuning)
    tuned.here.cache_clear()
