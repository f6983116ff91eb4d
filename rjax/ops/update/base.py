"""Plain jnp: the native optimizers on flat float32 arenas.

`u` is the true gradient (unscaled, clipped); `lr` a float32 scalar. Everything is
elementwise but LARS's norms, so XLA fuses each optimizer into one pass.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.bits import is_finite
from rjax.ops.slots import SlotTable, mask, slot_sums, spread
from rjax.ops.update.rules import AdamRule, LarsRule, Rule, SgdRule

_MAX_RATIO = 100.0
_TINY_NORM = 1e-12
# Rescales squares that overflowed; a power of two, so exact.
_DOWN = 2.0**-96

Arenas = tuple[jax.Array, jax.Array | None, jax.Array | None]


def update(
    rule: Rule,
    master: jax.Array,
    u: jax.Array,
    mu: jax.Array | None,
    nu: jax.Array | None,
    lr: jax.Array,
    count: jax.Array,
    table: SlotTable,
) -> Arenas:
    """Return the next (master, mu, nu); `count` is the number of this update, >= 1."""
    if isinstance(rule, SgdRule):
        return (*_sgd(rule, master, u, mu, lr, table), None)
    if isinstance(rule, AdamRule):
        assert mu is not None and nu is not None
        return _adam(rule, master, u, mu, nu, lr, count, table)
    assert isinstance(rule, LarsRule) and mu is not None
    return (*_lars(rule, master, u, mu, lr, table), None)


def _where_decaying(
    weight_decay: float, table: SlotTable, decayed: jax.Array, plain: jax.Array
) -> jax.Array:
    """Select `decayed` in slots that decay and `plain` elsewhere."""
    if weight_decay == 0.0 or not any(table.decay):
        return plain
    inside = mask(table.decay, table)
    return decayed if inside is None else jnp.where(inside, decayed, plain)


def _decoupled(
    wd: float, w: jax.Array, lr: jax.Array, table: SlotTable
) -> jax.Array:  # fmt: skip
    return _where_decaying(wd, table, w * (1.0 - lr * wd), w)


def _coupled(wd: float, w: jax.Array, u: jax.Array, table: SlotTable) -> jax.Array:
    return _where_decaying(wd, table, u + wd * w, u)


def _sgd(
    rule: SgdRule,
    w: jax.Array,
    u: jax.Array,
    m: jax.Array | None,
    lr: jax.Array,
    table: SlotTable,
) -> tuple[jax.Array, jax.Array | None]:
    if rule.decay == "coupled":
        u, kept = _coupled(rule.weight_decay, w, u, table), w
    else:
        kept = _decoupled(rule.weight_decay, w, lr, table)
    if rule.momentum is None:
        return kept - lr * u, None
    assert m is not None
    m = rule.momentum * m + u
    step = rule.momentum * m + u if rule.nesterov else m
    return kept - lr * step, m


def _adam(
    rule: AdamRule,
    w: jax.Array,
    u: jax.Array,
    m: jax.Array,
    v: jax.Array,
    lr: jax.Array,
    count: jax.Array,
    table: SlotTable,
) -> Arenas:
    if rule.decay == "coupled":
        q, kept = _coupled(rule.weight_decay, w, u, table), w
    else:
        q, kept = u, _decoupled(rule.weight_decay, w, lr, table)
    m = rule.b1 * m + (1.0 - rule.b1) * q
    v = rule.b2 * v + (1.0 - rule.b2) * (q * q)
    m_hat = m / _bias_correction(rule.b1, count)
    v_hat = v / _bias_correction(rule.b2, count)
    return kept - lr * (m_hat / (jnp.sqrt(v_hat) + rule.eps)), m, v


def _bias_correction(beta: float, count: jax.Array) -> jax.Array:
    """Return ``1 - beta^count`` without the cancellation of float32 powers."""
    if beta == 0.0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(count.astype(jnp.float32) * math.log(beta))


def _lars(
    rule: LarsRule,
    w: jax.Array,
    u: jax.Array,
    m: jax.Array,
    lr: jax.Array,
    table: SlotTable,
) -> tuple[jax.Array, jax.Array]:
    """LARS where the slot is adaptive; momentum or Nesterov elsewhere."""
    q = _coupled(rule.weight_decay, w, u, table)
    beta, ratio = rule.momentum, spread(_trust_ratios(rule, w, u, table), table)
    adaptive = mask(table.adaptive, table) if any(table.adaptive) else False
    adaptive = True if adaptive is None else adaptive
    # Adaptive momenta carry the rate, the others apply it at the end.
    pull = jnp.where(adaptive, lr * ratio * q, q)
    m = beta * m + pull
    step = pull + beta * m if rule.nesterov else m
    return w - jnp.where(adaptive, step, lr * step), m


def _trust_ratios(
    rule: LarsRule, w: jax.Array, u: jax.Array, table: SlotTable
) -> jax.Array:
    """Return f32[slots], region series N: the trust ratio of each tensor."""
    w_norm, u_norm = slot_norms(w, table), slot_norms(u, table)
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
        factor = lax.optimization_barrier(jnp.float32(_DOWN))
        rescaled = jnp.sqrt(slot_sums(jnp.square(x * factor), table)) / factor
        return jnp.where(is_finite(sums), jnp.sqrt(sums), rescaled)

    return plain, careful
