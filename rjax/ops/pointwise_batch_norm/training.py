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
from rjax.ops.batch_norm.training import AxisName, psums, values_per_channel
from rjax.ops.dispatch import resolve
from rjax.ops.pointwise_batch_norm import base, mosaic_gpu, mosaic_products

_OP = "pointwise_batch_norm"
_Outputs = tuple[Any, jax.Array, jax.Array]


class How(NamedTuple):
    """What is decided before anything runs.

    Attributes:
        eps: added to the variance.
        relu: whether the result is clamped at zero.
        residual: whether an array is added before that.
        twice: whether the result is returned as a pair.
        after: whether it is returned with a 1x1 convolution of it.
        axis_name: mesh axes whose devices share their statistics.
    """

    eps: float
    relu: bool
    residual: bool
    twice: bool
    after: bool
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
    after: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pointwise_batch_norm(
    how: How,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    after: jax.Array | None,
) -> _Outputs:
    """Return (y or a pair with it, mean, biased var); see the API page."""
    return _forward(how, x, kernel, scale, bias, residual, after)[0]


def _forward(
    how: How,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    after: jax.Array | None,
) -> tuple[_Outputs, Saved]:
    n, wide = values_per_channel(x, None), kernel.astype(jnp.float32)
    centre, spread = moments(x)
    squares = float(n) * jnp.sum(wide * base.product(spread, wide), axis=0)
    local = base.product(centre, wide)
    mean, var, shared = _over_devices(
        local, jnp.maximum(squares, 0.0), centre, n, how.axis_name
    )
    istd = lax.rsqrt(var + how.eps)
    folded = _folded(kernel, scale, istd)
    # Of the rounded weights: the result then has the mean that it should have.
    moved = base.product(shared, folded.astype(jnp.float32))
    y = base.project(x, folded, bias.astype(jnp.float32) - moved, residual, how.relu)
    kept = y if how.relu else None
    saved = Saved(
        x, kernel, scale, bias, centre, spread, shared, mean, istd, kept, after
    )
    if after is not None:
        return ((y, base.convolve(y, after)), mean, var), saved
    return ((y, y) if how.twice else y, mean, var), saved


def _over_devices(
    mean: jax.Array, squares: jax.Array, centre: jax.Array, n: int, axis: AxisName
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean and variance of the result and mean of the input, of all devices."""
    if axis is None:
        return *merge_devices(mean, squares, n, axis), centre
    # In one exchange: the input's have no squares of their own.
    means = jnp.concatenate([mean, centre])
    means, var = merge_devices(means, jnp.pad(squares, (0, centre.size)), n, axis)
    return means[: mean.size], var[: mean.size], means[mean.size :]


def _backward(how: How, saved: Saved, cts: _Outputs) -> tuple[Any, ...]:
    x, kernel, scale, bias, centre, spread, shared, mean, istd, y, after = saved
    # The statistics are not differentiable outputs.
    pair = how.twice or how.after
    dys: Any = tuple(cts[0]) if pair else (cts[0],)
    dafter = None
    if after is not None:
        assert y is not None, "the API page asks for a ReLU"
        dy, gradient = dys
        dafter = base.kernel_gradient(gradient, after, y)
        dbias, dz = pull(dy, gradient, after, y)
    elif y is None:
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
    dz_mean, mean_product = (s / n for s in psums(dbias, products, how.axis_name))
    slope = mean_product * istd * istd
    with_z = base.product(spread, wide) + jnp.outer(centre, off)
    kept = jnp.outer(centre, dz_mean) + with_z * slope[None]
    dkernel = (crossed - local * kept) * factor[None]
    folded = _folded(kernel, scale, istd)
    narrow = folded.astype(jnp.float32)
    slopes = base.product(wide * slope[None], narrow.T)
    moved = base.product(shared, slopes) - base.product(narrow, dz_mean)
    steps, unit = base.in_units(slopes, x.dtype)
    dx = back(dz, folded, x, steps, unit, moved)
    return (
        dx,
        dkernel.astype(kernel.dtype),
        (products * istd).astype(scale.dtype),
        dbias.astype(bias.dtype),
        dz if how.residual else None,
        dafter,
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
    return resolve(_OP, implementation, serve, size)(dys, y)


def moments(
    x: jax.Array, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return `base.moments`, by what serves it."""
    why = mosaic_products.why_not(x)
    serve: dict[str, Any] = {
        "xla": base.moments,
        "mosaic_gpu": why or mosaic_products.moments,
    }
    size = mosaic_products.op_name("moments", x.shape[-1]), x.size
    return resolve(_OP, implementation, serve, size)(x)


def back(
    dz: jax.Array,
    kernel: jax.Array,
    x: jax.Array,
    steps: jax.Array,
    unit: jax.Array,
    bias: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """Return `base.back`, by what serves it."""
    why = mosaic_products.why_not(x, dz.shape[-1])
    serve: dict[str, Any] = {
        "xla": base.back,
        "mosaic_gpu": why or mosaic_products.back,
    }
    size = mosaic_products.op_name("back", x.shape[-1]), x.size
    run = resolve(_OP, implementation, serve, size)
    return lax.optimization_barrier(run(dz, kernel, x, steps, unit, bias))


def pull(
    dy: jax.Array,
    dafter: jax.Array,
    after: jax.Array,
    y: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return :func:`mask` of two gradients, that of a 1x1 convolution of y being one.

    Args:
        dy: gradient of the other use, like y.
        dafter: `[*batch, features]`, gradient of the convolution.
        after: its kernel, `[channels, features]` in the dtype of y.
        y: `[*batch, channels]`, what was clamped at 0.
        implementation: as in :func:`mask`.
    """
    why = mosaic_products.why_not(y, dafter.shape[-1])
    serve: dict[str, Any] = {
        "xla": _pull,
        "mosaic_gpu": why or mosaic_products.pull,
    }
    size = mosaic_products.op_name("pull", y.shape[-1]), y.size
    return resolve(_OP, implementation, serve, size)(dy, dafter, after, y)


def _pull(
    dy: jax.Array, dafter: jax.Array, after: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return mask((dy, base.unconvolve(dafter, after, y)), y)


def _folded(kernel: jax.Array, scale: jax.Array, istd: jax.Array) -> jax.Array:
    factor = scale.astype(jnp.float32) * istd
    wide = kernel.astype(jnp.float32) * factor[None]
    return lax.optimization_barrier(wide.astype(kernel.dtype))
