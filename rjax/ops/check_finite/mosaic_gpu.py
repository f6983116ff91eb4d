"""Pallas kernels: three sums of squares in one pass, one partial each a program.

The sums the second look of the base needs ride along, since the kernel waits for
memory anyway; so there is no conditional. Programs stride over the blocks and keep
sums in registers; XLA adds the partials. No atomics: the same bits every time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops import grid, mosaic
from rjax.ops.bits import magnitude
from rjax.ops.check_finite import base
from rjax.ops.slots import ROW, SlotTable

NAME, NAME_SLOTS = "rjax_check_finite", "rjax_nonfinite_slots"
# Elements of one program of the per-slot kernel.
_CHUNK = 16384
# Pairs of a chunk and a slot up to which all are compared.
_COMPARED = 2**24
# Sixteen warpgroups on each of 132 multiprocessors: one wave, all resident.
_LARGEST, _PROGRAMS = 2048, 2112
# Sums are this wide, two elements a thread; a block is several loads in flight.
_WIDTH = 256


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
    parts = grid.split(stop - start, block, start, width=_WIDTH)
    programs = min(parts.blocks, _PROGRAMS)
    total = programs + parts.remainders
    kernel = functools.partial(_kernel, parts=parts, start=start, programs=programs)
    out = jax.ShapeDtypeStruct((3, total), jnp.float32)
    partials = mosaic.launch(kernel, NAME, total, out, grads)
    # Or XLA adds in another order where more of what follows is compiled with it.
    sums = lax.optimization_barrier(jnp.sum(partials, axis=1))
    return base.verdict(sums[0], sums[1], sums[2], scale, clamp)


def _slots_kernel(grads, wanted, chunks, out, *, block):
    from jax.experimental import pallas as pl

    i = mosaic.program_index()
    start, size = chunks[0, i], chunks[1, i]

    def nothing():
        out[i] = jnp.int32(0)

    def look():
        def fold(at, length, most):
            bits, _ = magnitude(grads[pl.ds(start + at, length)])
            return jnp.maximum(most, bits)

        zeros = lambda shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
        whole, rows = grid.chunk(size, block, _WIDTH, zeros, fold)
        out[i] = jnp.maximum(jnp.max(whole), jnp.max(rows))

    # Either writes once: all threads of a program write the same element.
    pl.when(wanted[0] != 0)(look)
    pl.when(wanted[0] == 0)(nothing)


def _largest_of_slots(largest: jax.Array, owners: np.ndarray, slots: int) -> jax.Array:
    """Return i32[slots], the largest of every slot's chunks, which are at least 0.

    Comparing every chunk with every slot is one kernel; a scatter takes three, which
    only pays where there are very many.
    """
    if owners.size * slots > _COMPARED:
        return jax.ops.segment_max(
            largest, jnp.asarray(owners), num_segments=slots, indices_are_sorted=True
        )
    own = jnp.asarray(owners)[None] == jnp.arange(slots, dtype=jnp.int32)[:, None]
    return jnp.max(jnp.where(own, largest[None], 0), axis=1)


def nonfinite_slots(
    grads: jax.Array, wanted: jax.Array | None, table: SlotTable, clamp: bool
) -> jax.Array:
    """Return bool[slots]: which slots hold an element that sets the flag.

    Each program finds the largest magnitude of a chunk, by its bits, or returns at
    once if nobody wants to know.
    """
    starts = [int(row) * ROW for row in table.row_starts]
    slots = zip(starts, starts[1:], range(len(table.rows)), strict=False)
    chunks = grid.cut(slots, _CHUNK)
    if not chunks.size:
        return jnp.zeros((len(table.rows),), jnp.bool_)
    block = mosaic.block_size("check_finite", grads.size, _LARGEST, _PROGRAMS)
    flag = jnp.ones((), jnp.bool_) if wanted is None else wanted
    out = jax.ShapeDtypeStruct((chunks.shape[1],), jnp.int32)
    largest = mosaic.launch(
        functools.partial(_slots_kernel, block=block),
        NAME_SLOTS,
        chunks.shape[1],
        out,
        grads,
        flag.astype(jnp.int32).reshape(1),
        jnp.asarray(chunks),
    )
    most = _largest_of_slots(largest, chunks[2], len(table.rows))
    _, infinity = magnitude(jnp.zeros((), jnp.float32))
    return most > infinity if clamp else most >= infinity
