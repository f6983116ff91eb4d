"""Pallas kernel: gradients are added, masked, summed and written in one pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rjax.ops import mosaic
from rjax.ops.batch_norm.columns import Walk, columns, share
from rjax.ops.batch_norm.moments import column_sums

NAME = "rjax_masked_sums"
_LARGEST = 1024
# Programs, and rows that each has in flight.
_PROGRAMS, _UNROLL = 528, 4


def why_not(y: jax.Array) -> str | None:
    """Return the sentence that says why no kernel serves, or `None`."""
    if y.size >= 2**31:
        return f"it has {y.size} elements, kernels index fewer than 2^31"
    if y.dtype.itemsize > 4:
        return f"it is {y.dtype}, kernels read 16 or 32 bits"
    if columns(y.size, y.shape[-1]) is None:
        return f"shape {y.shape} does not fill whole rows of 128 elements or more"
    return mosaic.why_not()


def op_name(uses: int) -> str:
    """Return what the pass over so many gradients is called in measurements."""
    return f"pointwise_batch_norm/mask/{uses}"


def mask(dys: tuple[jax.Array, ...], y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the pass of that name of `base`."""
    block = mosaic.block_size(op_name(len(dys)), y.size, _LARGEST)
    found = columns(y.size, y.shape[-1], block)
    assert found is not None, "why_not comes first"
    shares = share(found, _PROGRAMS, _UNROLL)
    kernel = functools.partial(_mask, shares=shares)
    partials = (shares.groups * shares.columns.period,)
    out = [
        jax.ShapeDtypeStruct(partials, jnp.float32),
        jax.ShapeDtypeStruct((y.size,), y.dtype),
    ]
    arrays = [a.ravel() for a in (y, *dys)]
    sums, dz = mosaic.launch(kernel, NAME, shares.programs, out, *arrays)
    by_place = sums.reshape(shares.groups, -1).sum(0)
    return column_sums(by_place.reshape(-1, y.shape[-1])), dz.reshape(y.shape)


def _mask(y, *refs, shares):
    *dys, out, dz = refs
    walk = Walk(shares)

    def visit(where: list[Any], total: jax.Array) -> jax.Array:
        read = [[a[at].astype(jnp.float32) for a in (y, *dys)] for at in where]
        for at, (value, *gradients) in zip(where, read, strict=True):
            gradient = functools.reduce(jnp.add, gradients)
            gradient = jnp.where(value > 0.0, gradient, 0.0)
            dz[at] = gradient.astype(dz.dtype)
            total += gradient
        return total

    zero = jnp.zeros((shares.columns.width,), jnp.float32)
    out[walk.partial(0, 1)] = walk(zero, visit)
