"""What an applied step moves, stage by stage; nothing here looks at the flag."""

from typing import Any

import jax
import jax.numpy as jnp

from rjax import ops
from rjax.inflight import InFlight, evolve, stage
from rjax.optim import OptaxOptimizer
from rjax.state import Results, half_copy


@stage
def commit_stats(flow: InFlight) -> InFlight:
    """Make the new running statistics current, and count the loss."""
    old = flow.state.results
    results = Results(old.loss_sum + flow.loss, old.count + 1)
    return evolve(flow, batch_stats=flow.next_stats, results=results)


@stage
def update(flow: InFlight) -> InFlight:
    """Unscale, clip and apply the optimizer to the masters."""
    plan, state, config = flow.plan, flow.state, flow.plan.config
    count = state.applied_steps + 1
    if isinstance(config.optimizer, OptaxOptimizer):
        return evolve(flow, applied_steps=count, **_optax_update(flow))
    new = ops.update(
        config.optimizer,
        state.master,
        _true_gradient(flow),
        state.mu,
        state.nu,
        learning_rate=flow.learning_rate,
        count=count,
        table=plan.slot_table,
        implementation=flow.implementation,
    )
    return evolve(flow, applied_steps=count, **new._asdict())


def _true_gradient(flow: InFlight) -> jax.Array:
    """Return f32[n], the gradient unscaled and clipped."""
    assert flow.grads is not None and flow.grad_norm is not None
    value, norm = flow.plan.config.clip_bounds
    return ops.unscale(
        flow.grads, flow.scale, clip_value=value, clip_norm=norm, norm=flow.grad_norm
    )


def _optax_update(flow: InFlight) -> dict[str, Any]:
    """Run an Optax transformation on trees of true gradients and masters."""
    plan, state, config = flow.plan, flow.state, flow.plan.config
    assert isinstance(config.optimizer, OptaxOptimizer)
    steps, opt_state = config.optimizer.update(
        plan.unpack(_true_gradient(flow)),
        state.opt_state,
        plan.unpack(state.master),
        flow.loss,
    )
    return {"master": state.master + plan.pack(steps), "opt_state": opt_state}


@stage
def update_ema(flow: InFlight) -> InFlight:
    """Average the masters, and average or copy the running statistics."""
    decay, state = flow.plan.config.ema_decay, flow.state
    if decay is None or state.ema is None:
        return flow
    average = ops.ema(
        state.ema, state.master, decay, implementation=flow.implementation
    )
    return average_stats(evolve(flow, ema=average))


def average_stats(flow: InFlight) -> InFlight:
    """Average or copy the running statistics: small arrays, which XLA fuses."""
    config = flow.plan.config.ema
    if config is None:
        return flow

    def next_stat(old: jax.Array, new: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(new.dtype, jnp.floating)
        if config.batch_stats == "copy" or not floating:
            return new
        wide = old.astype(jnp.float32), new.astype(jnp.float32)
        return ops.ema(*wide, config.decay, implementation="xla").astype(old.dtype)

    state = flow.state
    return evolve(
        flow,
        ema_batch_stats=jax.tree.map(
            next_stat, state.ema_batch_stats, state.batch_stats
        ),
    )


@stage
def cast_to_compute(flow: InFlight) -> InFlight:
    """Cast the masters to the half-precision copy the next step computes with."""
    return evolve(flow, compute=half_copy(flow.plan, flow.state.master))


@stage
def cast_ema_to_compute(flow: InFlight) -> InFlight:
    """Cast the average to its half-precision copy."""
    if flow.state.ema is None:
        return flow
    return evolve(flow, ema_compute=half_copy(flow.plan, flow.state.ema))
