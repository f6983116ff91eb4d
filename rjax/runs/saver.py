"""When a run saves a checkpoint, and what with it."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

import rjax
from rjax.checkpoint import Checkpoints
from rjax.runs.recorder import Recorder
from rjax.runs.setup import Job
from rjax.runs.start import Best

FOLDER = "checkpoints"


class Saver:
    """Saves checkpoints of a run into its folder; a context manager.

    What a run has written of a step is on disk before a checkpoint of it is: a run that
    is taken up there lacks no line.

    Args:
        job: what is trained.
        folder: of the run.
        recorder: of the run.
    """

    def __init__(self, job: Job, folder: Path, recorder: Recorder) -> None:
        output = job.options.output
        self._job, self._recorder = job, recorder
        self._every = output.checkpoint_every
        self._checkpoints = None
        if self._every != 0:
            keep = output.keep_checkpoints
            self._checkpoints = Checkpoints(
                folder / FOLDER, job.plan, keep=keep, best="loss", mode="min"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._checkpoints is not None:
            self._checkpoints.__exit__(kind, error, trace)

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints at all."""
        return self._checkpoints is not None

    def within_epoch(self, step: int, state: rjax.RegionState, best: Any) -> None:
        """Save the state after a step that does not end an epoch, if its turn is come.

        Args:
            step: how many steps the state has seen.
            state: not yet given away.
            best: of early stopping, so far.
        """
        ends = step % self._job.steps_per_epoch == 0 or step == self._job.total_steps
        if self._every and step % self._every == 0 and not ends:
            self._recorder.drain(state)
            self._save(state, best, {})

    def after_epoch(
        self,
        epoch: int,
        state: rjax.RegionState,
        loss: float | None,
        best: Best | None,
    ) -> None:
        """Save the state after an epoch that has been written and evaluated.

        Args:
            epoch: its number, from 1.
            state: after it.
            loss: on the watched set, if it was evaluated.
            best: of early stopping, this epoch included.
        """
        is_best = best is not None and best.epoch == epoch
        if is_best or epoch == self._job.epochs or self._due(epoch):
            self._save(state, best, {} if loss is None else {"loss": loss})

    def _due(self, epoch: int) -> bool:
        steps = self._job.steps_per_epoch
        if self._every:
            return epoch * steps // self._every > (epoch - 1) * steps // self._every
        if self._checkpoints is None:
            return False
        # Several processes must not differ in what they do.
        return jax.process_count() > 1 or not self._checkpoints.busy

    def _save(self, state: Any, best: Best | None, metrics: dict[str, float]) -> None:
        if self._checkpoints is None:
            return
        self._recorder.write_record()
        data = None
        if best is not None:
            loss = best.loss if math.isfinite(best.loss) else None
            data = {"epoch": best.epoch, "loss": loss}
        self._checkpoints.save(state, data={"best": data}, metrics=metrics)
