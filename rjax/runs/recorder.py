"""Turns the reports of a run's steps into lines of metrics and words.

Reports stay on the device until many can be fetched at once, and the newest stay
there longer: the loop never waits for the step under way in order to log.
"""

import collections
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

import rjax
from rjax.repro import Recording, record
from rjax.repro.waiting import FETCH, Waiting
from rjax.runs.console import (
    Console,
    describe_evaluation,
    describe_progress,
    describe_status,
)
from rjax.runs.interrupts import Interrupts
from rjax.runs.jsonl import JsonLines
from rjax.runs.start import TakenUp
from rjax.runs.tensorboard import TensorBoard


class Recorder:
    """Collects reports; writes a line per step and a line per evaluation.

    Args:
        folder: the run's folder; gets `metrics.jsonl` and `evaluations.jsonl`.
        plan: names the parameters.
        console: where skips, progress and evaluations are told.
        interrupts: kept from splitting a write.
        epochs: how many there will be.
        steps_per_epoch: steps of a whole epoch.
        batch_size: images per step.
        log_every: steps between two lines of progress within an epoch.
        max_consecutive_skips: skips in a row at which `drain` raises.
        tensorboard: where scalars go as well, if anywhere.
        record_every: steps between two digests of the state; 0 for no record.
        snapshot_every: steps between two snapshots of it; 0 for none.
        taken_up: what there is of a run that goes on.
    """

    def __init__(
        self,
        folder: Path,
        plan: rjax.Plan,
        console: Console,
        interrupts: Interrupts,
        *,
        epochs: int,
        steps_per_epoch: int,
        batch_size: int,
        log_every: int,
        max_consecutive_skips: int,
        tensorboard: TensorBoard | None = None,
        record_every: int = 0,
        snapshot_every: int = 0,
        taken_up: TakenUp | None = None,
    ) -> None:
        self._folder = folder
        self._resumes = taken_up is not None
        before = taken_up or TakenUp(0, (), None, None)
        self._record_every, self._snapshot_every = record_every, snapshot_every
        self._recording: Recording | None = None
        self._metrics = JsonLines(folder / "metrics.jsonl", before.metrics)
        path = folder / "evaluations.jsonl"
        self._evaluations = JsonLines(path, before.evaluations)
        self._plan = plan
        self.console = console
        self._interrupts = interrupts
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._batch_size = batch_size
        self._log_every = log_every
        self._limit = max_consecutive_skips
        self._tensorboard = tensorboard
        self._waiting = Waiting()
        self._whole: collections.deque[rjax.Report] = collections.deque()
        self._began = time.perf_counter()
        self._seen = _Epoch(self._began)
        self.epoch = 0
        self.steps = before.step
        self.last: dict[str, Any] | None = None
        self._take_up(before.rows)

    def _take_up(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Go on in the epoch, or after the epoch, of rows that are written."""
        if not rows:
            return
        self.epoch = rows[0]["epoch"]
        for row in rows:
            self._seen.add(row)
        self._seen.before = len(rows)
        self.last = self._seen.facts(self._batch_size)
        text = describe_status((self.epoch, self._epochs), self.last)
        self.console.status(text, steps=self.steps)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._recording is not None:
            self._recording.close()
        self._evaluations.close()
        self._metrics.close()

    def begin(self, state: rjax.RegionState) -> None:
        """Begin the record of the run with its initial state, if one was asked for."""
        if self._record_every:
            self._recording = record(
                self._folder,
                self._plan,
                state,
                every=self._record_every,
                snapshot_every=self._snapshot_every,
                resume=self._resumes,
            )
        self._began = time.perf_counter()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Let an interrupt wait until the body is done."""
        return self._interrupts.held()

    def start_epoch(self) -> None:
        """Begin the next epoch, or go on in the one taken up, and its clock."""
        self._began = time.perf_counter()
        if self._seen.before and self._seen.steps < self._steps_per_epoch:
            self._seen.started = self._began
        else:
            self._count_epoch()

    def _count_epoch(self) -> None:
        self.epoch += 1
        self._seen = _Epoch(self._began)

    def add(self, report: rjax.Report, state: rjax.RegionState) -> None:
        """Take the report of one step, without waiting for it.

        Args:
            report: of the step just begun.
            state: the state after it, not yet given away to the next step.
        """
        if self._recording is not None:
            self._recording.observe(state, report)
        self._waiting.add(report)
        if due := self._waiting.due():
            self._take(due, state)

    def add_epoch(self, report: rjax.EpochReport, state: rjax.RegionState) -> None:
        """Take the reports of a whole epoch, without waiting for it.

        Args:
            report: of the epoch just begun, with those of all its steps.
            state: the state after it, not yet given away to the next epoch.
        """
        assert report.reports is not None
        self._whole.append(report.reports)
        if self._recording is not None:
            self._recording.add_scanned(state, report.reports, report.digests)

    def end_whole_epoch(self, state: rjax.RegionState | None) -> None:
        """Wait for the oldest of the epochs that wait; write, tell and check it.

        Args:
            state: the newest, for the diagnosis; without it nothing is checked.

        Raises:
            rjax.NonFiniteGradientsError: if too many steps in a row were skipped.
        """
        with self._interrupts.held():
            reports = jax.device_get(self._whole[0])
            self._whole.popleft()
            self._count_epoch()
            self._write(reports)
            self._progress(self.console.line, self.steps)
            self._began = time.perf_counter()
        self._check(reports, state)

    def drain(self, state: rjax.RegionState | None) -> None:
        """Fetch all reports that wait; write, tell and check them.

        Args:
            state: for the diagnosis; without it nothing is checked.

        Raises:
            rjax.NonFiniteGradientsError: if too many steps in a row were skipped.
        """
        while self._whole:
            self.end_whole_epoch(state)
        while left := len(self._waiting):
            self._take(min(left, FETCH), state)

    def write_record(self) -> None:
        """Write what the record has of the steps whose lines are written."""
        # What waits while an epoch is under way is of that one.
        if self._recording is not None and not self._whole:
            self._recording.flush()

    def _take(self, count: int, state: rjax.RegionState | None) -> None:
        # An interrupt between fetching and writing would lose these lines.
        with self._interrupts.held():
            reports = self._waiting.fetch(count)
            self._write(reports)
            if self._recording is not None:
                self._recording.take(reports)
        self._check(reports, state)

    def _write(self, reports: rjax.Report) -> None:
        """Write and tell steps whose reports are on the host."""
        rows = self._rows(reports)
        self._metrics.write(*rows)
        self.steps += len(rows)
        for row, bad_stats in zip(rows, reports.bad_stats.tolist(), strict=True):
            self._tell(row, bad_stats)
        self.last = self._seen.facts(self._batch_size)
        epoch = self.epoch, self._epochs
        self.console.status(describe_status(epoch, self.last), steps=len(rows))

    def _check(self, reports: rjax.Report, state: rjax.RegionState | None) -> None:
        if state is not None:
            rjax.check(reports, self._plan, state, self._limit)

    def end_epoch(self, state: rjax.RegionState) -> None:
        """Drain, and tell the epoch that ended."""
        self.drain(state)
        if self.last is not None:
            self._progress(self.console.line, self.steps)

    def evaluated(self, name: str, which: str, values: Mapping[str, Any]) -> None:
        """Record one evaluation.

        Args:
            name: of the set.
            which: copy of the weights it was seen through.
            values: `loss`, `accuracy` and `count`, the number of examples.
        """
        row = {
            "step": self.steps, "epoch": self.epoch, "set": name, "which": which,
            **values,
        }  # fmt: skip
        with self._interrupts.held():
            self._evaluations.write(row)
            self.console.line(describe_evaluation(name, which, values))
            self._scalars(f"{name}/{which}", self.steps, values)

    def _tell(self, row: dict[str, Any], bad_stats: bool) -> None:
        if not row["applied"]:
            self.console.line(_describe_skip(row, bad_stats))
        self._seen.add(row)
        within = self._seen.steps
        if within % self._log_every == 0 and within < self._steps_per_epoch:
            self.last = self._seen.facts(self._batch_size)
            self._progress(self.console.between, row["step"] + 1)

    def _progress(self, say: Any, steps: int) -> None:
        say(self._describe())
        self._scalars("train", steps, self.last or {})

    def _describe(self) -> str:
        epoch = self.epoch, self._epochs
        return describe_progress(
            epoch, (self._seen.steps, self._steps_per_epoch), self.last or {}
        )

    def _scalars(self, prefix: str, steps: int, values: Mapping[str, Any]) -> None:
        if self._tensorboard is not None:
            named = {f"{prefix}/{name}": value for name, value in values.items()}
            self._tensorboard.scalars(steps, named)

    def _rows(self, reports: rjax.Report) -> list[dict[str, Any]]:
        paths = [slot.path for slot in self._plan.slots]
        columns = {
            "step": reports.step.tolist(),
            "epoch": [self.epoch] * len(reports.step),
            "loss": reports.loss.tolist(),
            "accuracy": reports.metrics["accuracy"].tolist(),
            "scale": reports.scale.tolist(),
            "applied": reports.applied.tolist(),
            "skipped": reports.skipped.tolist(),
            "consecutive_skips": reports.consecutive_skips.tolist(),
            "grad_norm": reports.grad_norm.tolist(),
            "learning_rate": reports.learning_rate.tolist(),
            "offender": [paths[i] if i >= 0 else None for i in reports.offender],
        }
        lines = zip(*columns.values(), strict=True)
        return [dict(zip(columns, line, strict=True)) for line in lines]


class _Epoch:
    """Sums over the steps of one epoch; skipped ones count for nothing but skips.

    Args:
        started: when it began, by `time.perf_counter`.
    """

    def __init__(self, started: float) -> None:
        self.steps = 0
        self._applied = 0
        self._loss = 0.0
        self._accuracy = 0.0
        self._last: Mapping[str, Any] = {}
        self.before = 0  # steps that were taken before this process
        self.started = started

    def add(self, row: Mapping[str, Any]) -> None:
        self.steps += 1
        self._last = row
        if row["applied"]:
            self._applied += 1
            # A number that is not finite is none in a file.
            self._loss += math.nan if row["loss"] is None else row["loss"]
            self._accuracy += row["accuracy"]

    def facts(self, batch_size: int) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        return {
            "loss": self._loss / self._applied if self._applied else math.nan,
            "accuracy": self._accuracy / self._applied if self._applied else math.nan,
            "learning_rate": self._last["learning_rate"],
            "scale": self._last["scale"],
            "skipped": self._last["skipped"],
            "images_per_second": (self.steps - self.before) * batch_size / seconds,
        }


def _describe_skip(row: dict[str, Any], bad_stats: bool) -> str:
    what = "the learning rate is"
    if row["offender"] is not None:
        what = f"the gradient of {row['offender']} is"
    elif bad_stats:
        what = "the new batch statistics are"
    return (
        f"step {row['step']} skipped: {what} not finite at scale {row['scale']:.10g}, "
        f"{row['skipped']} skipped so far"
    )
