"""Turns the reports of a run's steps into lines of metrics and words.

Reports stay on the device until `drain`: the loop never waits for a step in order to
log it.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

import rjax
from rjax.runs.console import Console, describe_progress
from rjax.runs.manifest import dumps


class Recorder:
    """Collects reports and writes `metrics.jsonl`, one line per step.

    Args:
        folder: the run's folder.
        plan: names the parameters.
        console: where skips and epochs are told.
        epochs: how many there will be.
        batch_size: images per step.
    """

    def __init__(
        self,
        folder: Path,
        plan: rjax.Plan,
        console: Console,
        epochs: int,
        batch_size: int,
    ) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._plan = plan
        self._console = console
        self._epochs = epochs
        self._batch_size = batch_size
        self._pending: list[rjax.Report] = []
        self._epoch_rows: list[dict[str, Any]] = []
        self._epoch_started = 0.0
        self.epoch = 0
        self.steps = 0
        self.last: dict[str, Any] = {}

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, report: rjax.Report) -> None:
        """Take the report of one step, without waiting for it."""
        self._pending.append(report)

    def start_epoch(self) -> None:
        """Begin the next epoch, and its clock."""
        self.epoch += 1
        self._epoch_rows = []
        self._epoch_started = time.perf_counter()

    @property
    def pending(self) -> int:
        """How many reports wait for `drain`."""
        return len(self._pending)

    def drain(self, state: rjax.RegionState) -> None:
        """Fetch the waiting reports, write and tell them, and check them.

        Raises:
            rjax.NonFiniteGradientsError: if too many steps in a row were skipped.
        """
        reports, self._pending = jax.device_get(self._pending), []
        if not reports:
            return
        rows = [self._row(report) for report in reports]
        self._file.write("".join(dumps(row) + "\n" for row in rows))
        self._file.flush()
        for row, report in zip(rows, reports, strict=True):
            if not row["applied"]:
                self._console.line(_describe_skip(row, bool(report.bad_stats)))
        self._epoch_rows += rows
        self.last = self._facts()
        text = describe_progress(self.epoch, self._epochs, self.last)
        self._console.advance(len(rows), text)
        rjax.check(
            jax.tree.map(lambda *leaves: np.stack(leaves), *reports), self._plan, state
        )

    def end_epoch(self, state: rjax.RegionState) -> None:
        """Drain, and tell the epoch that ended."""
        self.drain(state)
        self._console.line(describe_progress(self.epoch, self._epochs, self.last))

    def _row(self, report: rjax.Report) -> dict[str, Any]:
        self.steps += 1
        offender = int(report.offender)
        return {
            "step": int(report.step),
            "epoch": self.epoch,
            "loss": float(report.loss),
            "accuracy": float(report.metrics["accuracy"]),
            "scale": float(report.scale),
            "applied": bool(report.applied),
            "skipped": int(report.skipped),
            "consecutive_skips": int(report.consecutive_skips),
            "grad_norm": float(report.grad_norm),
            "learning_rate": float(report.learning_rate),
            "offender": self._plan.slots[offender].path if offender >= 0 else None,
        }

    def _facts(self) -> dict[str, Any]:
        rows = self._epoch_rows
        seconds = time.perf_counter() - self._epoch_started
        return {
            "loss": float(np.mean([row["loss"] for row in rows])),
            "accuracy": float(np.mean([row["accuracy"] for row in rows])),
            "scale": rows[-1]["scale"],
            "skipped": rows[-1]["skipped"],
            "images_per_second": len(rows) * self._batch_size / seconds,
        }


def _describe_skip(row: dict[str, Any], bad_stats: bool) -> str:
    what = "the learning rate is"
    if row["offender"] is not None:
        what = f"the gradient of {row['offender']} is"
    elif bad_stats:
        what = "the new batch statistics are"
    return (
        f"step {row['step']} skipped: {what} not finite at scale {row['scale']:g}, "
        f"{row['skipped']} skipped so far"
    )
