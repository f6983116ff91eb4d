"""A set of examples, seen through the copies of the weights."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.runs.setup import Job
from rjax.weights import Which

# Examples per evaluated batch at least; a small training batch would crawl.
SMALLEST_BATCH = 256
# Batches in flight at once: their images wait on the device.
IN_FLIGHT = 32


class Evaluator:
    """Evaluates a job's states; compiles once for each choice of views.

    Args:
        job: what is trained.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._programs: dict[tuple[Which, ...], Any] = {}

    def __call__(
        self, state: rjax.RegionState, examples: Any, views: Sequence[Which]
    ) -> dict[str, dict[str, Any]]:
        """Return loss, accuracy and count over `examples` for each of `views`.

        Args:
            state: read only.
            examples: arrays or a grain dataset.
            views: names of copies of the weights.

        Returns:
            `{"master": {"loss": …, "accuracy": …, "count": …}, …}`: means over every
            example exactly once, and how many there were.
        """
        program = self._program(tuple(views))
        size = max(self._job.options.loop.batch_size, SMALLEST_BATCH)
        size = min(size, rjax.data.num_examples(examples))
        waiting: list[Any] = []
        done: list[Any] = []
        # Closed at once if a batch cannot be read: threads may be reading ahead.
        with contextlib.closing(rjax.data.evaluation_batches(examples, size)) as all_:
            for batch in all_:
                waiting.append(program(state, batch))
                if len(waiting) >= 2 * IN_FLIGHT:
                    done += jax.device_get(waiting[:IN_FLIGHT])
                    del waiting[:IN_FLIGHT]
        done += jax.device_get(waiting)
        # In Python's numbers: neither a sum nor a count rounds.
        totals = jax.tree.map(lambda *sums: sum(s.item() for s in sums), *done)
        return {which: _means(*totals[which]) for which in views}

    def _program(self, views: tuple[Which, ...]) -> Any:
        if views not in self._programs:
            steps = {which: _eval_step(self._job, which) for which in views}

            @jax.jit  # one program for all views: it compiles faster than one for each
            def look(state: rjax.RegionState, batch: Any) -> dict[str, Any]:
                return {which: step(state, batch) for which, step in steps.items()}

            self._programs[views] = look
        return self._programs[views]


def all_views(config: rjax.Config) -> tuple[Which, ...]:
    """Return the copies of the weights that a configuration keeps apart."""
    names: list[Which] = ["master"]
    if config.policy.half:
        names.append("compute")
    if config.ema is not None:
        names.append("ema")
    return tuple(names)


def watched_view(config: rjax.Config) -> Which:
    """Return the copy that evaluations during the run look at."""
    return "master" if config.ema is None else "ema"


def _means(loss: float, hits: int, count: int) -> dict[str, Any]:
    return {"loss": loss / count, "accuracy": hits / count, "count": count}


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
