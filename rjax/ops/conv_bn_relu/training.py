"""A convolution between two norms that can be differentiated.

Forward: the input is normed, convolved, and the statistics of the stored result are
taken. Backward: what the statistics are wanted for joins the gradient of the result,
the convolution goes back, and the gradient of the normed input is masked and summed.
Only x and z, which the layers before and after keep as well, and vectors are kept; the
normed input is formed again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm import base
from rjax.ops.batch_norm.base import like, stored
from rjax.ops.batch_norm.moments import merge_devices
from rjax.ops.batch_norm.training import (
    AxisName,
    psums,
    run_pass,
    values_per_channel,
)
from rjax.ops.conv_bn_relu.norm import Norm
from rjax.ops.manual_axes import align

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


class How(NamedTuple):
    """What is decided before anything runs.

    Attributes:
        strides: along height and width.
        padding: as `lax.conv_general_dilated` takes it.
        groups: of channels, convolved by themselves.
        axis_name: mesh axes whose devices share their statistics.
        implementation: of every pass, `None` to choose.
    """

    strides: tuple[int, int]
    padding: str | tuple[tuple[int, int], ...]
    groups: int
    axis_name: AxisName
    implementation: str | None


class Saved(NamedTuple):
    """What the backward pass keeps."""

    x: jax.Array
    kernel: jax.Array
    norm: Norm | None
    z: jax.Array
    mean: jax.Array


_Outputs = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def conv(how: How, x: jax.Array, kernel: jax.Array, norm: Norm | None) -> _Outputs:
    """Return (z, mean, biased var); see the API page."""
    return _forward(how, x, kernel, norm)[0]


def convolve(how: How, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the convolution, accumulated in float32, rounded to the dtype of x."""
    return lax.conv_general_dilated(
        x,
        kernel,
        how.strides,
        how.padding,
        dimension_numbers=_DIMENSIONS,
        feature_group_count=how.groups,
    )


def _forward(
    how: How, x: jax.Array, kernel: jax.Array, norm: Norm | None
) -> tuple[_Outputs, Saved]:
    z = convolve(how, _normed(how, x, norm), kernel)
    mean, squares = run_pass("statistics", z, implementation=how.implementation)
    n = values_per_channel(z, None)
    mean, var = merge_devices(mean, squares, n, how.axis_name)
    # Each device differentiates its own copy; the backward pass adds them up.
    z, mean, var = align(z, mean, var)
    return (z, mean, var), Saved(x, kernel, norm, z, mean)


def _backward(how: How, saved: Saved, cts: _Outputs) -> tuple[Any, ...]:
    # Or XLA forms the normed input in the forward pass, and keeps it.
    (x, kernel, norm, z, mean), (dz, dmean, dvar) = lax.optimization_barrier(
        (saved, cts)
    )
    dz = _with_statistics(how, z, mean, dz, dmean, dvar)
    _, pull = jax.vjp(functools.partial(convolve, how), _normed(how, x, norm), kernel)
    dx, dkernel = pull(dz)
    if norm is None:
        return dx, dkernel, None
    dx, dnorm = _unnormed(how.implementation, x, dx, norm, relu=True)
    return dx, dkernel, dnorm


conv.defvjp(_forward, _backward)


def _with_statistics(
    how: How,
    z: jax.Array,
    mean: jax.Array,
    dz: jax.Array,
    dmean: jax.Array,
    dvar: jax.Array,
) -> jax.Array:
    """Return the gradient of z by itself, by its mean and by its variance."""
    n = float(values_per_channel(z, how.axis_name))
    dmean, dvar = psums(dmean, dvar, how.axis_name)
    centred = z.astype(jnp.float32) - like(z, mean)
    total = dz.astype(jnp.float32) + like(z, dmean / n)
    return stored(total + centred * like(z, dvar * (2.0 / n)), z.dtype)


def _normed(how: How, x: jax.Array, norm: Norm | None) -> jax.Array:
    if norm is None:
        return x
    options: dict[str, Any] = {"relu": True, "window": None}
    return run_pass(
        "apply", x, *norm, None, implementation=how.implementation, **options
    )


def _unnormed(
    implementation: str | None, x: jax.Array, dy: jax.Array, norm: Norm, relu: bool
) -> tuple[jax.Array, Norm]:
    """Return the gradients of x and of its norm, from that of the result."""
    options: dict[str, Any] = {"relu": relu, "window": None}
    total, product, _ = run_pass(
        "reduce", x, (dy,), *norm, None, implementation=implementation, **options
    )
    dz = dy.astype(jnp.float32)
    dz = jnp.where(base.scaled(x, *norm) > 0.0, dz, 0.0) if relu else dz
    dx = stored(dz * like(x, norm.factor), x.dtype)
    return dx, Norm(-norm.factor * total, product, total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply_norm(
    implementation: str | None,
    relu: bool,
    x: jax.Array,
    norm: Norm,
    residual: jax.Array | None,
) -> jax.Array:
    """Return the normed array; see the API page."""
    return _apply_forward(implementation, relu, x, norm, residual)[0]


def _apply_forward(
    implementation: str | None,
    relu: bool,
    x: jax.Array,
    norm: Norm,
    residual: jax.Array | None,
) -> tuple[jax.Array, Any]:
    options: dict[str, Any] = {"relu": relu, "window": None}
    y = run_pass("apply", x, *norm, residual, implementation=implementation, **options)
    kept = y if relu and residual is not None else None
    return y, (x, norm, kept, residual is not None)


def _apply_backward(
    implementation: str | None, relu: bool, saved: Any, dy: jax.Array
) -> tuple[Any, ...]:
    x, norm, y, added = saved
    if y is not None:
        dy, relu = base.masked(dy, y), False
    if relu:
        x, dy = lax.optimization_barrier((x, dy))
    dx, dnorm = _unnormed(implementation, x, dy, norm, relu)
    return dx, dnorm, dy if added else None


apply_norm.defvjp(_apply_forward, _apply_backward)
