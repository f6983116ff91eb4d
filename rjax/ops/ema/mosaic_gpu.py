"""Pallas kernel: the average moves in place, one read of each array and one write.

The average is an aliased operand: where the caller donates it, or needs it no more,
XLA makes no copy. Each program reads its elements before it writes them.
"""

import functools

import jax
import numpy as np

from rjax.ops import grid, mosaic

NAME = "rjax_ema"


def _kernel(average, value, out=None, *, parts, step):
    out = average if out is None else out

    def body(at, length):
        where = grid.window(at, length)
        old = average[where]
        out[where] = old + step * (value[where] - old)

    grid.elementwise(parts, body)


def ema(average: jax.Array, value: jax.Array, decay: float) -> jax.Array:
    """Return the next average, in float32."""
    if decay == 0.0 or average.size == 0:
        return value
    flat, target = average.reshape(-1), value.reshape(-1)
    parts = grid.split(flat.size, mosaic.block_size(flat.size))
    kernel = functools.partial(_kernel, parts=parts, step=np.float32(1.0 - decay))
    programs = parts.blocks + parts.remainders
    if mosaic.varying_axes(flat, target):  # JAX takes no varying references (0.12)
        out = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        found = mosaic.launch(kernel, NAME, programs, out, flat, target)
    else:
        moved = jax.new_ref(flat)
        mosaic.launch(kernel, NAME, programs, [], moved, target)
        found = jax.freeze(moved)
    return found.reshape(average.shape)
