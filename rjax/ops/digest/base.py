"""Plain jnp: mix every element's bits with its index, add modulo 2^32.

For a fixed index each lane is a bijection of the 32 bits (xor or add a constant,
multiply by an odd number, xor a right shift: all invertible), so one changed element
always changes both lanes. Elements that differ in index or bits are mixed so that
their terms look independent: two arrays that differ in two or more elements agree in
both lanes with a probability of about 2^-64. It finds accidents, not attacks.

The first lane is the finalizer `lowbias32` of Wellons' hash-prospector over the bits
xor a Weyl sequence in the index (Knuth's golden ratio, as in splitmix). The second
shares its first round and ends with another odd multiplier (of MurmurHash3's fmix32)
after adding the index's term again: a second whole finalizer would cost more integer
operations than the memory leaves time for.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops.slots import ROW

_GOLDEN, _FIRST, _SECOND, _OTHER = (
    np.uint32(c) for c in (0x9E3779B9, 0x7FEB352D, 0x846CA68B, 0xC2B2AE35)
)

Table = tuple[tuple[int, int], ...]


def bits(x: jax.Array) -> jax.Array:
    """Return the raw bits of a 16- or 32-bit type, as uint32."""
    raw = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return raw.astype(jnp.uint32)


def _xor_shift(x: jax.Array, by: int) -> jax.Array:
    return x ^ (x >> np.uint32(by))


def mix(raw: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two uint32 of the shape of `raw`, from uint32 bits and uint32 indices."""
    weyl = index * _GOLDEN + _GOLDEN  # not 0 where the index is: a zero has to count
    shared = _xor_shift(_xor_shift(raw ^ weyl, 16) * _FIRST, 15)
    return (
        _xor_shift(shared * _SECOND, 16),
        _xor_shift((shared + weyl) * _OTHER, 16),
    )


def digest(
    x: jax.Array, start_index: jax.Array, bounds: tuple[int, int] | None = None
) -> jax.Array:
    """Return uint32[2] of a one-dimensional array, or a range of it."""
    start, stop = (0, x.size) if bounds is None else bounds
    index = lax.iota(jnp.uint32, stop - start) + (start_index + np.uint32(start))
    lanes = mix(bits(x[start:stop]), index)
    return jnp.stack([jnp.sum(lane, dtype=jnp.uint32) for lane in lanes])


def digest_slots(x: jax.Array, table: Table) -> jax.Array:
    """Return uint32[slots, 2]: rows of 128 first, then each slot's rows."""
    if not table:
        return jnp.zeros((0, 2), jnp.uint32)
    rows = -(-x.size // ROW)
    starts = np.array([start for start, _ in table])
    sizes = np.array([size for _, size in table])
    # The barrier keeps XLA from folding the slot of each row into a constant.
    firsts = lax.optimization_barrier(jnp.asarray(starts // ROW, jnp.int32))
    row = jnp.arange(rows, dtype=jnp.int32)
    slot = jnp.searchsorted(firsts, row, side="right").astype(jnp.int32) - 1
    owner = jnp.maximum(slot, 0)
    local = (row - firsts[owner])[:, None] * ROW + lax.broadcasted_iota(
        jnp.int32, (rows, ROW), 1
    )
    inside = (slot >= 0)[:, None] & (local < jnp.asarray(sizes, jnp.int32)[owner, None])
    padded = jnp.pad(bits(x), (0, rows * ROW - x.size)).reshape(rows, ROW)
    lanes = [
        jax.ops.segment_sum(
            jnp.sum(jnp.where(inside, lane, np.uint32(0)), axis=1, dtype=jnp.uint32),
            owner,
            num_segments=len(table),
            indices_are_sorted=True,
        )
        for lane in mix(padded, local.astype(jnp.uint32))
    ]
    return jnp.stack(lanes, axis=1)
