"""The table over slots that range operations read per-slot constants from.

Slots tile an arena without gaps, each in whole rows of 128 elements, so a per-slot
reduction is a sum over rows followed by a sum over each slot's rows, and a per-slot
constant is one value a row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

ROW = 128


@dataclasses.dataclass(frozen=True)
class SlotTable:
    """Per-slot constants of an arena, in arena order.

    Attributes:
        rows: number of 128-element rows of each slot; they tile the arena.
        decay: whether weight decay applies to the slot.
        adaptive: whether the slot has a LARS trust ratio.
    """

    rows: tuple[int, ...]
    decay: tuple[bool, ...]
    adaptive: tuple[bool, ...]

    @functools.cached_property
    def row_starts(self) -> np.ndarray:
        """i64[slots + 1]: first row of each slot, then the number of rows."""
        return np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)])

    @property
    def num_rows(self) -> int:
        """Rows of the whole arena."""
        return sum(self.rows)


def runs(marks: tuple[bool, ...], table: SlotTable) -> list[tuple[int, int]]:
    """Return the maximal element ranges [start, stop) of slots that are marked."""
    starts = table.row_starts * ROW
    ranges: list[tuple[int, int]] = []
    for i, marked in enumerate(marks):
        start, stop = int(starts[i]), int(starts[i + 1])
        if not marked or start == stop:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


def mask(marks: tuple[bool, ...], table: SlotTable) -> jax.Array | None:
    """Return bool[n], True in marked slots, or `None` if every slot is marked.

    A few ranges become comparisons with an index, which fuse into the pass that
    reads the mask; many become a table with one entry a row.
    """
    ranges = runs(marks, table)
    n = table.num_rows * ROW
    if ranges == [(0, n)]:
        return None
    if len(ranges) > 8:
        return spread(jnp.asarray(marks), table)
    index = jax.lax.iota(jnp.int32, n)
    inside = jnp.zeros((n,), jnp.bool_)
    for start, stop in ranges:
        inside |= (index >= start) & (index < stop)
    return inside


def row_slots(table: SlotTable) -> jax.Array:
    """Return i32[rows], the slot of each row, found on the device.

    The barrier keeps XLA from folding it into a constant, which takes the compiler
    seconds and the program one word a row.
    """
    starts = jax.lax.optimization_barrier(jnp.asarray(table.row_starts[1:], jnp.int32))
    rows = jnp.arange(table.num_rows, dtype=jnp.int32)
    return jnp.searchsorted(starts, rows, side="right").astype(jnp.int32)


def spread(values: jax.Array, table: SlotTable) -> jax.Array:
    """Return [n]: each element gets its slot's entry of `values` [slots]."""
    per_row = values[row_slots(table)]
    return jnp.broadcast_to(per_row[:, None], (table.num_rows, ROW)).reshape(-1)


def slot_sums(x: jax.Array, table: SlotTable) -> jax.Array:
    """Return f32[slots], the sum of `x` f32[n] over each slot.

    Rows first, then one slice a slot: a scatter would add in no fixed order on GPU.
    """
    per_row = jnp.sum(x.reshape(-1, ROW), axis=1)
    starts = table.row_starts
    return jnp.stack(
        [jnp.sum(per_row[starts[i] : starts[i + 1]]) for i in range(len(table.rows))]
    )
