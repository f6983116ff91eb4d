"""Plain jnp: the formulas on whole arenas, and the trust ratios of LARS.

Everything is elementwise but LARS's norms, so XLA fuses each optimizer into one pass.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.bits import is_finite
from rjax.ops.cast.base import cast
from rjax.ops.ema.base import ema as step_average
from rjax.ops.slots import SlotTable, mask, slot_sums, spread
from rjax.ops.update import formulas
from rjax.ops.update.arenas import Arenas
from rjax.ops.update.rules import LarsRule, Rule

_MAX_RATIO = 100.0
_TINY_NORM = 1e-12
# Rescales squares that overflowed; a power of two, so exact.
DOWN = 2.0**-96

Moved = tuple[jax.Array, jax.Array | None, jax.Array | None]


class Scalars(NamedTuple):
    """What a step brings along: f32[] each, but `number` i32[].

    Attributes:
        scale: loss scale of the gradients.
        learning_rate: the rate.
        number: of this update, counted from 1.
        norm: norm of the true gradient, or `None` if nothing needs it.
    """

    scale: jax.Array
    learning_rate: jax.Array
    number: jax.Array
    norm: jax.Array | None


class Options(NamedTuple):
    """What a configuration fixes: the bounds of a clip and the decay of the EMA."""

    clip_value: float | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None


def update(
    rule: Rule,
    master: jax.Array,
    u: jax.Array,
    mu: jax.Array | None,
    nu: jax.Array | None,
    lr: jax.Array,
    count: jax.Array,
    table: SlotTable,
) -> Moved:
    """Return the next (master, mu, nu); `count` is the number of this update, >= 1."""
    rates = formulas.rates(rule, lr, count)
    marks = _marks(rule, master, u, table)
    return formulas.step(rule, master, u, mu, nu, rates, marks)


def fused_update(
    arenas: Arenas,
    grads: jax.Array,
    skip: jax.Array | None,
    scalars: Scalars,
    rule: Rule,
    table: SlotTable,
    options: Options,
) -> Arenas:
    """Return the next arenas, or the old ones if `skip` is set."""
    clear, kept = _branches(rule, table, options)
    if skip is None:
        return clear(arenas, grads, scalars)
    return lax.cond(skip, kept, clear, arenas, grads, scalars)


# Built once: an eager `cond` over fresh closures would compile at every call.
@functools.lru_cache(maxsize=64)
def _branches(rule: Rule, table: SlotTable, options: Options) -> tuple[Any, Any]:
    def clear(arenas: Arenas, grads: jax.Array, scalars: Scalars) -> Arenas:
        u = formulas.true_gradient(
            grads, scalars.scale, options.clip_value, clip_factors(scalars, options)
        )
        master, mu, nu = update(
            rule, arenas.master, u, arenas.mu, arenas.nu,
            scalars.learning_rate, scalars.number, table,
        )  # fmt: skip
        average = arenas.ema
        if average is not None:
            assert options.ema_decay is not None
            average = step_average(average, master, options.ema_decay)
        compute = _copied(master, arenas.compute)
        ema_compute = _copied(average, arenas.ema_compute)
        return Arenas(master, compute, mu, nu, average, ema_compute)

    def kept(arenas: Arenas, grads: jax.Array, scalars: Scalars) -> Arenas:
        del grads, scalars
        return arenas

    return clear, kept


def clip_factors(
    scalars: Scalars, options: Options
) -> tuple[jax.Array, jax.Array] | None:
    """Return the factors of the norm clip, if there is one."""
    if options.clip_norm is None:
        return None
    assert scalars.norm is not None
    return formulas.norm_clip(options.clip_norm, scalars.norm)


def _copied(arena: jax.Array | None, half: jax.Array | None) -> jax.Array | None:
    """Cast the last elements of an arena to the copy that is kept of them."""
    if arena is None or half is None:
        return None
    return cast(arena[arena.size - half.size :], half.dtype)


def _marks(
    rule: Rule, w: jax.Array, u: jax.Array, table: SlotTable
) -> formulas.Marks:  # fmt: skip
    decays = _elements(table.decay, table) if rule.weight_decay else False
    if not isinstance(rule, LarsRule):
        return formulas.Marks(decays)
    ratio = spread(trust_ratios(rule, w, u, table), table)
    return formulas.Marks(decays, _elements(table.adaptive, table), ratio)


def _elements(marks: tuple[bool, ...], table: SlotTable) -> formulas.Mark:
    """Return marks of slots as marks of elements."""
    if not any(marks):
        return False
    inside = mask(marks, table)
    return True if inside is None else inside


def trust_ratios(
    rule: LarsRule, w: jax.Array, u: jax.Array, table: SlotTable
) -> jax.Array:
    """Return f32[slots], region series N: the trust ratio of each tensor."""
    return ratios_of(rule, slot_norms(w, table), slot_norms(u, table), table)


def ratios_of(
    rule: LarsRule, w_norm: jax.Array, u_norm: jax.Array, table: SlotTable
) -> jax.Array:
    """Return f32[slots], the trust ratios, from the norms f32[slots]."""
    decay = rule.weight_decay * jnp.asarray(table.decay, jnp.float32)
    ratio = rule.trust_coefficient * w_norm / (u_norm + decay * w_norm + rule.eps)
    tiny = (w_norm < _TINY_NORM) | (u_norm < _TINY_NORM)
    return jnp.where(tiny, jnp.float32(1.0), jnp.minimum(ratio, _MAX_RATIO))


def slot_norms(x: jax.Array, table: SlotTable) -> jax.Array:
    """Return f32[slots], the norm of each slot, safe for squares that overflow."""
    sums = slot_sums(x * x, table)
    branches = _norms_of(table)
    return lax.cond(jnp.all(is_finite(sums)), *branches, sums, x)


@functools.lru_cache(maxsize=64)
def _norms_of(table: SlotTable) -> tuple[Any, Any]:
    """Return the two branches, the same functions at every call."""

    def plain(sums: jax.Array, x: jax.Array) -> jax.Array:
        del x
        return jnp.sqrt(sums)

    def careful(sums: jax.Array, x: jax.Array) -> jax.Array:
        # Hidden, lest XLA square the factor by itself, which underflows.
        factor = lax.optimization_barrier(jnp.float32(DOWN))
        rescaled = jnp.sqrt(slot_sums(jnp.square(x * factor), table)) / factor
        return jnp.where(is_finite(sums), jnp.sqrt(sums), rescaled)

    return plain, careful
