"""The passes of a batch norm in plain jnp: reference, fallback and documentation.

Vectors are f32[channels]. Inside, values are float32; what is stored is rounded once.
`window` pools the result: a window of it keeps its largest value, and that one's
gradient goes to the first element that has it. As `(x - mean) * factor + bias` rises
with x, or falls where the factor is negative, and so do its roundings, that element is
found in x: what is pooled has a fraction of the size before anything is computed.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm.moments import column_sums, moments
from rjax.ops.max_pool.base import first_largest, pooled, spread
from rjax.ops.max_pool.window import Window


def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and sum of squared deviations of each channel."""
    return moments(_rows(x))


def apply(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    relu: bool,
    window: Window | None,
) -> jax.Array:
    """Return `(x - mean) * factor + bias`, plus `residual`, clamped at 0, pooled."""
    if window is not None:
        x = _signed(pooled(_signed(x, factor), window), factor)
    z = scaled(x, mean, factor, bias)
    z = z if residual is None else z + residual.astype(jnp.float32)
    z = jnp.maximum(z, 0.0) if relu else z
    return stored(z, x.dtype)


def reduce(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    y: jax.Array | None,
    relu: bool,
    window: Window | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the sums of dz and of `dz * (x - mean)`, and dz where y was needed for it.

    Args:
        x: what was normalised.
        dys: gradients of the uses of the result, of its shape and dtype.
        mean: as in :func:`apply`.
        factor: as in :func:`apply`.
        bias: as in :func:`apply`.
        y: the result where a residual was added and clamped, else `None`.
        relu: whether the result was clamped: then dz is 0 where it is 0.
        window: how it was pooled.

    Returns:
        f32[channels] twice, and dz in the dtype of x, or `None`.
    """
    if window is not None:
        x, _ = winners(x, mean, factor, bias, relu, window)
    dz = _dz(x, dys, mean, factor, bias, y, relu)
    products = dz * _centred(x, mean)
    sums = column_sums(_rows(dz)), column_sums(_rows(products))
    if y is None:
        return *sums, None
    # Or XLA writes a mask for the three results, which is more than to read y.
    y = lax.optimization_barrier(y)
    return *sums, stored(_dz(x, dys, mean, factor, bias, y, relu), x.dtype)


def gradient(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    dz_mean: jax.Array,
    slope: jax.Array,
    relu: bool,
    window: Window | None,
) -> jax.Array:
    """Return `factor * (dz - dz_mean - (x - mean) * slope)` in the dtype of x.

    Args:
        x: what was normalised.
        dy: gradient of the result, or dz where neither `relu` nor `window` is given.
        mean: as in :func:`apply`.
        factor: as in :func:`apply`.
        bias: as in :func:`apply`.
        dz_mean: mean of dz.
        slope: mean of `dz * (x - mean)`, over the variance.
        relu: as in :func:`reduce`.
        window: as in :func:`reduce`.
    """
    if window is None:
        dz = _dz(x, (dy,), mean, factor, bias, None, relu)
    else:
        _, index = winners(x, mean, factor, bias, relu, window)
        wide = dy.astype(jnp.float32) if window.overlaps else dy
        dz = spread(index, wide, window, x.shape).astype(jnp.float32)
    factor, dz_mean, slope = (like(x, v) for v in (factor, dz_mean, slope))
    return stored(factor * (dz - dz_mean - _centred(x, mean) * slope), x.dtype)


def masked(dy: jax.Array, y: jax.Array) -> jax.Array:
    """Return the gradient before the clamp whose result was y."""
    return stored(jnp.where(y > 0.0, dy, 0.0), dy.dtype)


def stored(value: jax.Array, dtype: Any) -> jax.Array:
    """Return what a pass writes.

    Behind a barrier, or XLA takes a rounding and the widening in a later pass for
    nothing, and keeps float32 in memory instead.
    """
    return lax.optimization_barrier(value.astype(dtype))


def _dz(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    y: jax.Array | None,
    relu: bool,
) -> jax.Array:
    """Return the gradient before the clamp, in float32."""
    dz = functools.reduce(operator.add, [dy.astype(jnp.float32) for dy in dys])
    if not relu:
        return dz
    z = scaled(x, mean, factor, bias) if y is None else y
    return jnp.where(z > 0.0, dz, 0.0)


def winners(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    relu: bool,
    window: Window,
) -> tuple[jax.Array, jax.Array]:
    """Return of each window the x whose result is the largest, and where it is.

    The place is -1 where the clamp lets no gradient through.
    """
    signed = _signed(x, factor)
    index = first_largest(signed, window)
    largest = _signed(pooled(signed, window), factor)
    if relu:
        clear = scaled(largest, mean, factor, bias) > 0.0
        index = jnp.where(clear, index, jnp.int8(-1))
    return lax.optimization_barrier((largest, index))  # each is found once


def _signed(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x, or -x where the factor is negative; its own inverse."""
    return jnp.where(like(x, factor) < 0.0, -x, x)


def scaled(
    x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array
) -> jax.Array:
    """Return `(x - mean) * factor + bias` in float32."""
    return _centred(x, mean) * like(x, factor) + like(x, bias)


def _centred(x: jax.Array, mean: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) - like(x, mean)


def like(x: jax.Array, vector: jax.Array) -> jax.Array:
    """Return a `[channels]` vector with as many axes as x."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]).astype(jnp.float32)
