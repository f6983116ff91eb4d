"""Plain jnp: is any gradient non-finite, and how long is the gradient?

One pass sums the squares. A sum of squares is NaN only if an element is, and finite
only if all are, so two scalars decide by their bits. Only a sum that overflowed, or
so small that squares may have underflowed, needs a second pass over rescaled values,
whose squares do neither.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.bits import is_finite, is_nan
from rjax.ops.slots import ROW, SlotTable, row_slots

# Powers of two: rescaling is exact. 2^31 squares of values up to 2^128 * DOWN stay
# finite; values whose squares sum to less than SMALL stay so times UP^2.
_SMALL, UP, DOWN = 2.0**-64, 2.0**80, 2.0**-96


def _row_sums_of_squares(x: jax.Array) -> jax.Array:
    """Sum squares by rows of 128: partial sums bound the rounding of long sums."""
    rows = x.reshape(-1, ROW) if x.size % ROW == 0 else x[None]
    return jnp.sum(jnp.square(rows), axis=1)


def _opaque(factor: float) -> jax.Array:
    """Hide a factor from XLA, which would rewrite (x c)(x c) as x x (c c).

    The square of the factor underflows or overflows where that of x c does not.
    """
    return lax.optimization_barrier(jnp.float32(factor))


def check_finite(
    grads: jax.Array,
    scale: jax.Array,
    clamp: bool,
    bounds: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (flag bool[], norm f32[] of ``grads / scale``) of a range."""
    if bounds is not None:
        grads = grads[slice(*bounds)]
    total = jnp.sum(_row_sums_of_squares(grads))
    second_look = _nan_only if clamp else _nan_or_inf
    flag, norm = lax.cond(
        _is_ordinary(total), _ordinary, second_look, total, grads, scale
    )
    return flag, jnp.where(flag, jnp.float32(jnp.nan), norm)


def verdict(
    total: jax.Array, down: jax.Array, up: jax.Array, scale: jax.Array, clamp: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (flag, norm) from all three sums of squares of one pass.

    Args:
        total: f32[], of the gradients.
        down: f32[], of the gradients times `DOWN`.
        up: f32[], of the gradients times `UP`.
        scale: f32[], the loss scale.
        clamp: whether only NaN sets the flag.
    """
    flag = is_nan(down) if clamp else ~is_finite(down)
    rescaled = _rescaled_norm(total, down, up, scale)
    norm = jnp.where(_is_ordinary(total), jnp.sqrt(total) / scale, rescaled)
    return flag, jnp.where(flag, jnp.float32(jnp.nan), norm)


def _is_ordinary(total: jax.Array) -> jax.Array:
    return is_finite(total) & (total >= _SMALL)


# Branches are module functions over operands: an eager `cond` over fresh closures
# would compile at every call.
def _ordinary(
    total: jax.Array, grads: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((), jnp.bool_), jnp.sqrt(total) / scale


def _rescaled(
    total: jax.Array, grads: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a sum of squares that is finite iff all gradients are, and the norm.

    Neither sum waits for `total`: where XLA turns the conditional into a select (seen
    on GPU), both join the pass that computes it.
    """
    down = jnp.sum(_row_sums_of_squares(grads * _opaque(DOWN)))
    up = jnp.sum(_row_sums_of_squares(grads * _opaque(UP)))
    return down, _rescaled_norm(total, down, up, scale)


def _rescaled_norm(
    total: jax.Array, down: jax.Array, up: jax.Array, scale: jax.Array
) -> jax.Array:
    norm_down = jnp.sqrt(down) / (jnp.float32(DOWN) * scale)
    norm_up = jnp.sqrt(up) / (jnp.float32(UP) * scale)
    return jnp.where(total < _SMALL, norm_up, norm_down)


@jax.named_scope("second_look")
def _nan_only(
    total: jax.Array, grads: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    down, norm = _rescaled(total, grads, scale)
    return is_nan(down), norm


@jax.named_scope("second_look")
def _nan_or_inf(
    total: jax.Array, grads: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    down, norm = _rescaled(total, grads, scale)
    return ~is_finite(down), norm


def nonfinite_slots(
    grads: jax.Array, wanted: jax.Array | None, table: SlotTable, clamp: bool
) -> jax.Array:
    """Return bool[slots]: which slots hold an element that sets the flag, if wanted."""
    sums = _row_sums_of_squares(grads * _opaque(DOWN))
    bad = is_nan(sums) if clamp else ~is_finite(sums)
    marks = jax.ops.segment_max(
        bad.astype(jnp.int32),
        row_slots(table),
        num_segments=len(table.rows),
        indices_are_sorted=True,
    )
    return marks > 0 if wanted is None else wanted & (marks > 0)
