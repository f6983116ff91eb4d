"""The native optimizers, element by element: one text for every implementation.

All functions are elementwise in their arrays: they take whole arenas in the base and
blocks in registers in the kernel. `u` is the true gradient (unscaled, clipped). Every
product goes through `times`, so that a kernel can keep a compiler from contracting it
with a sum that follows; XLA on GPU does not contract either.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rjax.ops.update.rules import AdamRule, LarsRule, Rule, SgdRule

Times = Callable[[Any, Any], Any]
Mark = bool | jax.Array

_HUGE = 2.0**64


class Rates(NamedTuple):
    """What a step's formulas need besides the rule: f32[] each.

    Attributes:
        lr: learning rate.
        kept: what decoupled decay leaves of a weight, ``1 - lr wd``.
        mu_correction: ``1 - b1^t`` of Adam, else 1.
        nu_correction: ``1 - b2^t`` of Adam, else 1.
    """

    lr: jax.Array
    kept: jax.Array
    mu_correction: jax.Array
    nu_correction: jax.Array


class Marks(NamedTuple):
    """What the table over slots says of some elements.

    A bool says it of all of them, an array broadcasts against them.

    Attributes:
        decays: where weight decay applies.
        adaptive: where a LARS trust ratio applies.
        ratio: the trust ratio, read where `adaptive`.
    """

    decays: Mark = True
    adaptive: Mark = False
    ratio: Any = 1.0


def rates(rule: Rule, lr: jax.Array, count: jax.Array) -> Rates:
    """Return the scalars of update number `count` i32[], counted from 1."""
    one = jnp.ones((), jnp.float32)
    if not isinstance(rule, AdamRule):
        return Rates(lr, 1.0 - lr * rule.weight_decay, one, one)
    corrections = (_bias_correction(beta, count) for beta in (rule.b1, rule.b2))
    return Rates(lr, 1.0 - lr * rule.weight_decay, *corrections)


def _bias_correction(beta: float, count: jax.Array) -> jax.Array:
    """Return ``1 - beta^count`` without the cancellation of float32 powers."""
    if beta == 0.0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(count.astype(jnp.float32) * math.log(beta))


def norm_clip(clip_norm: float, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the two f32[] whose product is ``min(1, clip_norm / norm)``.

    A ratio below 2^-126 would be flushed to zero: huge gradients shrink first.
    """
    huge = (norm > _HUGE) & (norm > clip_norm)
    shrink = jnp.where(huge, jnp.float32(1.0 / _HUGE), jnp.float32(1.0))
    return shrink, jnp.minimum(jnp.float32(1.0), clip_norm / (norm * shrink))


def true_gradient(
    grads: jax.Array,
    scale: jax.Array,
    clip_value: float | None,
    factors: tuple[jax.Array, jax.Array] | None,
    times: Times = operator.mul,
) -> jax.Array:
    """Return ``grads / scale``, clamped, and times the factors of a norm clip."""
    u = grads / scale
    if clip_value is not None:
        u = jnp.clip(u, -clip_value, clip_value)
    for factor in factors or ():
        u = times(u, factor)
    return u


def step(
    rule: Rule,
    w: jax.Array,
    u: jax.Array,
    m: Any,
    v: Any,
    rates: Rates,
    marks: Marks,
    times: Times = operator.mul,
) -> tuple[jax.Array, Any, Any]:
    """Return the next (w, m, v); a moment the rule does not keep is `None`."""
    if isinstance(rule, SgdRule):
        return (*_sgd(rule, w, u, m, rates, marks, times), None)
    if isinstance(rule, AdamRule):
        return _adam(rule, w, u, m, v, rates, marks, times)
    return (*_lars(rule, w, u, m, rates, marks, times), None)


def select(mark: Mark, there: jax.Array, elsewhere: jax.Array) -> jax.Array:
    """Return `there` where marked, `elsewhere` where not."""
    if isinstance(mark, bool):
        return there if mark else elsewhere
    return jnp.where(mark, there, elsewhere)


def _decoupled(
    rule: Any, w: jax.Array, rates: Rates, marks: Marks, times: Times
) -> jax.Array:
    if rule.weight_decay == 0.0:
        return w
    return select(marks.decays, times(w, rates.kept), w)


def _coupled(
    rule: Any, w: jax.Array, u: jax.Array, marks: Marks, times: Times
) -> jax.Array:
    if rule.weight_decay == 0.0:
        return u
    return select(marks.decays, u + times(rule.weight_decay, w), u)


def _sgd(
    rule: SgdRule,
    w: jax.Array,
    u: jax.Array,
    m: Any,
    rates: Rates,
    marks: Marks,
    times: Times,
) -> tuple[jax.Array, Any]:
    if rule.decay == "coupled":
        u, kept = _coupled(rule, w, u, marks, times), w
    else:
        kept = _decoupled(rule, w, rates, marks, times)
    if rule.momentum is None:
        return kept - times(rates.lr, u), None
    m = times(rule.momentum, m) + u
    pull = times(rule.momentum, m) + u if rule.nesterov else m
    return kept - times(rates.lr, pull), m


def _adam(
    rule: AdamRule,
    w: jax.Array,
    u: jax.Array,
    m: jax.Array,
    v: jax.Array,
    rates: Rates,
    marks: Marks,
    times: Times,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if rule.decay == "coupled":
        q, kept = _coupled(rule, w, u, marks, times), w
    else:
        q, kept = u, _decoupled(rule, w, rates, marks, times)
    m = times(rule.b1, m) + times(1.0 - rule.b1, q)
    v = times(rule.b2, v) + times(1.0 - rule.b2, times(q, q))
    root = jnp.sqrt(v / rates.nu_correction) + rule.eps
    # One division, as XLA would make of m / mu_correction / root.
    return kept - times(rates.lr, m / times(rates.mu_correction, root)), m, v


def _lars(
    rule: LarsRule,
    w: jax.Array,
    u: jax.Array,
    m: jax.Array,
    rates: Rates,
    marks: Marks,
    times: Times,
) -> tuple[jax.Array, jax.Array]:
    """LARS where the slot is adaptive; momentum or Nesterov elsewhere."""
    q = _coupled(rule, w, u, marks, times)
    # Adaptive momenta carry the rate, the others apply it at the end.
    pull = select(marks.adaptive, times(times(rates.lr, marks.ratio), q), q)
    m = times(rule.momentum, m) + pull
    moved = pull + times(rule.momentum, m) if rule.nesterov else m
    return w - select(marks.adaptive, moved, times(rates.lr, moved)), m
