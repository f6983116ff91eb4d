"""A batch norm that can be differentiated, put together from its passes.

Forward: statistics, apply. Backward: reduce, gradient. Each pass reads every array once
and is served by XLA (:mod:`rjax.ops.batch_norm.base`) or by a kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm import base, mosaic_gpu
from rjax.ops.batch_norm.moments import merge_devices
from rjax.ops.dispatch import resolve
from rjax.ops.max_pool.window import Window

AxisName = str | tuple[str, ...] | None
_Outputs = tuple[Any, jax.Array, jax.Array]


class How(NamedTuple):
    """What is decided before anything runs.

    Attributes:
        eps: added to the variance.
        relu: whether the result is clamped at zero.
        window: how it is pooled then, if it is.
        axis_name: mesh axes whose devices share their statistics.
        residual: whether an array is added before that.
        twice: whether the result is returned as a pair.
        implementation: of every pass, `None` to choose.
    """

    eps: float
    relu: bool
    residual: bool
    twice: bool
    window: Window | None
    axis_name: AxisName
    implementation: str | None


class Saved(NamedTuple):
    """What the backward pass keeps; `y` only where a residual was added and clamped."""

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    istd: jax.Array
    y: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def batch_norm(
    how: How,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> _Outputs:
    """Return (y or a pair of it, mean, biased var); see the API page."""
    return _forward(how, x, scale, bias, residual)[0]


def run_pass(
    name: str,
    *arrays: Any,
    implementation: str | None,
    **options: Any,
) -> Any:
    """Run a pass by what serves it.

    Args:
        name: of the pass, a function of `base` and of `mosaic_gpu`.
        *arrays: what was normalised, then the others.
        implementation: `None` to choose.
        **options: `relu` and `window`, where the pass has them.

    Raises:
        NotImplementedError: if the implementation named cannot serve.
    """
    x = arrays[0]
    serve: dict[str, Any] = {
        "xla": _traced_once(name, **options),
        "mosaic_gpu": mosaic_gpu.why_not(name, x, options.get("window"))
        or functools.partial(getattr(mosaic_gpu, name), **options),
    }
    image = arrays[-1] if name in ("apply", "reduce") else None
    op = mosaic_gpu.op_name(name, x, options.get("window"), image)
    return resolve(f"batch_norm/{name}", implementation, serve, (op, x.size))(*arrays)


@functools.cache
def _traced_once(name: str, **options: Any) -> Any:
    """Return a pass by XLA that is traced once for all arrays of one shape and dtype.

    A deep network has many of the same kind, and much of its tracing is in them.
    Inlined, nothing of it is seen in the program.
    """
    return jax.jit(functools.partial(getattr(base, name), **options), inline=True)


def values_per_channel(x: jax.Array, axis_name: AxisName) -> int:
    """Return how many values each channel has, over all devices of the axes."""
    devices = 1 if axis_name is None else lax.axis_size(axis_name)
    return devices * (x.size // max(x.shape[-1], 1))


def _forward(
    how: How,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> tuple[_Outputs, Saved]:
    run = functools.partial(run_pass, implementation=how.implementation)
    mean, squares = run("statistics", x)
    n = values_per_channel(x, None)
    mean, var = merge_devices(mean, squares, n, how.axis_name)
    istd = lax.rsqrt(var + how.eps)
    vectors = _vectors(scale, bias, mean, istd)
    y = run("apply", x, *vectors, residual, relu=how.relu, window=how.window)
    kept = y if how.relu and how.residual else None
    ys = (y, y) if how.twice else y
    return (ys, mean, var), Saved(x, scale, bias, mean, istd, kept)


def _backward(how: How, saved: Saved, cts: _Outputs) -> tuple[Any, ...]:
    x, scale, bias, mean, istd, y = saved
    # The statistics are not differentiable outputs.
    dys: tuple[jax.Array, ...] = tuple(cts[0]) if how.twice else (cts[0],)
    options: dict[str, Any] = {"relu": how.relu, "window": how.window}
    if y is not None and not how.twice:
        # The gradient may be a broadcast, of a mean over images: it is never written.
        dys, y, options["relu"] = (base.masked(dys[0], y),), None, False
    else:
        # Or XLA computes masks and places of the largest values in the forward pass,
        # and keeps those too.
        x, y, dys = lax.optimization_barrier((x, y, dys))
    if y is None:  # both passes would have to read them
        dys = (functools.reduce(jnp.add, dys),)
    vectors = _vectors(scale, bias, mean, istd)
    run = functools.partial(run_pass, implementation=how.implementation)
    dbias, product, dz = run("reduce", x, dys, *vectors, y, **options)
    dy = dys[0]
    if dz is not None:
        dy, options["relu"] = dz, False
    # dx needs the sums over every device, the parameters' own gradients stay local:
    # the caller reduces those together with all others.
    n = float(values_per_channel(x, how.axis_name))
    dz_mean, mean_product = (s / n for s in psums(dbias, product, how.axis_name))
    slope = mean_product * istd * istd
    if how.window is None:  # or XLA writes a mask for both passes, and reads it twice
        x, dy = lax.optimization_barrier((x, dy))
    dx = run("gradient", x, dy, *vectors, dz_mean, slope, **options)
    dscale = (product * istd).astype(scale.dtype)
    return dx, dscale, dbias.astype(bias.dtype), dy if how.residual else None


batch_norm.defvjp(_forward, _backward)


def _vectors(
    scale: jax.Array, bias: jax.Array, mean: jax.Array, istd: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the three vectors that make the result from x."""
    return mean, scale.astype(jnp.float32) * istd, bias.astype(jnp.float32)


def psums(
    a: jax.Array, b: jax.Array, axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    """Return two sums over the mesh axes in one exchange, a and b without any axes."""
    if axis_name is None:
        return a, b
    a, b = lax.psum(jnp.stack([a, b]), axis_name)
    return a, b
