"""Pallas kernel: the norms of every slot that LARS needs, in one pass over two arenas.

Each program adds up the squares of one chunk of one slot, of the masters and of the
true gradient; squares that overflow are added up a second time, rescaled, in the same
pass. XLA adds the partial sums slot by slot: no atomics, the same bits every time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops import grid, mosaic
from rjax.ops.bits import is_finite
from rjax.ops.slots import ROW, SlotTable
from rjax.ops.update import base, formulas

NAME = "rjax_slot_norms"
# Elements of one program, of one of its iterations, and of one access.
_CHUNK, _BLOCK, _WIDTH = 16384, 2048, 256


def _kernel(grads, master, scalars, chunks, out, *, options, block):
    from jax.experimental import pallas as pl

    # Hidden, lest XLA, which interprets kernels, square it: that underflows.
    down = lax.optimization_barrier(jnp.float32(base.DOWN))
    i = mosaic.program_index()
    start, size = chunks[0, i], chunks[1, i]
    scale, shrink, factor = (scalars[k] for k in range(3))
    factors = None if options.clip_norm is None else (shrink, factor)

    def zeros(shape):
        return (jnp.zeros(shape, jnp.float32),) * 4

    def add(offset, length, sums):
        where = pl.ds(start + offset, length)
        u = formulas.true_gradient(grads[where], scale, options.clip_value, factors)
        w = master[where]
        values = (w, w * down, u, u * down)
        return tuple(s + x * x for s, x in zip(sums, values, strict=True))

    whole, rows = grid.chunk(size, block, _WIDTH, zeros, add)
    for k, (a, b) in enumerate(zip(whole, rows, strict=True)):
        out[k, i] = jnp.sum(a) + jnp.sum(b)


def slot_norms(
    master: jax.Array,
    grads: jax.Array,
    numbers: jax.Array,
    table: SlotTable,
    options: base.Options,
) -> tuple[jax.Array, jax.Array]:
    """Return f32[slots] twice: norms of the masters and of the true gradient.

    Args:
        master: f32[n].
        grads: f32[n], gradients times the scale.
        numbers: f32[3 or more], scale and the two factors of a norm clip.
        table: the slots that tile the arenas.
        options: with the bounds of a clip.
    """
    starts = [int(row) * ROW for row in table.row_starts]
    slots = range(len(table.rows))
    chunks = grid.cut(zip(starts[:-1], starts[1:], slots, strict=True), _CHUNK)
    programs = chunks.shape[1]
    kernel = functools.partial(_kernel, options=options, block=_BLOCK)
    out = jax.ShapeDtypeStruct((4, programs), jnp.float32)
    sums = mosaic.launch(
        kernel, NAME, programs, out, grads, master, numbers, jnp.asarray(chunks)
    )
    # One slice a slot: a scatter would add in no fixed order on GPU.
    ends = np.searchsorted(chunks[2], range(len(table.rows) + 1))
    totals = [jnp.sum(sums[:, ends[i] : ends[i + 1]], axis=1) for i in slots]
    # The barrier: or they may be added in another order in another program.
    w, w_down, u, u_down = lax.optimization_barrier(jnp.stack(totals, axis=1))
    return _norm(w, w_down), _norm(u, u_down)


def _norm(total: jax.Array, down: jax.Array) -> jax.Array:
    rescaled = jnp.sqrt(down) / jnp.float32(base.DOWN)
    return jnp.where(is_finite(total), jnp.sqrt(total), rescaled)
