"""The step with a whole state on every device: every stage that is not that of one.

Devices differ in their part of the batch and in nothing else. What they reduce has the
same bits on each of them, and so has all that follows from it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax import ops, stages
from rjax.inflight import InFlight, stage
from rjax.ops.batch_axes import batch_split_over
from rjax.ops.check_finite import Check
from rjax.parallel.collectives import Axes, anywhere, average, reconcile
from rjax.plan import Slot
from rjax.regions import Role
from rjax.report import Report
from rjax.state import RegionState
from rjax.vjp import loss_gradients


def take_step(
    flow: InFlight, loss_fn: Any, axes: Axes, digest_grads: bool
) -> tuple[RegionState, Report]:
    """Run the pipeline on one of the devices along `axes`, from `begin` on."""
    flow = forward_backward(flow, loss_fn)
    flow = stages.cast_deep_grads(flow)
    flow = reduce_deep(flow, axes)
    flow = cast_first_grads(flow)
    flow = reduce_first(flow, axes)
    if digest_grads:
        flow = stages.digest_grads(flow)

    def agree(found: Check, bad_stats: jax.Array) -> tuple[Check, jax.Array]:
        # The gradients are the same on all devices, what each has seen is not.
        return found, anywhere(bad_stats, axes)

    flow = stages.check_and_scale(flow, agree)
    flow = reconcile_stats(flow, axes)
    flow = stages.apply(flow)
    return stages.finish(flow)


def on_device(loss_fn: Any, axes: Axes, shared: bool) -> Any:
    """Return the loss of one device's part of a batch.

    Args:
        loss_fn: the loss of a batch.
        axes: of the mesh, that the batch is split over.
        shared: whether batch norms look at the whole of it.
    """

    def local(params: Any, batch_stats: Any, batch: Any, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, lax.axis_index(axes))
        with batch_split_over(axes if shared else None):
            return loss_fn(params, batch_stats, batch, key)

    return local


@stage
def forward_backward(
    flow: InFlight, loss_fn: Any, state: RegionState | None = None
) -> InFlight:
    """Run the loss on this device's part of the batch and differentiate it.

    A barrier for each bucket: the first one to be reduced waits for its own gradients,
    not for the end of the backward pass.

    Args:
        flow: the step under way.
        loss_fn: from :func:`on_device`.
        state: with the masters that the forward pass sees, if not those of `flow`.
    """
    found = loss_gradients(
        flow.plan, state or flow.state, flow.batch, loss_fn, flow.scale
    )
    cotangents = list(found.cotangents)
    deep = [i for i, slot in enumerate(flow.plan.slots) if _is_deep(slot)]
    early, loss, metrics = lax.optimization_barrier(
        ([cotangents[i] for i in deep], found.loss, found.metrics)
    )
    first = [i for i in range(len(cotangents)) if i not in set(deep)]
    late, next_stats = lax.optimization_barrier(
        ([cotangents[i] for i in first], found.next_stats)
    )
    for i, value in zip((*deep, *first), (*early, *late), strict=True):
        cotangents[i] = value
    return dataclasses.replace(
        flow,
        batch=None,
        cotangents=tuple(cotangents),
        loss=loss,
        metrics=metrics,
        next_stats=next_stats,
    )


@stage
def reduce_deep(flow: InFlight, axes: Axes) -> InFlight:
    """Average bucket 1 over devices: `G_DEEP_CONV`, loss and metrics, as one array."""
    results, deep = average((flow.loss, flow.metrics), axes, _bucket(flow, deep=True))
    loss, metrics = results
    return dataclasses.replace(flow, deep_grads=deep, loss=loss, metrics=metrics)


@stage
def cast_first_grads(flow: InFlight) -> InFlight:
    """Cast every half gradient that is left and lay these out as bucket 2."""
    bucket = _bucket(flow, deep=False)
    grads = jnp.concatenate([jnp.zeros(0, jnp.float32), *bucket])
    return dataclasses.replace(flow, cotangents=None, grads=grads)


@stage
def reduce_first(flow: InFlight, axes: Axes) -> InFlight:
    """Average bucket 2 (`G_BN_BIAS..G_FIRST_CONV`) and lay it before bucket 1.

    The barrier is that of `cast_first_grads` on one device.
    """
    assert flow.grads is not None and flow.deep_grads is not None
    first = lax.pmean(flow.grads, axes) if flow.grads.size else flow.grads
    grads = lax.optimization_barrier(jnp.concatenate([first, flow.deep_grads]))
    return dataclasses.replace(flow, grads=grads, deep_grads=None)


@stage
def reconcile_stats(flow: InFlight, axes: Axes) -> InFlight:
    """Make running statistics agree over devices: their mean, where they do not."""
    return dataclasses.replace(flow, next_stats=reconcile(flow.next_stats, axes))


def _is_deep(slot: Slot) -> bool:
    return slot.part is Role.DEEP_CONV


def _bucket(flow: InFlight, deep: bool) -> list[jax.Array]:
    """Return what lies in a bucket, in order: float32 gradients and their padding."""
    assert flow.cotangents is not None, "forward_backward comes first"
    pieces = []
    for slot, ct in zip(flow.plan.slots, flow.cotangents, strict=True):
        if _is_deep(slot) == deep:
            padding = slot.capacity - slot.size
            pieces += [
                ops.cast(ct, jnp.float32).reshape(-1),
                jnp.zeros(padding, jnp.float32),
            ]
    return pieces
