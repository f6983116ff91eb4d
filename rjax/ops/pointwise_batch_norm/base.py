"""The passes of a pointwise batch norm in plain jnp.

Matrices of weights and of second moments are small; what has a row for every pixel is
read and written as rarely as can be. Inside, values are float32; what is stored is
rounded once.

XLA on GPU has one kernel of cuDNN for a convolution, a bias, an addend and a clamp in
half precision, if they are written as such; it computes in float32 and rounds once.
Elsewhere XLA would round at every step, and the sum is written in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm.base import like, stored
from rjax.ops.batch_norm.moments import column_sums
from rjax.ops.batch_norm.training import run_pass

_HIGHEST = lax.Precision.HIGHEST


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product of small float32 matrices, in full float32."""
    return jnp.matmul(a, b, precision=_HIGHEST)


def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and covariance of the channels of x.

    The products are of values that lie near zero, or a mean far above the spread would
    cancel.

    Args:
        x: `[*batch, channels]`.

    Returns:
        float32[channels] and float32[channels, channels].
    """
    mean, _ = run_pass("statistics", x, implementation=None)
    near = mean.astype(x.dtype)
    left = mean - near.astype(jnp.float32)
    rows = _rows(x) - near[None]
    return mean, cross(rows, rows) / float(rows.shape[0]) - jnp.outer(left, left)


def cross(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `a.T @ b` over all rows in float32: `[channels of a, channels of b]`."""
    precision = _HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        _rows(a),
        _rows(b),
        (((0,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def project(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    relu: bool,
) -> jax.Array:
    """Return `x @ kernel + bias`, plus `residual`, clamped at 0, in the dtype of x.

    Args:
        x: `[*batch, inputs]`.
        kernel: `[inputs, outputs]` in the dtype of x.
        bias: float32[outputs].
        residual: `[*batch, outputs]` in the dtype of x.
        relu: whether to clamp.
    """
    added = () if residual is None else (residual,)
    fused = functools.partial(_fused, relu=relu)
    y = lax.platform_dependent(
        x, kernel, bias, *added, cuda=fused, default=functools.partial(_sum, relu=relu)
    )
    return lax.optimization_barrier(y)


def mask(dys: tuple[jax.Array, ...], y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return sums by channel of dz, the gradient where y is above 0, and dz.

    Args:
        dys: gradients of the uses of y, of its shape and dtype.
        y: what was clamped at 0.

    Returns:
        float32[channels], and an array like y.
    """
    total = column_sums(_rows(_dz(dys, y)))
    # Or XLA writes a mask, which is more than to read y.
    y = lax.optimization_barrier(y)
    return total, stored(_dz(dys, y), y.dtype)


def total(dz: jax.Array) -> jax.Array:
    """Return the sums of dz by channel, in float32."""
    return column_sums(_rows(dz.astype(jnp.float32)))


def back(
    dz: jax.Array,
    kernel: jax.Array,
    x: jax.Array,
    steps: jax.Array,
    unit: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """Return `dz @ kernel.T - unit * (x @ steps) + bias` in the dtype of x.

    Args:
        dz: `[*batch, outputs]`.
        kernel: `[inputs, outputs]` in the dtype of x.
        x: `[*batch, inputs]`.
        steps: `[inputs, inputs]` in the dtype of x.
        unit: float32[].
        bias: float32[inputs].
    """
    correction = _matmul(x, steps)
    correction *= like(x, jnp.broadcast_to(-unit, bias.shape))
    return lax.platform_dependent(
        dz, kernel.T, bias, correction, cuda=_stored_and_fused, default=_sum
    )


def in_units(slope: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return a matrix, which may be too small for half precision, as half and unit.

    The unit is a power of two: exact, but for values 2^14 below the largest.
    """
    largest = jnp.max(jnp.abs(slope))
    unit = jnp.exp2(jnp.floor(jnp.log2(jnp.where(largest > 0.0, largest, 1.0))))
    unit = jnp.clip(unit, 2.0**-100, 2.0**100)
    return (slope / unit).astype(dtype), unit


def convolve(y: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return a 1x1 convolution, as `lax` has it, in the dtype of both."""
    images = y.reshape((-1, 1, 1, y.shape[-1])) if y.ndim != 4 else y
    z = lax.conv_general_dilated(
        images,
        kernel[None, None],
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return z.reshape(*y.shape[:-1], -1)


def unconvolve(dafter: jax.Array, after: jax.Array, y: jax.Array) -> jax.Array:
    """Return the gradient of :func:`convolve` with respect to y."""
    return jax.vjp(lambda y: convolve(y, after), y)[1](dafter)[0]


def kernel_gradient(dafter: jax.Array, after: jax.Array, y: jax.Array) -> jax.Array:
    """Return the gradient of :func:`convolve` with respect to the kernel."""
    return jax.vjp(lambda kernel: convolve(y, kernel), after)[1](dafter)[0]


def _stored_and_fused(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, added: jax.Array
) -> jax.Array:
    return _fused(x, kernel, bias, stored(added, x.dtype))


def _fused(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    *added: jax.Array,
    relu: bool = False,
) -> jax.Array:
    """Return what `_sum` does, in the form that XLA knows as one kernel of cuDNN."""
    z = convolve(x, kernel)
    z += like(z, bias.astype(x.dtype))
    z = functools.reduce(jnp.add, added, z)
    return jnp.maximum(z, 0) if relu else z


def _sum(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    *added: jax.Array,
    relu: bool = False,
) -> jax.Array:
    z = _matmul(x, kernel)
    z += like(z, bias)
    z = functools.reduce(jnp.add, [a.astype(jnp.float32) for a in added], z)
    return (jnp.maximum(z, 0.0) if relu else z).astype(x.dtype)


def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _dz(dys: tuple[jax.Array, ...], y: jax.Array) -> jax.Array:
    dz = functools.reduce(jnp.add, [dy.astype(jnp.float32) for dy in dys])
    return jnp.where(y > 0.0, dz, 0.0)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
