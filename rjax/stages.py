"""The pipeline, stage by stage from batch to report.

Every stage is a pure function from :class:`InFlight` to :class:`InFlight`; its name
shows in the lowered program. :func:`rjax.make_train_step` is their composition::

    flow = begin(plan, state, batch)
    flow = forward_backward(flow, loss_fn)
    flow = cast_deep_grads(flow)
    flow = reduce_deep(flow)
    flow = cast_first_grads(flow)
    flow = reduce_first(flow)
    flow = check_and_scale(flow)
    flow = reconcile_stats(flow)
    flow = commit_stats(flow)              # from here to the end of the pipeline
    flow = update(flow)                    # only if the flag is clear; the train
    flow = update_ema(flow)                # step gates all five by one `lax.cond`,
    flow = cast_to_compute(flow)           # `apply`
    flow = cast_ema_to_compute(flow)
    state, report = finish(flow)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax import ops
from rjax.inflight import InFlight
from rjax.ops.bits import is_finite
from rjax.ops.check_finite import nonfinite_slots
from rjax.ops.update import Arenas, fused_implementation
from rjax.optim import OptaxOptimizer
from rjax.plan import Plan
from rjax.regions import Role
from rjax.report import Report
from rjax.state import GATED, RegionState, Results, half_copy
from rjax.vjp import Gradients, loss_gradients

Stage = Callable[[InFlight], InFlight]


def _stage(body: Callable[..., InFlight]) -> Callable[..., InFlight]:
    """Give a stage its name in the lowered program, even if it has nothing to do."""
    name = body.__name__.lstrip("_")

    @functools.wraps(body)
    def stage(flow: InFlight, *args: Any, **kwargs: Any) -> InFlight:
        with jax.named_scope(name):
            scale, bad_slots = lax.optimization_barrier((flow.scale, flow.bad_slots))
            marked = dataclasses.replace(flow, scale=scale, bad_slots=bad_slots)
            return body(marked, *args, **kwargs)

    return stage


def begin(
    plan: Plan, state: RegionState, batch: Any, implementation: str | None = None
) -> InFlight:
    """Start a step: fix its scale and its learning rate.

    Args:
        plan: the static layout.
        state: the training state.
        batch: pytree of arrays; leading axis split into micro-batches if the plan
            accumulates.
        implementation: of the range operations, `None` to choose.
    """
    schedule = plan.config.schedule
    rate = state.learning_rate
    if schedule is not None:
        rate = jnp.asarray(schedule(state.applied_steps)).astype(jnp.float32)
    # The barrier keeps what made the batch (a slice in a scan, an augmentation) from
    # fusing into the step, whose bits then do not depend on where it stands.
    batch = lax.optimization_barrier(batch)
    return InFlight(plan, implementation, state, batch, state.scale, rate)


@_stage
def forward_backward(flow: InFlight, loss_fn: Any) -> InFlight:
    """Run the loss on the compute view and differentiate it, times the scale.

    The barrier ends the user's program: whatever follows fuses with nothing in it, so
    composed and stage by stage give the same bits.
    """
    found: Gradients = loss_gradients(
        flow.plan, flow.state, flow.batch, loss_fn, flow.scale
    )
    found = lax.optimization_barrier(found)
    return dataclasses.replace(
        flow,
        batch=None,
        cotangents=found.cotangents,
        loss=found.loss,
        metrics=found.metrics,
        next_stats=found.next_stats,
    )


def _cast(flow: InFlight, deep: bool) -> tuple[jax.Array, ...]:
    assert flow.cotangents is not None, "forward_backward comes first"
    return tuple(
        ops.cast(ct, jnp.float32) if (slot.part is Role.DEEP_CONV) == deep else ct
        for slot, ct in zip(flow.plan.slots, flow.cotangents, strict=True)
    )


@_stage
def cast_deep_grads(flow: InFlight) -> InFlight:
    """Cast the gradients of `G_DEEP_CONV` to float32."""
    return dataclasses.replace(flow, cotangents=_cast(flow, deep=True))


@_stage
def reduce_deep(flow: InFlight) -> InFlight:
    """Average bucket 1 (`G_DEEP_CONV`, `R_RESULT`) over devices; on one, nothing."""
    return flow


@_stage
def cast_first_grads(flow: InFlight) -> InFlight:
    """Cast every half gradient that is left and lay all of them out as one arena.

    The casts fuse into the one concatenation; the barrier keeps the check from fusing
    into it as well, where it would add in another order.
    """
    grads = flow.plan.concatenate(_cast(flow, deep=False), jnp.float32)
    grads = lax.optimization_barrier(grads)
    return dataclasses.replace(flow, cotangents=None, grads=grads)


@_stage
def reduce_first(flow: InFlight) -> InFlight:
    """Average bucket 2 (`G_BN_BIAS..G_FIRST_CONV`) over devices; on one, nothing."""
    return flow


@_stage
def check_and_scale(flow: InFlight) -> InFlight:
    """Decide whether the step counts, and find the scale of the next one.

    One flag over all gradients, the new statistics and the learning rate.
    """
    assert flow.grads is not None, "cast_first_grads comes first"
    config = flow.plan.config
    found = ops.check_finite(
        flow.grads,
        flow.scale,
        on_inf=_on_inf(flow.plan),
        implementation=flow.implementation,
    )
    bad_stats = jnp.zeros((), jnp.bool_)
    for leaf in jax.tree.leaves(flow.next_stats):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bad_stats |= ~jnp.all(is_finite(leaf))
    flag = found.flag | bad_stats | ~is_finite(flow.learning_rate)
    scale, scaling_state = config.scale_rule.next(
        flow.scale, flow.state.scaling_state, flag
    )
    return dataclasses.replace(
        flow,
        state=dataclasses.replace(
            flow.state, scale=scale, scaling_state=scaling_state
        ),
        flag=flag,
        bad_stats=bad_stats,
        grad_norm=jnp.where(flag, jnp.float32(jnp.nan), found.norm),
        bad_slots=jnp.zeros((len(flow.plan.slots),), jnp.bool_),
    )  # fmt: skip


@_stage
def reconcile_stats(flow: InFlight) -> InFlight:
    """Make running statistics agree over devices; on one, nothing."""
    return flow


def _on_inf(plan: Plan) -> str:
    return plan.config.clip.on_inf if plan.config.clip else "skip"


def _skip(flow: InFlight) -> tuple[dict[str, Any], jax.Array]:
    """Keep everything, and find which slots are at fault."""
    assert flow.grads is not None
    bad = nonfinite_slots(flow.grads, flow.plan.slot_table, on_inf=_on_inf(flow.plan))
    kept = {name: getattr(flow.state, name) for name in GATED}
    return jax.tree.map(_rewritten, kept), bad


def _rewritten(x: jax.Array) -> jax.Array:
    """Return x, its first element written over itself.

    A branch that only passes its operands through makes XLA (seen with jax 0.10.2)
    copy every donated arena once more after the conditional.
    """
    if x.size == 0 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    start = (0,) * x.ndim
    one = lax.slice(x, start, (1,) * x.ndim)
    return lax.dynamic_update_slice(x, one, start)


def gated(*stages: Stage) -> Stage:
    """Compose stages under one `lax.cond`: they run only if the flag is clear.

    With the flag set, nothing of :data:`rjax.state.GATED` changes a bit, and
    `bad_slots` says which gradients were not finite. The branches are built once, so
    eager calls do not recompile.

    Args:
        *stages: stages that change only gated fields of the state.
    """

    def clear(flow: InFlight) -> tuple[dict[str, Any], jax.Array]:
        for stage in stages:
            flow = stage(flow)
        return {name: getattr(flow.state, name) for name in GATED}, flow.bad_slots

    def run(flow: InFlight) -> InFlight:
        assert flow.flag is not None, "check_and_scale comes first"
        moved, bad_slots = lax.cond(flow.flag, _skip, clear, flow)
        state = dataclasses.replace(flow.state, **moved)
        return dataclasses.replace(flow, state=state, bad_slots=bad_slots)

    run.__name__ = "_".join(stage.__name__.lstrip("_") for stage in stages)
    run.__doc__ = "\n\n".join(stage.__doc__ or "" for stage in stages)
    return run


def _evolve(flow: InFlight, **changes: Any) -> InFlight:
    return dataclasses.replace(flow, state=dataclasses.replace(flow.state, **changes))


@_stage
def _commit_stats(flow: InFlight) -> InFlight:
    """Make the new running statistics current, and count the loss."""
    old = flow.state.results
    results = Results(old.loss_sum + flow.loss, old.count + 1)
    return _evolve(flow, batch_stats=flow.next_stats, results=results)


@_stage
def _update(flow: InFlight) -> InFlight:
    """Unscale, clip and apply the optimizer to the masters."""
    plan, state, config = flow.plan, flow.state, flow.plan.config
    count = state.applied_steps + 1
    if isinstance(config.optimizer, OptaxOptimizer):
        return _evolve(flow, applied_steps=count, **_optax_update(flow))
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
    return _evolve(flow, applied_steps=count, **new._asdict())


def _true_gradient(flow: InFlight) -> jax.Array:
    """Return f32[n], the gradient unscaled and clipped."""
    assert flow.grads is not None and flow.grad_norm is not None
    clip = flow.plan.config.clip
    return ops.unscale(
        flow.grads,
        flow.scale,
        clip_value=clip.value if clip else None,
        clip_norm=clip.norm if clip else None,
        norm=flow.grad_norm,
    )


def _optax_update(flow: InFlight) -> dict[str, Any]:
    """Run an Optax transformation on trees of true gradients and masters."""
    plan, state, config = flow.plan, flow.state, flow.plan.config
    assert isinstance(config.optimizer, OptaxOptimizer)
    steps, opt_state = config.optimizer.tx.update(
        plan.unpack(_true_gradient(flow)),
        state.opt_state,
        plan.unpack(state.master),
    )
    return {"master": state.master + plan.pack(steps), "opt_state": opt_state}


@_stage
def _update_ema(flow: InFlight) -> InFlight:
    """Average the masters, and average or copy the running statistics."""
    decay, state = _ema_decay(flow.plan), flow.state
    if decay is None or state.ema is None:
        return flow
    average = ops.ema(
        state.ema, state.master, decay, implementation=flow.implementation
    )
    return _averaged_stats(_evolve(flow, ema=average))


def _averaged_stats(flow: InFlight) -> InFlight:
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
    return _evolve(
        flow,
        ema_batch_stats=jax.tree.map(
            next_stat, state.ema_batch_stats, state.batch_stats
        ),
    )


@_stage
def _cast_to_compute(flow: InFlight) -> InFlight:
    """Cast the masters to the half-precision copy the next step computes with."""
    return _evolve(flow, compute=half_copy(flow.plan, flow.state.master))


@_stage
def _cast_ema_to_compute(flow: InFlight) -> InFlight:
    """Cast the average to its half-precision copy."""
    if flow.state.ema is None:
        return flow
    return _evolve(flow, ema_compute=half_copy(flow.plan, flow.state.ema))


commit_stats = gated(_commit_stats)
update = gated(_update)
update_ema = gated(_update_ema)
cast_to_compute = gated(_cast_to_compute)
cast_ema_to_compute = gated(_cast_ema_to_compute)
_apply_gated = gated(
    _commit_stats, _update, _update_ema, _cast_to_compute, _cast_ema_to_compute
)


def apply(flow: InFlight) -> InFlight:
    """Run all stages that hang on the flag: moves everything, or nothing.

    One `lax.cond`; or, where the fused kernel serves, one launch that looks at the flag
    itself, and a select for the little that lies outside the arenas.
    """
    return _apply_fused(flow) if _is_fused(flow) else _apply_gated(flow)


def _arenas(state: RegionState) -> Arenas:
    return Arenas(**{name: getattr(state, name) for name in Arenas._fields})


def _ema_decay(plan: Plan) -> float | None:
    return plan.config.ema.decay if plan.config.ema else None


def _is_fused(flow: InFlight) -> bool:
    """Whether one kernel moves all arenas of this step."""
    optimizer = flow.plan.config.optimizer
    if isinstance(optimizer, OptaxOptimizer) or flow.plan.n == 0:
        return False
    name = fused_implementation(
        optimizer,
        _arenas(flow.state),
        table=flow.plan.slot_table,
        ema_decay=_ema_decay(flow.plan),
        implementation=flow.implementation,
    )
    return name != "xla"


@jax.named_scope("update/update_ema/cast_to_compute/cast_ema_to_compute")
def _moved_arenas(flow: InFlight) -> Arenas:
    """Return the arenas after stages 9 to 11, or as they were if the flag is set."""
    plan, state, config = flow.plan, flow.state, flow.plan.config
    assert flow.grads is not None
    assert not isinstance(config.optimizer, OptaxOptimizer)
    clip_norm = config.clip.norm if config.clip else None
    return ops.fused_update(
        config.optimizer,
        _arenas(state),
        flow.grads,
        scale=flow.scale,
        learning_rate=flow.learning_rate,
        count=state.applied_steps + 1,
        table=plan.slot_table,
        skip=flow.flag,
        clip_value=config.clip.value if config.clip else None,
        clip_norm=clip_norm,
        norm=None if clip_norm is None else flow.grad_norm,
        ema_decay=_ema_decay(plan),
        implementation=flow.implementation,
    )


def _apply_fused(flow: InFlight) -> InFlight:
    assert flow.grads is not None and flow.flag is not None
    moved = _moved_arenas(flow)
    bad_slots = nonfinite_slots(
        flow.grads,
        flow.plan.slot_table,
        on_inf=_on_inf(flow.plan),
        wanted=flow.flag,
        implementation=flow.implementation,
    )
    old, flag = flow.state, flow.flag
    counted = _evolve(_commit_stats(flow), applied_steps=old.applied_steps + 1)
    new = _averaged_stats(counted).state
    rest = [name for name in GATED if name not in Arenas._fields]
    chosen = {
        name: jax.tree.map(
            functools.partial(jnp.where, flag), getattr(old, name), getattr(new, name)
        )
        for name in rest
    }
    state = dataclasses.replace(old, **moved._asdict(), **chosen)
    return dataclasses.replace(flow, state=state, bad_slots=bad_slots)


def finish(flow: InFlight) -> tuple[RegionState, Report]:
    """Count the step and report on it."""
    flag, state, one = flow.flag, flow.state, jnp.ones((), jnp.int32)
    assert flag is not None, "check_and_scale comes first"
    consecutive = jnp.where(flag, state.consecutive_skips + one, 0 * one)
    new = dataclasses.replace(
        state,
        step=state.step + one,
        skipped=state.skipped + flag.astype(jnp.int32),
        consecutive_skips=consecutive,
    )
    first = jnp.argmax(flow.bad_slots).astype(jnp.int32)
    report = Report(
        loss=flow.loss,
        applied=~flag,
        scale=flow.scale,
        grad_norm=flow.grad_norm,
        learning_rate=flow.learning_rate,
        step=state.step,
        skipped=new.skipped,
        consecutive_skips=new.consecutive_skips,
        offender=jnp.where(jnp.any(flow.bad_slots), first, -one),
        bad_slots=flow.bad_slots,
        bad_stats=flow.bad_stats,
        metrics=flow.metrics,
    )
    return new, report
