"""Pallas kernel: read, convert in registers, write.

XLA sees a custom call, so it cannot cancel the conversion against its inverse.
"""

import functools
from typing import Any

import jax

from rjax.ops import grid, mosaic

NAME = "rjax_cast"


def op_name(source: Any, target: Any) -> str:
    """Return the op's name in tables of measurements: only widths matter."""
    return f"cast/{8 * source.itemsize}-{8 * target.itemsize}"


def _kernel(x, out, *, parts, start):
    def body(at, length):
        values = x[grid.window(start + at, length)]
        out[grid.window(at, length)] = values.astype(out.dtype)

    grid.elementwise(parts, body)


def cast(x: jax.Array, dtype: Any, bounds: tuple[int, int] | None = None) -> jax.Array:
    """Return `x`, or the range `bounds` of it, as `dtype`."""
    start, stop = (0, x.size) if bounds is None else bounds
    shape = x.shape if bounds is None else (stop - start,)
    out = jax.ShapeDtypeStruct((stop - start,), dtype)
    if start == stop:
        return jax.numpy.zeros(shape, dtype)
    block = mosaic.block_size(op_name(x.dtype, out.dtype), out.size)
    parts = grid.split(out.size, block, start)
    kernel = functools.partial(_kernel, parts=parts, start=start)
    programs = parts.blocks + parts.remainders
    return mosaic.launch(kernel, NAME, programs, out, x.reshape(-1)).reshape(shape)
