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
    flow = update_ema(flow)                # step runs all five as one: `apply`, by one
    flow = cast_to_compute(flow)           # `lax.cond` or by the fused kernel
    flow = cast_ema_to_compute(flow)
    state, report = finish(flow)

One more may stand between `reduce_first` and `check_and_scale`: `digest_grads`, which
only looks. What stages do where there are several devices is in :mod:`rjax.parallel`.

Called out of this order a stage stops in an assertion. No stage raises for what is in
the arrays: a value that is not finite becomes the flag.

Example:
    >>> import jax.numpy as jnp, rjax
    >>> params = {"w": jnp.ones((4, 2))}
    >>> plan = rjax.make_plan(params, rjax.Config())
    >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
    >>> x = jnp.ones((3, 4), "float16")
    >>> flow = begin(plan, rjax.init_state(plan, params), x)
    >>> flow = reduce_deep(cast_deep_grads(forward_backward(flow, loss_fn)))
    >>> flow = check_and_scale(reduce_first(cast_first_grads(flow)))
    >>> bool(flow.flag)
    False
    >>> flow = update(commit_stats(reconcile_stats(flow)))
    >>> flow = cast_ema_to_compute(cast_to_compute(update_ema(flow)))
    >>> state, report = finish(flow)
    >>> int(state.applied_steps)
    1
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax import moves, ops
from rjax.gate import apply_fused, gated, is_fused
from rjax.inflight import InFlight, stage
from rjax.ops.bits import is_finite
from rjax.ops.check_finite import Check
from rjax.ops.manual_axes import align
from rjax.plan import Plan
from rjax.regions import Role
from rjax.report import Report
from rjax.state import RegionState
from rjax.vjp import Gradients, loss_gradients


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


@stage
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


@stage
def cast_deep_grads(flow: InFlight) -> InFlight:
    """Cast the gradients of `G_DEEP_CONV` to float32."""
    return dataclasses.replace(flow, cotangents=_cast(flow, deep=True))


@stage
def reduce_deep(flow: InFlight) -> InFlight:
    """Average bucket 1 (`G_DEEP_CONV`, `R_RESULT`) over devices; on one, nothing."""
    return flow


@stage
def cast_first_grads(flow: InFlight) -> InFlight:
    """Cast every half gradient that is left and lay all of them out as one arena.

    The casts fuse into the one concatenation; the barrier keeps the check from fusing
    into it as well, where it would add in another order.
    """
    grads = flow.plan.concatenate(_cast(flow, deep=False), jnp.float32)
    grads = lax.optimization_barrier(grads)
    return dataclasses.replace(flow, cotangents=None, grads=grads)


@stage
def reduce_first(flow: InFlight) -> InFlight:
    """Average bucket 2 (`G_BN_BIAS..G_FIRST_CONV`) over devices; on one, nothing."""
    return flow


@stage
def digest_grads(flow: InFlight) -> InFlight:
    """Digest the gradient of every slot, for the report; changes no bit of the step.

    Of the bits that `check_and_scale` looks at: float32, after the mean over devices,
    still times the scale of this step, neither unscaled nor clipped, and whatever they
    are, also in a step that is skipped. One `ops.digest_slots` over `grads`, padding
    left out. The barrier keeps the passes that follow from fusing with it: they could
    add in another order.
    """
    assert flow.grads is not None, "cast_first_grads comes first"
    table = [(slot.offset, slot.size) for slot in flow.plan.slots]
    digests = ops.digest_slots(flow.grads, table, implementation=flow.implementation)
    grads, digests = lax.optimization_barrier((flow.grads, digests))
    return dataclasses.replace(flow, grads=grads, grad_digests=digests)


@stage
def check_and_scale(
    flow: InFlight, agree: Callable[[Check, jax.Array], Any] | None = None
) -> InFlight:
    """Decide whether the step counts, and find the scale of the next one.

    One flag over all gradients, the new statistics and the learning rate.

    Args:
        flow: the step under way.
        agree: over several devices, makes what each has found, of its gradients and
            of its statistics, that of all; it returns the pair.
    """
    assert flow.grads is not None, "cast_first_grads comes first"
    config = flow.plan.config
    found = ops.check_finite(
        flow.grads,
        flow.scale,
        on_inf=config.on_inf,
        implementation=flow.implementation,
    )
    bad_stats = _any_not_finite(flow.next_stats)
    if agree is not None:
        found, bad_stats = agree(found, bad_stats)
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


def _any_not_finite(tree: Any) -> jax.Array:
    """Return whether any floating leaf holds NaN or Inf.

    Leaves of a dtype are joined: a network has a hundred small ones, and a kernel for
    each takes longer than to move them.
    """
    joined: dict[Any, list[jax.Array]] = {}
    for leaf in align(*jax.tree.leaves(tree)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            joined.setdefault(leaf.dtype, []).append(leaf.ravel())
    bad = jnp.zeros((), jnp.bool_)
    for parts in joined.values():
        bad |= ~jnp.all(is_finite(jnp.concatenate(parts)))
    return bad


@stage
def reconcile_stats(flow: InFlight) -> InFlight:
    """Make running statistics agree over devices; on one, nothing."""
    return flow


commit_stats = gated(moves.commit_stats)
update = gated(moves.update)
update_ema = gated(moves.update_ema)
cast_to_compute = gated(moves.cast_to_compute)
cast_ema_to_compute = gated(moves.cast_ema_to_compute)
_apply_gated = gated(
    moves.commit_stats,
    moves.update,
    moves.update_ema,
    moves.cast_to_compute,
    moves.cast_ema_to_compute,
)


def apply(flow: InFlight) -> InFlight:
    """Run all stages that hang on the flag: moves everything, or nothing.

    One `lax.cond`; or, where the fused kernel serves, one launch that looks at the flag
    itself, and a select for the little that lies outside the arenas.
    """
    return apply_fused(flow) if is_fused(flow) else _apply_gated(flow)


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
        grad_digests=flow.grad_digests,
    )
    return new, report
