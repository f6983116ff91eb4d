"""Pallas kernel: the average moves in place, one read of each array and one write.

The average is an aliased operand: where the caller donates it, or needs it no more,
XLA makes no copy. Each thread reads its elements before it writes them. That needs
whole rows: a single element is read and written by every thread of a program, and a
late one would average what an early one has written. Other arrays get a new average.
"""

import functools

import jax

from rjax.ops import grid, mosaic
from rjax.ops.ema import base

NAME = "rjax_ema"


def _kernel(value, zero, *averages, parts, decay):
    """Move from the first of `averages` to the last: one, in place, or two."""
    times = mosaic.rounding(zero)

    def body(at, length):
        where = grid.window(at, length)
        next_average = base.ema(averages[0][where], value[where], decay, times)
        averages[-1][where] = next_average

    grid.elementwise(parts, body)


def ema(average: jax.Array, value: jax.Array, decay: float) -> jax.Array:
    """Return the next average, in float32."""
    if decay == 0.0 or average.size == 0:
        return value
    flat, target = average.reshape(-1), value.reshape(-1)
    parts = grid.split(flat.size, mosaic.block_size("ema", flat.size))
    kernel = functools.partial(_kernel, parts=parts, decay=decay)
    programs = parts.blocks + parts.remainders
    operands = target, mosaic.ZERO
    # JAX takes no references that vary over mesh axes (0.12).
    if parts.singles or mosaic.varying_axes(flat, target):
        out = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        found = mosaic.launch(kernel, NAME, programs, out, *operands, flat)
    else:
        found = mosaic.launch_in_place(kernel, NAME, programs, flat, *operands)
    return found.reshape(average.shape)
