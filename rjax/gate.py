"""The one decision: a step moves everything it moves, or nothing of it.

:func:`gated` puts stages under one `lax.cond`. Where the fused kernel serves,
:func:`apply_fused` does without: the kernel looks at the flag itself, and the little
that lies outside the arenas is selected.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax import moves, ops
from rjax.inflight import InFlight, Stage, evolve
from rjax.ops.check_finite import nonfinite_slots
from rjax.ops.update import Arenas, fused_implementation
from rjax.optim import OptaxOptimizer
from rjax.state import GATED, RegionState

Found = tuple[dict[str, Any], jax.Array]


def gated(*stages: Stage, skip: Callable[[InFlight], Found] | None = None) -> Stage:
    """Compose stages under one `lax.cond`: they run only if the flag is clear.

    With the flag set, nothing of :data:`rjax.state.GATED` changes a bit, and
    `bad_slots` says which gradients were not finite. The branches are built once, so
    eager calls do not recompile.

    Args:
        *stages: stages that change only gated fields of the state.
        skip: what a skipped step does, where a device has not the whole arenas:
            returns what :func:`keep` does, and `bad_slots`.
    """
    kept = skip or _skip

    def clear(flow: InFlight) -> Found:
        for stage in stages:
            flow = stage(flow)
        return {name: getattr(flow.state, name) for name in GATED}, flow.bad_slots

    def run(flow: InFlight) -> InFlight:
        assert flow.flag is not None, "check_and_scale comes first"
        moved, bad_slots = lax.cond(flow.flag, kept, clear, flow)
        state = dataclasses.replace(flow.state, **moved)
        return dataclasses.replace(flow, state=state, bad_slots=bad_slots)

    run.__name__ = "_".join(stage.__name__ for stage in stages)
    run.__doc__ = "\n\n".join(stage.__doc__ or "" for stage in stages)
    return run


@jax.named_scope("skip")
def _skip(flow: InFlight) -> Found:
    """Keep everything, and find which slots are at fault."""
    assert flow.grads is not None
    bad = nonfinite_slots(
        flow.grads,
        flow.plan.slot_table,
        on_inf=flow.plan.config.on_inf,
        implementation=flow.implementation,
    )
    return keep(flow), bad


def keep(flow: InFlight) -> dict[str, Any]:
    """Return all that is gated as it was, bit for bit."""
    kept = {name: getattr(flow.state, name) for name in GATED}
    return jax.tree.map(rewritten, kept)


def rewritten(x: jax.Array) -> jax.Array:
    """Return x, its first element written over itself.

    A branch that only passes its operands through makes XLA (seen with jax 0.10.2)
    copy every donated arena once more after the conditional.
    """
    if x.size == 0 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    start = (0,) * x.ndim
    one = lax.slice(x, start, (1,) * x.ndim)
    return lax.dynamic_update_slice(x, one, start)


def _arenas(state: RegionState) -> Arenas:
    return Arenas(**{name: getattr(state, name) for name in Arenas._fields})


def is_fused(flow: InFlight) -> bool:
    """Whether one kernel moves all arenas of this step."""
    optimizer = flow.plan.config.optimizer
    if isinstance(optimizer, OptaxOptimizer) or flow.plan.n == 0:
        return False
    name = fused_implementation(
        optimizer,
        _arenas(flow.state),
        table=flow.plan.slot_table,
        ema_decay=flow.plan.config.ema_decay,
        implementation=flow.implementation,
    )
    return name != "xla"


@jax.named_scope("update/update_ema/cast_to_compute/cast_ema_to_compute")
def _moved_arenas(flow: InFlight) -> Arenas:
    """Return the arenas after stages 9 to 11, or as they were if the flag is set."""
    plan, state, config = flow.plan, flow.state, flow.plan.config
    assert flow.grads is not None
    assert not isinstance(config.optimizer, OptaxOptimizer)
    clip_value, clip_norm = config.clip_bounds
    return ops.fused_update(
        config.optimizer,
        _arenas(state),
        flow.grads,
        scale=flow.scale,
        learning_rate=flow.learning_rate,
        count=state.applied_steps + 1,
        table=plan.slot_table,
        skip=flow.flag,
        clip_value=clip_value,
        clip_norm=clip_norm,
        norm=None if clip_norm is None else flow.grad_norm,
        ema_decay=config.ema_decay,
        implementation=flow.implementation,
    )


def apply_fused(flow: InFlight) -> InFlight:
    """Move everything, or nothing, by one launch and a select of what is small."""
    assert flow.grads is not None and flow.flag is not None
    moved = _moved_arenas(flow)
    bad_slots = nonfinite_slots(
        flow.grads,
        flow.plan.slot_table,
        on_inf=flow.plan.config.on_inf,
        wanted=flow.flag,
        implementation=flow.implementation,
    )
    old, flag = flow.state, flow.flag
    counted = evolve(moves.commit_stats(flow), applied_steps=old.applied_steps + 1)
    new = moves.average_stats(counted).state
    rest = [name for name in GATED if name not in Arenas._fields]
    chosen = {
        name: jax.tree.map(
            functools.partial(jnp.where, flag), getattr(old, name), getattr(new, name)
        )
        for name in rest
    }
    state = dataclasses.replace(old, **moved._asdict(), **chosen)
    return dataclasses.replace(flow, state=state, bad_slots=bad_slots)
