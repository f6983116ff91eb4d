"""Pallas kernel: three sums of squares in one pass, one partial each a program.

The sums the second look of the base needs ride along, since the kernel waits for
memory anyway; so there is no conditional. Programs stride over the blocks and keep
sums in registers; XLA adds the partials. No atomics: the same bits every time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops import grid, mosaic
from rjax.ops.check_finite import base

NAME = "rjax_check_finite"
# Sixteen warpgroups on each of 132 multiprocessors: one wave, all resident.
_LARGEST, _PROGRAMS = 1024, 2112


def _kernel(grads, out, *, parts, start, programs):
    # Hidden for the reason that `base` hides them: XLA, which interprets kernels,
    # would square the factors.
    factors = lax.optimization_barrier((jnp.float32(base.DOWN), jnp.float32(base.UP)))

    def zeros(shape):
        return (jnp.zeros(shape, jnp.float32),) * 3

    def add(at, length, sums):
        x = grads[grid.window(start + at, length)]
        squares = (x * x, *(jnp.square(x * factor) for factor in factors))
        return tuple(s + q for s, q in zip(sums, squares, strict=True))

    def write(i, sums):
        for k, s in enumerate(sums):
            out[k, i] = jnp.sum(s) if s.ndim else s

    grid.reduction(parts, programs, zeros, add, write)


def check_finite(
    grads: jax.Array,
    scale: jax.Array,
    clamp: bool,
    bounds: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (flag bool[], norm f32[] of ``grads / scale``) of a range."""
    start, stop = (0, grads.size) if bounds is None else bounds
    if start == stop:
        return base.check_finite(grads, scale, clamp, bounds)
    block = mosaic.block_size("check_finite", stop - start, _LARGEST, _PROGRAMS)
    parts = grid.split(stop - start, block, start)
    programs = min(parts.blocks, _PROGRAMS)
    total = programs + parts.remainders
    kernel = functools.partial(_kernel, parts=parts, start=start, programs=programs)
    out = jax.ShapeDtypeStruct((3, total), jnp.float32)
    sums = jnp.sum(mosaic.launch(kernel, NAME, total, out, grads), axis=1)
    return base.verdict(sums[0], sums[1], sums[2], scale, clamp)
