"""The loop over epochs: steps, evaluations, and when to stop."""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Generator, Iterable, Mapping
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


@dataclasses.dataclass(frozen=True)
class Passed:
    """An epoch that has been written and told.

    Attributes:
        epoch: its number, from 1.
        state: the newest; with early stopping the one after it.
        loss: on the watched set, if it was evaluated.
    """

    epoch: int
    state: rjax.RegionState
    loss: float | None


def fit(job: Job, program: Any, recorder: Recorder, evaluator: Evaluator) -> Outcome:
    """Train until the epochs, the limit on steps or early stopping end the run.

    Args:
        job: what is trained.
        program: what `job.compile` returned.
        recorder: takes the reports.
        evaluator: of the job.
    """
    one = _step_by_step if job.sampling is None else _whole
    with contextlib.closing(one(job, program, recorder, evaluator)) as epochs:
        return _fit(job, epochs, recorder)


def _fit(job: Job, epochs: Iterable[Passed], recorder: Recorder) -> Outcome:
    loop = job.options.loop
    best: Best | None = None
    ended_by = "epochs" if loop.limit_steps is None else "limit_steps"
    passed = None
    for passed in epochs:
        if loop.early_stop is not None and passed.loss is not None:
            best = _better(best, passed)
            if passed.epoch - best.epoch >= loop.early_stop * loop.eval_every:
                ended_by = "early_stop"
                break
    if recorder.steps == job.steps_per_epoch * loop.epochs:
        ended_by = "epochs"
    if best is not None:
        return Outcome(best.state, ended_by, best.epoch)
    assert passed is not None, "a run has a step at least"
    return Outcome(passed.state, ended_by)


def _step_by_step(
    job: Job, step: Any, recorder: Recorder, evaluator: Evaluator
) -> Generator[Passed, None, None]:
    state = job.initial_state()
    recorder.begin(state)
    with contextlib.closing(job.batches()) as batches:
        for epoch in range(1, job.epochs + 1):
            recorder.start_epoch()
            for batch in itertools.islice(batches, job.steps_per_epoch):
                state, report = step(state, batch)
                recorder.add(report, state)
            recorder.end_epoch(state)
            loss = None
            if job.evaluates(epoch):
                recorder.console.status(f"evaluating on the {job.watched[0]} set")
                loss = _record(job, evaluator(*_seen(job, state)), recorder)
            yield Passed(epoch, state, loss)


def _whole(
    job: Job, program: Any, recorder: Recorder, evaluator: Evaluator
) -> Generator[Passed, None, None]:
    """Train each epoch by one call, and tell it while the next one runs.

    With early stopping the next one is not begun before the last is evaluated.
    """
    state = job.initial_state()
    recorder.begin(state)
    under_way = 0 if job.options.loop.early_stop is not None else 1
    begun: collections.deque[tuple[int, Any]] = collections.deque()

    def told() -> Passed:
        epoch, seen = begun.popleft()
        recorder.end_whole_epoch(state)
        loss = None
        if seen is not None:
            loss = _record(job, evaluator.end(seen), recorder)
        return Passed(epoch, state, loss)

    for epoch in range(1, job.epochs + 1):
        # Interrupted between these lines, an epoch would be missing in the record.
        with recorder.held():
            state, report = program(state)
            recorder.add_epoch(report, state)
        wanted = job.evaluates(epoch)
        begun.append((epoch, evaluator.begin(*_seen(job, state)) if wanted else None))
        if len(begun) > under_way:
            yield told()
    while begun:
        yield told()


def _seen(job: Job, state: rjax.RegionState) -> tuple[Any, ...]:
    """Return what an evaluation looks at while training: state, set and view."""
    return state, job.watched[1], [watched_view(job.config)]


def _record(job: Job, values: Mapping[Any, Any], recorder: Recorder) -> float:
    """Record an evaluation and return its loss."""
    which = watched_view(job.config)
    recorder.evaluated(job.watched[0], which, values[which])
    return values[which]["loss"]


def _better(best: Best | None, passed: Passed) -> Best:
    assert passed.loss is not None
    if best is not None and not passed.loss < best.loss:
        return best
    loss = passed.loss if math.isfinite(passed.loss) else math.inf
    return Best(loss, passed.epoch, jax.tree.map(jnp.copy, passed.state))
