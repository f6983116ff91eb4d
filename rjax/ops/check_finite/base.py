"""Plain jnp: is any gradient non-finite, and how long is the gradient?

One pass sums the squares. A finite sum proves that every element is finite and
gives the norm; only otherwise, or if the sum is so small that squares may have
underflowed, a second look decides by bits and sums rescaled squares.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.bits import is_finite, magnitude
from rjax.ops.slots import ROW, SlotTable, row_slots

# Powers of two: rescaling is exact. Up to 2^31 squares of values below 2^128 * DOWN
# stay finite; values whose squares sum to less than SMALL stay so times UP^2.
_SMALL, _UP, _DOWN = 2.0**-64, 2.0**80, 2.0**-96


def _sum_of_squares(x: jax.Array) -> jax.Array:
    """Sum squares by rows of 128: partial sums bound the rounding of long sums."""
    rows = x.reshape(-1, ROW) if x.size % ROW == 0 else x[None]
    return jnp.sum(jnp.sum(jnp.square(rows), axis=1))


def check_finite(
    grads: jax.Array, scale: jax.Array, clamp: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (flag bool[], norm f32[] of ``grads / scale``)."""
    total = _sum_of_squares(grads)

    def plain() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((), jnp.bool_), jnp.sqrt(total) / scale

    def careful() -> tuple[jax.Array, jax.Array]:
        bits, infinity = magnitude(grads)
        largest = jnp.max(bits)
        flag = largest > infinity if clamp else largest >= infinity
        small = total < _SMALL
        factor = jnp.where(small, jnp.float32(_UP), jnp.float32(_DOWN))
        rescaled = jnp.sqrt(_sum_of_squares(grads * factor))
        return flag, rescaled / (factor * scale)

    ordinary = is_finite(total) & (total >= _SMALL)
    flag, norm = lax.cond(ordinary, plain, careful)
    return flag, jnp.where(flag, jnp.float32(jnp.nan), norm)


def nonfinite_slots(grads: jax.Array, table: SlotTable, clamp: bool) -> jax.Array:
    """Return bool[slots]: which slots hold an element that sets the flag."""
    bits, infinity = magnitude(grads)
    per_row = jnp.max(bits.reshape(-1, ROW), axis=1)
    largest = jax.ops.segment_max(
        per_row,
        row_slots(table),
        num_segments=len(table.rows),
        indices_are_sorted=True,
    )
    return largest > infinity if clamp else largest >= infinity
