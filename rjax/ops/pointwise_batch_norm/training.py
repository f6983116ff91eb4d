"""A pointwise batch norm that can be differentiated, put together from its passes.

With `z = x @ kernel`, all that a batch norm wants to know of z follows from the mean m
and the covariance C of x: `m @ kernel` and the diagonal of `kernel.T @ C @ kernel`.
Norm and kernel are then one product with `kernel * factor`. On the way back
`dz = factor * (g - mean(g) - (z - mean(z)) * slope)` is linear in g and in z, so that
both `x.T @ dz` and `dz @ kernel.T` are products of g and of x with small matrices.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm.moments import merge_devices
from rjax.ops.batch_norm.training import (
    AxisName,
    psum,
    run_pass,
    values_per_channel,
)
from rjax.ops.dispatch import resolve
from rjax.ops.pointwise_batch_norm import base, mosaic_gpu

_Outputs = tuple[Any, jax.Array, jax.Array]


class How(NamedTuple):
    """What is decided before anything runs.

    Attributes:
        eps: added to the variance.
        relu: whether the result is clamped at zero.
        residual: whether an array is added before that.
        twice: whether the result is returned as a pair.
        axis_name: mesh axes whose devices share their statistics.
    """

    eps: float
    relu: bool
    residual: bool
    twice: bool
    axis_name: AxisName


class Saved(NamedTuple):
    """What the backward pass keeps; `y` only where it was clamped.

    `centre` and `spread` are mean and covariance of the local x, `shared` its mean over
    all devices; `mean` and `istd` those of z over all devices.
    """

    x: jax.Array
    kernel: jax.Array
    scale: jax.Array
    bias: jax.Array
    centre: jax.Array
    spread: jax.Array
    shared: jax.Array
    mean: jax.Array
    istd: jax.Array
    y: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pointwise_batch_norm(
    how: How,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> _Outputs:
    """Return (y or a pair of it, mean, biased var); see the API page."""
    return _forward(how, x, kernel, scale, bias, residual)[0]


def _forward(
    how: How,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> tuple[_Outputs, Saved]:
    n, wide = values_per_channel(x, None), kernel.astype(jnp.float32)
    centre, _ = run_pass("statistics", x, implementation=None)
    spread = base.second_moments(x, centre)
    squares = float(n) * jnp.sum(wide * base.product(spread, wide), axis=0)
    local = base.product(centre, wide)
    mean, var = merge_devices(local, jnp.maximum(squares, 0.0), n, how.axis_name)
    shared, _ = merge_devices(centre, jnp.zeros_like(centre), n, how.axis_name)
    istd = lax.rsqrt(var + how.eps)
    folded = _folded(kernel, scale, istd)
    # Of the rounded weights: the result then has the mean that it should have.
    moved = base.product(shared, folded.astype(jnp.float32))
    y = base.project(x, folded, bias.astype(jnp.float32) - moved, residual, how.relu)
    ys = (y, y) if how.twice else y
    kept = y if how.relu else None
    saved = Saved(x, kernel, scale, bias, centre, spread, shared, mean, istd, kept)
    return (ys, mean, var), saved


def _backward(how: How, saved: Saved, cts: _Outputs) -> tuple[Any, ...]:
    x, kernel, scale, bias, centre, spread, shared, mean, istd, y = saved
    # The statistics are not differentiable outputs.
    dys: tuple[jax.Array, ...] = tuple(cts[0]) if how.twice else (cts[0],)
    if y is None:
        dz = lax.optimization_barrier(functools.reduce(jnp.add, dys))
        dbias = base.total(dz)
    else:
        dbias, dz = mask(dys, y)
    x, dz = lax.optimization_barrier((x, dz))
    wide, factor = kernel.astype(jnp.float32), scale.astype(jnp.float32) * istd
    crossed = base.cross(x, dz)
    # How far the mean of this device is from that of all.
    off = base.product(centre, wide) - mean
    products = jnp.sum(wide * (crossed - jnp.outer(centre, dbias)), axis=0)
    products += off * dbias
    # dx needs the sums over every device, the parameters' own gradients stay local.
    n, local = float(values_per_channel(x, how.axis_name)), float(x.size // len(wide))
    dz_mean, mean_product = (psum(s, how.axis_name) / n for s in (dbias, products))
    slope = mean_product * istd * istd
    with_z = base.product(spread, wide) + jnp.outer(centre, off)
    kept = jnp.outer(centre, dz_mean) + with_z * slope[None]
    dkernel = (crossed - local * kept) * factor[None]
    folded = _folded(kernel, scale, istd)
    narrow = folded.astype(jnp.float32)
    slopes = base.product(wide * slope[None], narrow.T)
    moved = base.product(shared, slopes) - base.product(narrow, dz_mean)
    dx = base.back(dz, folded, x, slopes, moved)
    return (
        dx,
        dkernel.astype(kernel.dtype),
        (products * istd).astype(scale.dtype),
        dbias.astype(bias.dtype),
        dz if how.residual else None,
    )


pointwise_batch_norm.defvjp(_forward, _backward)


def mask(
    dys: tuple[jax.Array, ...], y: jax.Array, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return `base.mask`, by what serves it.

    Raises:
        NotImplementedError: if the implementation named cannot serve.
    """
    serve: dict[str, Any] = {
        "xla": base.mask,
        "mosaic_gpu": mosaic_gpu.why_not(y) or mosaic_gpu.mask,
    }
    size = mosaic_gpu.op_name(len(dys)), y.size
    return resolve("pointwise_batch_norm", implementation, serve, size)(dys, y)


def _folded(kernel: jax.Array, scale: jax.Array, istd: jax.Array) -> jax.Array:
    factor = scale.astype(jnp.float32) * istd
    wide = kernel.astype(jnp.float32) * factor[None]
    return lax.optimization_barrier(wide.astype(kernel.dtype))
