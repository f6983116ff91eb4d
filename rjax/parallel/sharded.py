"""The step with the optimizer's arenas cut into ranges, one on each device.

Masters, momenta and EMA are cut; what the forward pass reads is whole on every device:
the half copy, the float32 prefix that has none (in fp32 all masters), statistics. A
device reduces and moves its own range only. All collectives lie outside the one
conditional.

Source: Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 5 (optimizer
states and gradients over devices).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax import moves, ops, stages
from rjax.gate import Found, gated, keep
from rjax.inflight import InFlight, evolve, stage
from rjax.ops.bits import is_finite, is_nan
from rjax.ops.check_finite import Check
from rjax.ops.update import base, formulas
from rjax.ops.update.rules import LarsRule
from rjax.optim import OptaxOptimizer
from rjax.parallel.collectives import anywhere, average, gather, norm, prefix
from rjax.parallel.replicated import forward_backward, reconcile_stats
from rjax.parallel.shards import Shards
from rjax.report import Report
from rjax.state import RegionState


def take_step(
    flow: InFlight, loss_fn: Any, shards: Shards, digest: bool
) -> tuple[RegionState, Report]:
    """Run the pipeline on one device, with its own ranges, from `begin` on."""
    flow = forward_backward(flow, loss_fn, seen(flow, shards))
    flow = stages.cast_deep_grads(flow)
    flow = reduce_deep(flow, shards)
    flow = stages.cast_first_grads(flow)
    flow = reduce_first(flow, shards)
    if digest:
        flow = digest_grads(flow, shards)
    flow = check_and_scale(flow, shards)
    flow = reconcile_stats(flow, shards.axes)
    flow = apply(flow, shards)
    flow = cast_to_compute(flow, shards)
    flow = cast_ema_to_compute(flow, shards)
    return stages.finish(flow)


def seen(flow: InFlight, shards: Shards) -> RegionState:
    """Return the state with the masters that the forward pass reads, whole."""
    plan, state = flow.plan, flow.state
    size = plan.n if plan.half_dtype is None else plan.bias_like
    return dataclasses.replace(
        state, master=prefix(state.master, size, shards.axes)
    )  # fmt: skip


@stage
def reduce_deep(flow: InFlight, shards: Shards) -> InFlight:
    """Average loss and metrics over devices.

    The gradients are one bucket here: the ranges of two would not be contiguous.
    """
    (loss, metrics), _ = average((flow.loss, flow.metrics), shards.axes)
    return dataclasses.replace(flow, loss=loss, metrics=metrics)


@stage
def reduce_first(flow: InFlight, shards: Shards) -> InFlight:
    """Average all gradients over devices; of the mean, a device gets its range."""
    assert flow.grads is not None, "cast_first_grads comes first"
    whole = jnp.pad(flow.grads, (0, shards.length - flow.grads.size))
    mine = lax.psum_scatter(whole, shards.axes, tiled=True) / float(shards.devices)
    return dataclasses.replace(flow, grads=lax.optimization_barrier(mine))


@stage
def digest_grads(flow: InFlight, shards: Shards) -> InFlight:
    """Digest the gradient of every slot: the sum of what the ranges add to it."""
    assert flow.grads is not None
    digests = lax.psum(shards.digest_slots(flow.grads), shards.axes)
    grads, digests = lax.optimization_barrier((flow.grads, digests))
    return dataclasses.replace(flow, grads=grads, grad_digests=digests)


def check_and_scale(flow: InFlight, shards: Shards) -> InFlight:
    """Decide for all devices whether the step counts: one flag, one norm."""
    assert flow.grads is not None

    def agree(found: Check, bad_stats: jax.Array) -> tuple[Check, jax.Array]:
        flags = anywhere(jnp.stack([found.flag, bad_stats]), shards.axes)
        return Check(flags[0], norm(found.norm, shards.axes)), flags[1]

    rows = dataclasses.replace(flow, grads=shards.whole_rows(flow.grads))
    checked = stages.check_and_scale(rows, agree)
    return dataclasses.replace(checked, grads=flow.grads)


def apply(flow: InFlight, shards: Shards) -> InFlight:
    """Run all stages that hang on the flag on this device's ranges."""
    ratios = trust_ratios(flow, shards)

    @stage
    def update(flow: InFlight) -> InFlight:
        """Unscale, clip and apply the optimizer to this device's masters."""
        return _update(flow, shards, ratios)

    @jax.named_scope("skip")
    def skip(flow: InFlight) -> Found:
        assert flow.grads is not None
        clamp = flow.plan.config.on_inf == "clamp"
        bad = is_nan(flow.grads) if clamp else ~is_finite(flow.grads)
        return keep(flow), shards.any_in_slots(bad)

    old = flow.state
    flow = evolve(flow, compute=None, ema_compute=None)
    flow = gated(moves.commit_stats, update, moves.update_ema, skip=skip)(flow)
    flow = evolve(flow, compute=old.compute, ema_compute=old.ema_compute)
    return dataclasses.replace(flow, bad_slots=anywhere(flow.bad_slots, shards.axes))


