"""The loop over epochs: steps, evaluations, and when to stop."""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.runs.evaluate import Evaluator, watched_view
from rjax.runs.recorder import Recorder
from rjax.runs.saver import Saver
from rjax.runs.setup import Job
from rjax.runs.start import Best, Start


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
        state: after it; `None` where that is given away, and nobody asked for it.
        loss: on the watched set, if it was evaluated.
    """

    epoch: int
    state: rjax.RegionState | None
    loss: float | None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run under way.

    Attributes:
        job: what is trained.
        program: what `job.compile` returned.
        recorder: takes the reports.
        evaluator: of the job.
        saver: takes the states.
    """

    job: Job
    program: Any
    recorder: Recorder
    evaluator: Evaluator
    saver: Saver


def fit(run: Run, start: Start) -> Outcome:
    """Train until the epochs, the limit on steps or early stopping end the run.

    Args:
        run: what is trained, and who watches.
        start: where it begins.
    """
    run.recorder.begin(start.state)
    return _Fit(run, start).outcome()


class _Fit:
    """A loop over epochs; its state is given from one to the next."""

    def __init__(self, run: Run, start: Start) -> None:
        self.run, self.job, self.start = run, run.job, start
        self.state, self.best = start.state, start.best

    def outcome(self) -> Outcome:
        job, loop = self.job, self.job.options.loop
        ended_by = "epochs" if loop.limit_steps is None else "limit_steps"
        if not self.start.ended and self._gave_up():
            ended_by = "early_stop"
        elif self.start.ended and self.run.recorder.steps < job.total_steps:
            ended_by = "early_stop"
        if self.run.recorder.steps == job.steps_per_epoch * loop.epochs:
            ended_by = "epochs"
        if self.best is not None:
            return Outcome(self.best.state, ended_by, self.best.epoch)
        return Outcome(self.state, ended_by)

    def _gave_up(self) -> bool:
        """Train; return whether early stopping ended it."""
        epochs = self._step_by_step if self.job.sampling is None else self._whole
        with contextlib.closing(epochs()) as passed:
            return any(map(self._passed, passed))

    def _passed(self, passed: Passed) -> bool:
        """Save what an epoch came to; return whether it is the last."""
        best, epoch = self.best, passed.epoch
        if self.job.options.loop.early_stop is not None and passed.loss is not None:
            assert passed.state is not None
            self.best = best = _better(best, passed.loss, epoch, passed.state)
        if passed.state is not None:
            self.run.saver.after_epoch(epoch, passed.state, passed.loss, best)
        if best is None or passed.loss is None:
            return False
        return self.job.gives_up(epoch, best.epoch)

    def _step_by_step(self) -> Generator[Passed, None, None]:
        job, recorder, saver = self.job, self.run.recorder, self.run.saver
        done = self.start.step
        with contextlib.closing(job.batches(done)) as batches:
            for epoch in range(done // job.steps_per_epoch + 1, job.epochs + 1):
                recorder.start_epoch()
                left = epoch * job.steps_per_epoch - done
                for batch in itertools.islice(batches, left):
                    self.state, report = self.run.program(self.state, batch)
                    recorder.add(report, self.state)
                    done += 1
                    saver.within_epoch(done, self.state, self.best)
                recorder.end_epoch(self.state)
                loss = None
                if job.evaluates(epoch):
                    recorder.console.status(f"evaluating on the {job.watched[0]} set")
                    loss = self._record(self.run.evaluator(*self._seen()))
                yield Passed(epoch, self.state, loss)

    def _whole(self) -> Generator[Passed, None, None]:
        """Train each epoch by one call, and tell it while the next one runs.

        With early stopping the next one is not begun before the last is evaluated.
        """
        job, recorder = self.job, self.run.recorder
        under_way = 0 if job.options.loop.early_stop is not None else 1
        copies = under_way and self.run.saver.saves
        begun: collections.deque[tuple[int, Any, Any]] = collections.deque()

        def told() -> Passed:
            epoch, seen, copy = begun.popleft()
            recorder.end_whole_epoch(self.state)
            loss = None
            if seen is not None:
                loss = self._record(self.run.evaluator.end(seen))
            return Passed(epoch, copy, loss)

        for epoch in range(self.start.step // job.steps_per_epoch + 1, job.epochs + 1):
            # Interrupted between these lines, an epoch would be missing in the record.
            with recorder.held():
                self.state, report = self.run.program(self.state)
                recorder.add_epoch(report, self.state)
            seen = None
            if job.evaluates(epoch):
                seen = self.run.evaluator.begin(*self._seen())
            # The next epoch takes the state over before this one is told.
            copy = _copied(self.state) if copies else None if under_way else self.state
            begun.append((epoch, seen, copy))
            if len(begun) > under_way:
                yield told()
        while begun:
            yield told()

    def _seen(self) -> tuple[Any, ...]:
        """Return what an evaluation looks at while training: state, set and view."""
        return self.state, self.job.watched[1], [watched_view(self.job.config)]

    def _record(self, values: Mapping[Any, Any]) -> float:
        """Record an evaluation and return its loss."""
        which = watched_view(self.job.config)
        self.run.recorder.evaluated(self.job.watched[0], which, values[which])
        return values[which]["loss"]


def _better(
    best: Best | None, loss: float, epoch: int, state: rjax.RegionState
) -> Best:
    if best is not None and not loss < best.loss:
        return best
    return Best(loss if math.isfinite(loss) else math.inf, epoch, _copied(state))


@jax.jit
def _copied(state: rjax.RegionState) -> rjax.RegionState:
    return jax.tree.map(jnp.copy, state)
