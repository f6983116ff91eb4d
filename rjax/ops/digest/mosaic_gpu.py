"""Pallas kernels: mix in registers, one partial sum of each lane a program.

Sums modulo 2^32 have no order, so whoever adds them gets the bits of the base.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops import grid, mosaic
from rjax.ops.digest import base
from rjax.ops.slots import ROW

NAME, NAME_SLOTS = "rjax_digest", "rjax_digest_slots"
_LARGEST, _PROGRAMS = 2048, 2112
# Sums are this wide, two elements a thread; a block is several loads in flight.
_WIDTH = 256
# Elements of one program of the per-slot kernel: a slot is cut into such chunks.
_CHUNK = 16384


def op_name(op: str, x: jax.Array) -> str:
    """Return the op's name in tables of measurements: only the width matters."""
    return f"{op}/{8 * x.dtype.itemsize}"


def _zeros(shape):
    return (jnp.zeros(shape, jnp.uint32),) * 2


def _add(sums, terms):
    return tuple(s + t for s, t in zip(sums, terms, strict=True))


def _iota(length):
    return lax.iota(jnp.uint32, length) if length > 1 else jnp.uint32(0)


def _bits(x):
    """Return raw bits; of a scalar by way of a row, as Mosaic bitcasts only those."""
    return base.bits(x) if x.ndim else jnp.max(base.bits(jnp.full((mosaic.ROW,), x)))


def _kernel(x, first, out, *, parts, start, programs):
    origin = first[0]

    def add(at, length, sums):
        raw = _bits(x[grid.window(start + at, length)])
        index = (origin + lax.convert_element_type(at, jnp.uint32)) + _iota(length)
        return _add(sums, base.mix(raw, index))

    def write(i, sums):
        for k, s in enumerate(sums):
            out[k, i] = jnp.sum(s) if s.ndim else s

    grid.reduction(parts, programs, _zeros, add, write)


def digest(
    x: jax.Array, start_index: jax.Array, bounds: tuple[int, int] | None = None
) -> jax.Array:
    """Return uint32[2] of a one-dimensional array, or a range of it."""
    start, stop = (0, x.size) if bounds is None else bounds
    if start == stop:
        return base.digest(x, start_index, bounds)
    block = mosaic.block_size(op_name("digest", x), stop - start, _LARGEST, _PROGRAMS)
    parts = grid.split(stop - start, block, start, width=_WIDTH)
    programs = min(parts.blocks, _PROGRAMS)
    total = programs + parts.remainders
    kernel = functools.partial(_kernel, parts=parts, start=start, programs=programs)
    out = jax.ShapeDtypeStruct((2, total), jnp.uint32)
    first = (start_index + np.uint32(start)).reshape(1)
    partials = mosaic.launch(kernel, NAME, total, out, x, first)
    return jnp.sum(partials, axis=1, dtype=jnp.uint32)


def _slots_kernel(x, chunks, out, *, block):
    i = mosaic.program_index()
    start, size, first = chunks[0, i], chunks[1, i], chunks[2, i]
    at = start - first

    def add(offset, length, sums):
        raw = _bits(x[grid.window(start + offset, length)])
        local = _iota(length)
        index = lax.convert_element_type(at + offset, jnp.uint32) + local
        terms = base.mix(raw, index)
        if length == ROW:  # the last row of a slot may end in padding
            left = lax.convert_element_type(size - offset, jnp.uint32)
            terms = tuple(jnp.where(local < left, t, np.uint32(0)) for t in terms)
        return _add(sums, terms)

    whole, rows = grid.chunk(size, block, _WIDTH, _zeros, add)
    for k, (a, b) in enumerate(zip(whole, rows, strict=True)):
        out[k, i] = jnp.sum(a) + jnp.sum(b)


def digest_slots(x: jax.Array, table: base.Table) -> jax.Array:
    """Return uint32[slots, 2]: each program adds up one chunk of one slot."""
    slots = [(at, at + size, at, k) for k, (at, size) in enumerate(table) if size]
    if not slots:
        return jnp.zeros((len(table), 2), jnp.uint32)
    chunks = grid.cut(slots, _CHUNK)
    block = mosaic.block_size(op_name("digest_slots", x), x.size, _LARGEST)
    kernel = functools.partial(_slots_kernel, block=block)
    programs = chunks.shape[1]
    out = jax.ShapeDtypeStruct((2, programs), jnp.uint32)
    partials = mosaic.launch(kernel, NAME_SLOTS, programs, out, x, jnp.asarray(chunks))
    return jax.ops.segment_sum(
        partials.T,
        jnp.asarray(chunks[3]),
        num_segments=len(table),
        indices_are_sorted=True,
    )
