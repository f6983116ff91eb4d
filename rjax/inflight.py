"""A step under way: what the stages hand on to one another."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.plan import Plan
from rjax.state import RegionState

# The stages that have a name in the lowered program, in the order of the pipeline.
STAGES = (
    "forward_backward", "cast_deep_grads", "reduce_deep", "cast_first_grads",
    "reduce_first", "digest_grads", "check_and_scale", "reconcile_stats",
    "commit_stats", "update", "update_ema", "cast_to_compute", "cast_ema_to_compute",
)  # fmt: skip


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "state", "batch", "scale", "learning_rate", "cotangents", "deep_grads",
        "grads", "loss", "metrics", "next_stats", "flag", "bad_stats", "grad_norm",
        "bad_slots", "grad_digests",
    ],
    meta_fields=["plan", "implementation"],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class InFlight:
    """A step under way: the state plus what the stages have found so far.

    Fields are `None` until a stage fills them.

    Attributes:
        plan: the static layout.
        implementation: of the range operations, `None` to choose.
        state: the state; only the gated stages and `check_and_scale` change it.
        batch: the batch, dropped once the gradients are there.
        scale: f32[], loss scale of this step.
        learning_rate: f32[], rate of this step; 0 with an Optax optimizer.
        cotangents: one gradient per slot, times `scale`, as the backward pass gave it.
        deep_grads: f32[n - d], over several devices: those of `G_DEEP_CONV`, averaged,
            until the others are.
        grads: f32[n], all gradients, times `scale`.
        loss: f32[], mean loss, unscaled.
        metrics: pytree from the loss function.
        next_stats: running statistics after this step.
        flag: bool[], set if the step must be skipped.
        bad_stats: bool[], set if the new statistics are not finite.
        grad_norm: f32[], norm of the true gradient before the clip; NaN on a skip.
        bad_slots: bool[slots], which gradients are not finite.
        grad_digests: u32[slots, 2], digest of each slot of `grads`; `None` where
            `digest_grads` is left out.
    """

    plan: Plan
    implementation: str | None
    state: RegionState
    batch: Any
    scale: jax.Array
    learning_rate: jax.Array
    cotangents: tuple[jax.Array, ...] | None = None
    deep_grads: jax.Array | None = None
    grads: jax.Array | None = None
    loss: Any = None
    metrics: Any = None
    next_stats: Any = None
    flag: Any = None
    bad_stats: Any = None
    grad_norm: Any = None
    bad_slots: Any = None
    grad_digests: jax.Array | None = None

    @property
    def grads_half(self) -> jax.Array | None:
        """half[n - b]: the gradients that the backward pass left in half precision.

        Laid out as the compute copy; zero where a gradient came out in float32.
        `None` in fp32 and once the gradients are packed in float32.
        """
        if self.cotangents is None or self.plan.half_dtype is None:
            return None
        dtype = self.plan.half_dtype
        values = [
            ct if ct.dtype == dtype else jnp.zeros(ct.shape, dtype)
            for ct in self.cotangents
        ]
        return self.plan.concatenate(values, dtype)[self.plan.bias_like :]


Stage = Callable[..., InFlight]


def stage(body: Stage) -> Stage:
    """Give a stage its name in the lowered program, even if it has nothing to do."""
    assert body.__name__ in STAGES

    @functools.wraps(body)
    def run(flow: InFlight, *args: Any, **kwargs: Any) -> InFlight:
        with jax.named_scope(body.__name__):
            scale, bad_slots = lax.optimization_barrier((flow.scale, flow.bad_slots))
            marked = dataclasses.replace(flow, scale=scale, bad_slots=bad_slots)
            return body(marked, *args, **kwargs)

    return run


def evolve(flow: InFlight, **changes: Any) -> InFlight:
    """Return the step under way with some fields of its state replaced."""
    return dataclasses.replace(flow, state=dataclasses.replace(flow.state, **changes))
