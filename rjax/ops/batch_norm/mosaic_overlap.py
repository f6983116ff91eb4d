"""Pallas kernel: gradient of a batch norm pooled by windows that overlap.

Such as 3x3 with strides of 2, in the stem of a ResNet.

XLA finds in x which element of each window was the largest. A program then reads blocks
of as many pixels as a stride, and for each pixel the windows that hold it: which those
are, and which element of them it is, depends on its place in the block alone.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.batch_norm import base
from rjax.ops.batch_norm.mosaic_pool import (
    LARGEST,
    Tiles,
    folded,
    launch,
    measured,
    tiling,
)
from rjax.ops.max_pool.base import places
from rjax.ops.max_pool.window import Window

_PROGRAMS = 2112


def tiles(
    shape: tuple[int, ...], window: Window, largest: int = LARGEST
) -> Tiles | None:
    """Return how to read images, `None` if strides or tiles do not fill them.

    Args:
        shape: `[batch, height, width, channels]`.
        window: how images are pooled.
        largest: elements of a tile at most, a power of two.

    Example:
        >>> tiles((256, 112, 112, 64), Window(3, 2, ((1, 1), (1, 1))))
        Tiles(pixels=8, channels=64, across=7, strips=1, rows=14336, size=(2, 2))
    """
    batch, height, width, channels = shape
    return tiling((batch, height, width, channels), window.strides, largest)


def gradient(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    dz_mean: jax.Array,
    slope: jax.Array,
    relu: bool,
    window: Window,
    op: str,
) -> jax.Array:
    """Return the pass of that name of `base`."""
    found = measured(tiles, op, x, window)
    _, index = base.winners(x, mean, factor, bias, relu, window)
    held = tuple(_phases(window, x.shape, k) for k in (0, 1))
    pads = [_pads(window, x.shape, k) for k in (0, 1)]
    rows = x.shape[1] // window.strides[0]
    kernel = functools.partial(
        _gradient,
        held=held,
        rows=rows,
        padded=rows + pads[0][2],
        low=(pads[0][0], pads[1][0]),
        columns=window.size[1],
    )
    config = [(0, 0, 0), *((low, high, 0) for low, high, _ in pads), (0, 0, 0)]
    arrays = (_padded(a, fill, config) for a, fill in ((index, -1), (dy, 0)))
    image = folded(x, found)
    out = jax.ShapeDtypeStruct(image.shape, x.dtype)
    vectors = mean, factor, dz_mean, slope
    name = "rjax_bn_gradient_overlap"
    dx = launch(kernel, name, found, _PROGRAMS, out, vectors, image, *arrays)
    return dx.reshape(x.shape)


def _gradient(walk, vectors, x, index, dy, dx, *, held, rows, padded, low, columns):
    mean, factor, dz_mean, slope = vectors

    def visit(tile, carry):
        @functools.cache
        def near(*by):
            by = by[0] + low[0], by[1] + low[1]
            at = walk.moved(tile, rows, padded, by)
            return walk.load(index, *at), walk.load(dy, *at)

        phases = itertools.product(*held)  # as the places: rows, then columns
        for at, (down, right) in zip(walk.places(tile), phases, strict=True):
            dz = jnp.zeros_like(mean)
            for (row, i), (column, j) in itertools.product(down, right):
                named, gradient = near(i, j)
                dz += jnp.where(named == float(row * columns + column), gradient, 0.0)
            value = walk.load(x, *at) - mean
            dx[at] = (factor * (dz - dz_mean - value * slope)).astype(dx.dtype)
        return carry

    walk((), visit)


def _phases(
    window: Window, shape: tuple[int, ...], k: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return `places` of every phase of an axis."""
    phases = range(window.strides[k])
    return tuple(tuple(places(window, shape, k, phase)) for phase in phases)


def _pads(window: Window, shape: tuple[int, ...], k: int) -> tuple[int, int, int]:
    """Return what goes before and after the windows of an axis, and how many it gains.

    It gains them over the number of strides.
    """
    moves = [i for held in _phases(window, shape, k) for _, i in held]
    strides = shape[k + 1] // window.strides[k]
    low, high = max(0, -min(moves)), max(0, max(moves))
    windows = window.output(*shape[1:3])[k]
    return low, strides + high - windows, low + high


def _padded(a: jax.Array, fill: int, config: Any) -> jax.Array:
    padded = lax.pad(a, jnp.array(fill, a.dtype), config)
    return padded.reshape(-1, *padded.shape[2:])
