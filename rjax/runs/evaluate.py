"""A set of examples, seen through the copies of the weights."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rjax
from rjax.runs.setup import Job
from rjax.weights import Which

# Examples per evaluated batch at least; a small training batch would crawl.
SMALLEST_BATCH = 256
# Batches in flight at once: their images wait on the device.
IN_FLIGHT = 32
# Bytes of images in one batch of a set that lies on the device.
RESIDENT = 2**25


class Evaluator:
    """Evaluates a job's states; compiles once for each choice of views.

    Of a job that trains whole epochs, the sets that are evaluated stay on the device
    too, and each is seen in one program.

    Args:
        job: what is trained.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._programs: dict[tuple[Which, ...], Any] = {}
        # By identity, with the set itself, so that no other can have the same.
        self._resident: dict[int, tuple[Any, Any]] = {}

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
        return self.end(self.begin(state, examples, views))

    def begin(
        self, state: rjax.RegionState, examples: Any, views: Sequence[Which]
    ) -> Any:
        """Begin an evaluation, for :meth:`end`, with the arguments of a call.

        The state may be given away once this returns. Of sets on the device nothing is
        waited for.
        """
        state = self._job.spread.whole(state)
        if self._job.sampling is not None:
            batches = self._placed(examples)
            return views, self._program(tuple(views), scanned=True)(state, batches)
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
        return views, jax.tree.map(lambda *sums: np.stack(sums), *done)

    def end(self, begun: Any) -> dict[str, dict[str, Any]]:
        """Wait for an evaluation that has begun, and return what a call returns."""
        views, sums = begun
        # In Python's numbers: neither a sum nor a count rounds.
        totals = jax.tree.map(lambda parts: sum(parts.tolist()), jax.device_get(sums))
        return {which: _means(*totals[which]) for which in views}

    def _program(self, views: tuple[Which, ...], scanned: bool = False) -> Any:
        if views not in self._programs:
            steps = {which: _eval_step(self._job, which) for which in views}

            # One program for all views: it compiles faster than one for each.
            def look(state: rjax.RegionState, batch: Any) -> dict[str, Any]:
                return {which: step(state, batch) for which, step in steps.items()}

            def scan(state: rjax.RegionState, batches: Any) -> dict[str, Any]:
                return lax.map(functools.partial(look, state), batches)

            self._programs[views] = jax.jit(scan if scanned else look)
        return self._programs[views]

    def _placed(self, examples: Any) -> Any:
        """Return the batches of a set, stacked, on the device."""
        if id(examples) not in self._resident:
            images, labels = examples
            size = max(1, min(len(labels), RESIDENT // images[:1].nbytes))
            batches = list(rjax.data.evaluation_batches(examples, size))
            stacked = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *batches)
            self._resident[id(examples)] = examples, stacked
        return self._resident[id(examples)][1]


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
