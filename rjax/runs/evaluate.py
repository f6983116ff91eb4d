"""The test set, seen through each copy of the weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.runs.setup import Job
from rjax.weights import Which


def evaluate(job: Job, state: rjax.RegionState) -> dict[str, dict[str, float]]:
    """Return loss and accuracy on the test set for every view that the state has.

    Args:
        job: what was trained.
        state: its state; it is read only.

    Returns:
        `{"master": {"loss": …, "accuracy": …}, "compute": …, "ema": …}`.
    """
    steps = {which: _eval_step(job, which) for which in views(job.config)}

    @jax.jit  # one program for all views: it compiles faster than one for each
    def look(state: rjax.RegionState, batch: Any) -> dict[str, Any]:
        return {which: step(state, batch) for which, step in steps.items()}

    batches = rjax.data.evaluation_batches(job.data.test, job.options.batch_size)
    parts = jax.device_get([look(state, batch) for batch in batches])
    totals = jax.tree.map(lambda *sums: float(sum(sums)), *parts)
    # In the order of the views: jit returned them sorted by name.
    return {which: _means(*totals[which]) for which in steps}


def views(config: rjax.Config) -> tuple[Which, ...]:
    """Return the copies of the weights that a configuration keeps apart."""
    names: list[Which] = ["master"]
    if config.policy.half:
        names.append("compute")
    if config.ema is not None:
        names.append("ema")
    return tuple(names)


def _means(loss: float, hits: float, count: float) -> dict[str, float]:
    return {"loss": loss / count, "accuracy": hits / count}


def _eval_step(job: Job, which: Which) -> Callable[[rjax.RegionState, Any], Any]:
    dtype = job.config.policy.compute_dtype if which == "compute" else jnp.float32

    def sums(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, ...]:
        (images, labels), mask = batch
        variables = {"params": params}
        if batch_stats:
            variables["batch_stats"] = batch_stats
        logits = job.model.apply(variables, images.astype(dtype), train=False)
        losses = rjax.ops.softmax_cross_entropy(logits, labels)
        hits = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
        # Padding is selected away: its loss times 0 could still be NaN.
        return (
            jnp.sum(jnp.where(mask, losses, 0.0)),
            jnp.sum(jnp.where(mask, hits, False)),
            jnp.sum(mask),
        )

    return rjax.make_eval_step(sums, job.plan, which=which)
