"""Arenas cut into contiguous ranges: what a device can say of the slots in its own.

Where the ranges begin, no slot need begin, and which slots a device holds it knows at
run time only. So per-slot constants come from a table over its rows; a row is as wide
as fits both slots and ranges.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops.digest.base import bits, mix
from rjax.ops.slots import ROW, SlotTable


@dataclasses.dataclass(frozen=True)
class Shards:
    """The ranges of an arena, one a device.

    Attributes:
        table: the slots that tile the arena.
        sizes: elements of each slot, without padding.
        length: elements of the arena over all devices, padding included.
        devices: how many there are.
        axes: of the mesh.
    """

    table: SlotTable
    sizes: tuple[int, ...]
    length: int
    devices: int
    axes: tuple[str, ...]

    @property
    def local(self) -> int:
        """Elements of a range."""
        return self.length // self.devices

    @property
    def width(self) -> int:
        """Elements of a row, of which both slots and ranges are multiples."""
        return math.gcd(ROW, self.local)

    def _starts(self) -> np.ndarray:
        """Return i64[slots + 1]: the first row of each slot, of all devices' rows."""
        return self.table.row_starts * (ROW // self.width)

    def _first_row(self) -> jax.Array:
        return lax.axis_index(self.axes) * (self.local // self.width)

    def _row_slots(self) -> jax.Array:
        """Return i32[rows], the slot of each row; of what lies behind all, the last."""
        # As in `ops.slots.row_slots`: not to be folded into a constant.
        ends = lax.optimization_barrier(jnp.asarray(self._starts()[1:], jnp.int32))
        rows = self._first_row() + jnp.arange(self.local // self.width, dtype=jnp.int32)
        slots = jnp.searchsorted(ends, rows, side="right").astype(jnp.int32)
        return jnp.minimum(slots, len(self.sizes) - 1)

    def spread(self, values: jax.Array) -> jax.Array:
        """Return [k]: each element gets its slot's entry of `values` [slots]."""
        rows = values[self._row_slots()]
        return jnp.broadcast_to(rows[:, None], (len(rows), self.width)).reshape(-1)

    def whole_rows(self, x: jax.Array) -> jax.Array:
        """Return the range with zeros up to whole rows of 128, to be summed by rows."""
        return x if x.size % ROW == 0 else jnp.pad(x, (0, -x.size % ROW))

    def slot_sums(self, x: jax.Array) -> jax.Array:
        """Return f32[slots], the sum of `x` f32[k] over what each slot has here.

        Rows first, then a scan that starts anew at every slot: a scatter would add in
        no fixed order on GPU.
        """
        slots = self._row_slots()
        sums = jnp.sum(x.reshape(-1, self.width), axis=1)
        new = jnp.concatenate([jnp.ones(1, jnp.bool_), slots[1:] != slots[:-1]])
        _, running = lax.associative_scan(_restarting_sum, (new, sums))
        starts = jnp.asarray(self._starts(), jnp.int32) - self._first_row()
        starts = jnp.clip(starts, 0, len(sums))
        ends = starts[1:]
        return jnp.where(ends > starts[:-1], running[jnp.maximum(ends - 1, 0)], 0.0)

    def any_in_slots(self, marks: jax.Array) -> jax.Array:
        """Return bool[slots]: whether any element of bool[k] is set in each slot."""
        rows = jnp.any(marks.reshape(-1, self.width), axis=1).astype(jnp.int32)
        found = jax.ops.segment_max(
            rows,
            self._row_slots(),
            num_segments=len(self.sizes),
            indices_are_sorted=True,
        )
        return found > 0

    def digest_slots(self, x: jax.Array) -> jax.Array:
        """Return uint32[slots, 2]: what the range adds to `ops.digest_slots`."""
        slots = self._row_slots()
        rows = self._first_row() + jnp.arange(len(slots), dtype=jnp.int32)
        starts = jnp.asarray(self._starts()[:-1], jnp.int32)
        lanes = lax.broadcasted_iota(jnp.int32, (len(slots), self.width), 1)
        local = ((rows - starts[slots]) * self.width)[:, None] + lanes
        inside = local < jnp.asarray(self.sizes, jnp.int32)[slots][:, None]
        mixed = mix(bits(x).reshape(-1, self.width), local.astype(jnp.uint32))
        parts = [
            jax.ops.segment_sum(
                jnp.sum(jnp.where(inside, m, np.uint32(0)), axis=1, dtype=jnp.uint32),
                slots,
                num_segments=len(self.sizes),
                indices_are_sorted=True,
            )
            for m in mixed
        ]
        return jnp.stack(parts, axis=1)


def _restarting_sum(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Join two runs of rows (starts anew, sum since the last start)."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])
