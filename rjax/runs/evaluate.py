"""The test set, seen through each copy of the weights."""

from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.runs.setup import Job


def evaluate(job: Job, state: rjax.RegionState) -> dict[str, dict[str, float]]:
    """Return loss and accuracy on the test set for every view that the state has.

    Args:
        job: what was trained.
        state: its state; it is read only.

    Returns:
        `{"master": {"loss": …, "accuracy": …}, "compute": …, "ema": …}`.
    """
    return {which: _evaluate(job, state, which) for which in views(job.config)}


def views(config: rjax.Config) -> tuple[str, ...]:
    """Return the copies of the weights that a configuration keeps apart."""
    compute = ("compute",) if config.policy.half else ()
    ema = ("ema",) if config.ema is not None else ()
    return ("master", *compute, *ema)


def _evaluate(job: Job, state: rjax.RegionState, which: Any) -> dict[str, float]:
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

    step = jax.jit(rjax.make_eval_step(sums, job.plan, which=which))
    batches = rjax.data.evaluation_batches(job.data.test, job.options.batch_size)
    parts = jax.device_get([step(state, batch) for batch in batches])
    loss, hits, count = (float(sum(column)) for column in zip(*parts, strict=True))
    return {"loss": loss / count, "accuracy": hits / count}
