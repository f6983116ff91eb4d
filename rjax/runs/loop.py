"""The loop over epochs: steps, evaluations, and when to stop."""

import contextlib
import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.runs.evaluate import Evaluator, watched_view
from rjax.runs.recorder import Recorder
from rjax.runs.setup import Job


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far, and its state.

    Attributes:
        loss: on the watched set.
        epoch: after which it was seen.
        state: a copy, which no later step takes over.
    """

    loss: float
    epoch: int
    state: rjax.RegionState


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a loop ended.

    Attributes:
        state: the last one, or with early stopping that of the best evaluation.
        ended_by: "epochs", "limit_steps" or "early_stop".
        best_epoch: the epoch that `state` is from, where early stopping chose it.
    """

    state: rjax.RegionState
    ended_by: str
    best_epoch: int | None = None


def fit(job: Job, step: Any, recorder: Recorder, evaluator: Evaluator) -> Outcome:
    """Train until the epochs, the limit on steps or early stopping end the run."""
    with contextlib.closing(job.batches()) as batches:
        return _fit(job, step, batches, recorder, evaluator)


def _fit(
    job: Job, step: Any, batches: Any, recorder: Recorder, evaluator: Evaluator
) -> Outcome:
    loop = job.options.loop
    state = job.initial_state()
    recorder.begin(state)
    best: Best | None = None
    ended_by = "epochs" if loop.limit_steps is None else "limit_steps"
    for epoch in range(1, loop.epochs + 1):
        recorder.start_epoch()
        for batch in itertools.islice(batches, job.steps_per_epoch):
            state, report = step(state, batch)
            recorder.add(report, state)
        recorder.end_epoch(state)
        last = recorder.steps >= job.total_steps
        if loop.eval_every and (epoch % loop.eval_every == 0 or last):
            loss = _evaluate(job, state, recorder, evaluator)
            if loop.early_stop is not None:
                best = _better(best, loss, epoch, state)
                if epoch - best.epoch >= loop.early_stop * loop.eval_every:
                    ended_by = "early_stop"
                    break
        if last:
            break
    if recorder.steps == job.steps_per_epoch * loop.epochs:
        ended_by = "epochs"
    if best is not None:
        return Outcome(best.state, ended_by, best.epoch)
    return Outcome(state, ended_by)


def _evaluate(
    job: Job, state: rjax.RegionState, recorder: Recorder, evaluator: Evaluator
) -> float:
    """Evaluate the watched view on the watched set, record it, return the loss."""
    name, examples = job.watched
    which = watched_view(job.config)
    recorder.console.status(f"evaluating on the {name} set")
    values = evaluator(state, examples, [which])[which]
    recorder.evaluated(name, which, values)
    return values["loss"]


def _better(
    best: Best | None, loss: float, epoch: int, state: rjax.RegionState
) -> Best:
    if best is not None and not loss < best.loss:
        return best
    loss = loss if math.isfinite(loss) else math.inf
    return Best(loss, epoch, jax.tree.map(jnp.copy, state))