def _update(flow: InFlight, shards: Shards, ratios: jax.Array | None) -> InFlight:
    rule, state = flow.plan.config.optimizer, flow.state
    assert not isinstance(rule, OptaxOptimizer)
    count = state.applied_steps + 1
    decays = _mark(shards, shards.table.decay) if rule.weight_decay else False
    marks = formulas.Marks(decays)
    if ratios is not None:
        adaptive = _mark(shards, shards.table.adaptive)
        marks = formulas.Marks(decays, adaptive, shards.spread(ratios))
    master, mu, nu = formulas.step(
        rule,
        state.master,
        _true_gradient(flow),
        state.mu,
        state.nu,
        formulas.rates(rule, flow.learning_rate, count),
        marks,
    )
    return evolve(flow, master=master, mu=mu, nu=nu, applied_steps=count)


def _true_gradient(flow: InFlight) -> jax.Array:
    assert flow.grads is not None
    value, bound = flow.plan.config.clip_bounds
    return ops.unscale(
        flow.grads, flow.scale, clip_value=value, clip_norm=bound, norm=flow.grad_norm
    )


def _mark(shards: Shards, slots: tuple[bool, ...]) -> formulas.Mark:
    if len(set(slots)) == 1:
        return slots[0]
    return shards.spread(jnp.asarray(slots))


def trust_ratios(flow: InFlight, shards: Shards) -> jax.Array | None:
    """Return f32[slots], the trust ratios of LARS over all ranges, else `None`."""
    rule = flow.plan.config.optimizer
    if not isinstance(rule, LarsRule):
        return None
    weights, grads = (
        slot_norms(x, shards) for x in (flow.state.master, _true_gradient(flow))
    )
    return base.ratios_of(rule, weights, grads, shards.table)


def slot_norms(x: jax.Array, shards: Shards) -> jax.Array:
    """Return f32[slots], the norms over all ranges, safe for squares that overflow."""
    # Hidden, lest XLA square the factor by itself, which underflows.
    down = lax.optimization_barrier(jnp.float32(base.DOWN))
    parts = [shards.slot_sums(x * x), shards.slot_sums(jnp.square(x * down))]
    plain, careful = lax.psum(jnp.stack(parts), shards.axes)
    return jnp.where(is_finite(plain), jnp.sqrt(plain), jnp.sqrt(careful) / down)


@stage
def cast_to_compute(flow: InFlight, shards: Shards) -> InFlight:
    """Cast this device's masters, and gather the half copy of all."""
    old = flow.state
    return evolve(flow, compute=_half_copy(flow, old.master, old.compute, shards))


@stage
def cast_ema_to_compute(flow: InFlight, shards: Shards) -> InFlight:
    """Cast this device's average, and gather its half copy."""
    old = flow.state
    if old.ema is None:
        return flow
    half = _half_copy(flow, old.ema, old.ema_compute, shards)
    return evolve(flow, ema_compute=half)


def _half_copy(
    flow: InFlight, arena: jax.Array, old: jax.Array | None, shards: Shards
) -> jax.Array | None:
    """Return the half copy of an arena, whole; the old one if nothing may move.

    The gathering lies outside the conditional; the choice is one more pass, in place.
    """
    if old is None:
        return None
    assert flow.flag is not None, "check_and_scale comes first"
    half = ops.cast(arena, old.dtype, implementation=flow.implementation)
    new = gather(half, shards.axes)[flow.plan.bias_like : flow.plan.n]
    return jnp.where(flow.flag, old, new)
