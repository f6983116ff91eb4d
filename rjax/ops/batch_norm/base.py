"""Batch norm in plain jnp: reference, fallback and documentation.

Inside, x is rows of channels, `[n, channels]` in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm.running import fold

AxisName = str | tuple[str, ...] | None
_Outputs = tuple[jax.Array, jax.Array, jax.Array]
_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

# Rows summed one after the other before partial sums are combined: a long running sum
# in float32 rounds every addend to its own large unit.
_BLOCK = 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    eps: float,
    relu: bool,
    axis_name: AxisName,
) -> _Outputs:
    """Return (y, mean, biased var); see the API page."""
    return _forward(x, scale, bias, eps, relu, axis_name)[0]


def batch_norm_inference(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    eps: float,
    relu: bool,
) -> jax.Array:
    """Return y from given statistics; see the API page."""
    eq_scale, eq_bias = fold(scale, bias, mean, var, eps)
    z = _rows(x) * eq_scale[None] + eq_bias[None]
    z = jnp.maximum(z, 0.0) if relu else z
    return z.astype(x.dtype).reshape(x.shape)


def values_per_channel(x: jax.Array, axis_name: AxisName) -> int:
    """Return how many values each channel has, over all devices of the axes."""
    devices = 1 if axis_name is None else lax.axis_size(axis_name)
    return devices * (x.size // max(x.shape[-1], 1))


def _forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    eps: float,
    relu: bool,
    axis_name: AxisName,
) -> tuple[_Outputs, _Residuals]:
    mean, var = _statistics(_rows(x), values_per_channel(x, axis_name), axis_name)
    istd = lax.rsqrt(var + eps)
    _, z = _normalise(x, scale, bias, mean, istd)
    y = jnp.maximum(z, 0.0) if relu else z
    y = y.astype(x.dtype).reshape(x.shape)
    return (y, mean, var), (x, scale, bias, mean, istd)


def _backward(
    eps: float, relu: bool, axis_name: AxisName, residuals: _Residuals, cts: _Outputs
) -> _Outputs:
    del eps
    x, scale, bias, mean, istd = residuals
    n = float(values_per_channel(x, axis_name))
    xhat, z = _normalise(x, scale, bias, mean, istd)
    dy = _rows(cts[0])  # the statistics are not differentiable outputs
    if relu:
        dy = jnp.where(z > 0.0, dy, 0.0)
    dbias, dscale = _column_sums(dy), _column_sums(dy * xhat)
    # dx needs the sums over every device, the parameters' own gradients stay local:
    # the caller reduces those together with all others.
    mean_dy, mean_dy_xhat = (_psum(s, axis_name)[None] / n for s in (dbias, dscale))
    factor = (scale.astype(jnp.float32) * istd)[None]
    dx = factor * (dy - mean_dy - xhat * mean_dy_xhat)
    dx = dx.astype(x.dtype).reshape(x.shape)
    return dx, dscale.astype(scale.dtype), dbias.astype(bias.dtype)


batch_norm.defvjp(_forward, _backward)


def _statistics(
    rows: jax.Array, n: int, axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    """Return mean and biased variance, safe where |mean| is far above the spread.

    The second pass centres on the rounded mean of the first, and what that rounding
    left over corrects both results.
    """
    rough = _psum(_column_sums(rows), axis_name) / float(n)
    centred = rows - rough[None]
    rest = _psum(_column_sums(centred), axis_name) / float(n)
    square = _psum(_column_sums(centred * centred), axis_name) / float(n)
    return rough + rest, jnp.maximum(square - rest * rest, 0.0)


def _normalise(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, istd: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the standardised rows, and their scaled and shifted form."""
    xhat = (_rows(x) - mean[None]) * istd[None]
    scale, bias = scale.astype(jnp.float32), bias.astype(jnp.float32)
    return xhat, xhat * scale[None] + bias[None]


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1]).astype(jnp.float32)


def _column_sums(rows: jax.Array) -> jax.Array:
    """Sum `[n, channels]` over n as a tree of blocks."""
    while rows.shape[0] > _BLOCK:
        rows = jnp.pad(rows, ((0, -rows.shape[0] % _BLOCK), (0, 0)))
        rows = rows.reshape(-1, _BLOCK, rows.shape[-1]).sum(1)
        rows = lax.optimization_barrier(rows)  # or XLA merges the levels into one
    return rows.sum(0)


def _psum(x: jax.Array, axis_name: AxisName) -> jax.Array:
    return x if axis_name is None else lax.psum(x, axis_name)
