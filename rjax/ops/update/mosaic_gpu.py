"""Pallas kernel: one launch that moves everything an optimizer step moves.

Each program reads one chunk of one segment of the arena: every array once, the
gradient among them; writes masters, moments, average and both half-precision copies in
place; or, if the step is skipped, returns after one look at the flag. A segment is a
run of slots for which the table over slots says the same, so its constants are scalars
of the program. LARS needs norms of every slot first, by a kernel of their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rjax.ops import grid, mosaic
from rjax.ops.ema.base import ema as step_average
from rjax.ops.slots import ROW, SlotTable
from rjax.ops.update import base, formulas
from rjax.ops.update.arenas import Arenas
from rjax.ops.update.mosaic_norms import slot_norms
from rjax.ops.update.rules import LarsRule, Rule

NAME = "rjax_update"
_LARGEST, _PROGRAMS = 1024, 2112
# Blocks of one program: it reads the table once for all of them.
_BLOCKS = 4
_HALF, _DECAYS, _ADAPTIVE = 1, 2, 4


def op_name(rule: Rule, options: base.Options) -> str:
    """Return the op's name in tables of measurements: as many arenas, as many bytes."""
    family = type(rule).__name__.removesuffix("Rule").lower()
    family = "momentum" if family == "sgd" and rule.has_mu else family
    return f"fused_update/{family}" + ("+ema" if options.ema_decay is not None else "")


def segments(
    rule: Rule, table: SlotTable, half_start: int
) -> list[tuple[int, int, int, int]]:
    """Return (start, stop, kind, slot) of maximal runs of slots of one kind.

    Adaptive slots are runs of their own; `slot` is the first one of the run.
    """
    found: list[tuple[int, int, int, int]] = []
    lars = isinstance(rule, LarsRule)
    marks = zip(table.decay, table.adaptive, strict=True)
    for slot, (decays, adaptive) in enumerate(marks):
        start, stop = (int(r) * ROW for r in table.row_starts[slot : slot + 2])
        kind = _HALF * (start >= half_start)
        kind |= _DECAYS * (decays and rule.weight_decay > 0.0)
        kind |= _ADAPTIVE * (adaptive and lars)
        if found and found[-1][2] == kind and not kind & _ADAPTIVE:
            start, *_, slot = found.pop()
        if start < stop:
            found.append((start, stop, kind, slot))
    return found


def _mark(kinds: set[int], bit: int, kind: Any) -> Any:
    """Return whether a chunk has a mark: a bool if all chunks agree."""
    marked = {bool(k & bit) for k in kinds}
    return marked.pop() if len(marked) == 1 else (kind & bit) != 0


def _kernel(*refs, names, rule, options, kinds, half_start, block):
    from jax.experimental import pallas as pl

    grads, skip, zero, scalars, chunks, *rest = refs
    ratios = rest.pop(0) if isinstance(rule, LarsRule) else None
    arenas = Arenas(**dict(zip(names, rest, strict=True)))

    def work():
        i, times = mosaic.program_index(), mosaic.rounding(zero)
        start, size, kind = chunks[0, i], chunks[1, i], chunks[2, i]
        scale, shrink, factor, *numbers = (scalars[k] for k in range(7))
        factors = None if options.clip_norm is None else (shrink, factor)
        ratio = 1.0 if ratios is None else ratios[chunks[3, i]]
        decays, adaptive, is_half = (
            _mark(kinds, bit, kind) for bit in (_DECAYS, _ADAPTIVE, _HALF)
        )

        def access(offset, length, _):
            at = start + offset
            where = pl.ds(at, length)
            g, w = grads[where], arenas.master[where]
            m = None if arenas.mu is None else arenas.mu[where]
            v = None if arenas.nu is None else arenas.nu[where]
            e = None if arenas.ema is None else arenas.ema[where]
            u = formulas.true_gradient(g, scale, options.clip_value, factors, times)
            marks = formulas.Marks(
                _spread(decays, length), _spread(adaptive, length), ratio
            )
            w, m, v = formulas.step(
                rule, w, u, m, v, formulas.Rates(*numbers), marks, times
            )
            if e is not None:
                e = step_average(e, w, options.ema_decay, times)
            wide = (arenas.master, w), (arenas.mu, m), (arenas.nu, v), (arenas.ema, e)
            for ref, value in wide:
                if ref is not None:
                    ref[where] = value

            def copies():
                there = pl.ds(at - half_start, length)
                for ref, value in ((arenas.compute, w), (arenas.ema_compute, e)):
                    if ref is not None and value is not None:
                        ref[there] = value.astype(ref.dtype)

            if arenas.compute is not None or arenas.ema_compute is not None:
                _when(is_half, copies)

        grid.chunk(size, block, block, lambda shape: None, access)

    pl.when(skip[0] == 0)(work)


def _spread(mark: formulas.Mark, length: int) -> formulas.Mark:
    """Return a mark for each element: Mosaic selects by no scalar."""
    return mark if isinstance(mark, bool) else jnp.broadcast_to(mark, (length,))


def _when(mark: formulas.Mark, body: Any) -> None:
    from jax.experimental import pallas as pl

    if isinstance(mark, bool):
        if mark:
            body()
    else:
        pl.when(mark)(body)


def fused_update(
    arenas: Arenas,
    grads: jax.Array,
    skip: jax.Array | None,
    scalars: base.Scalars,
    rule: Rule,
    table: SlotTable,
    options: base.Options,
) -> Arenas:
    """Return the next arenas, or the old ones if `skip` is set."""
    n = grads.size
    if n == 0:
        return base.fused_update(arenas, grads, skip, scalars, rule, table, options)
    half = arenas.compute if arenas.compute is not None else arenas.ema_compute
    half_start = n if half is None else n - half.size
    block = mosaic.block_size(op_name(rule, options), n, _LARGEST, _PROGRAMS)
    blocks = max(1, min(_BLOCKS, n // (block * _PROGRAMS)))
    chunks = grid.cut(segments(rule, table, half_start), block * blocks)
    kernel = functools.partial(
        _kernel,
        names=tuple(name for name, a in arenas._asdict().items() if a is not None),
        rule=rule,
        options=options,
        kinds={int(kind) for kind in chunks[2]},
        half_start=half_start,
        block=block,
    )
    factors = base.clip_factors(scalars, options)
    one = jnp.ones((), jnp.float32)
    rates = formulas.rates(rule, scalars.learning_rate, scalars.number)
    numbers = jnp.stack([scalars.scale, *(factors or (one, one)), *rates])
    flag = jnp.zeros((1,), jnp.int32) if skip is None else skip.astype(jnp.int32)[None]
    operands = [grads, flag, mosaic.ZERO, numbers, jnp.asarray(chunks)]
    if isinstance(rule, LarsRule):
        norms = slot_norms(arenas.master, grads, numbers, table, options)
        operands.append(base.ratios_of(rule, *norms, table))
    return mosaic.launch_in_place(kernel, NAME, chunks.shape[1], arenas, *operands)
