"""A run of `rjax train` taken up again, with the bits of an unbroken one."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import rjax
from rjax.checkpoint import CheckpointError, files
from rjax.checkpoint.restoring import Read, read_newest, read_one, restored
from rjax.repro import RecordError
from rjax.repro import format as on_disk
from rjax.runs.errors import UsageError
from rjax.runs.jsonl import whole_lines
from rjax.runs.options import TrainOptions, flag, flat
from rjax.runs.recipes import change
from rjax.runs.replay import manifest_of, options_of
from rjax.runs.saver import FOLDER
from rjax.runs.setup import Job
from rjax.runs.start import Best, Start, TakenUp

# What says which examples a step takes, or what its line in the record is.
_FIXED = (
    "data", "image_size", "normalize", "batch_size", "seed", "validation_fraction",
    "whole_epochs", "record_every", "record_grads",
)  # fmt: skip
# What may be another in every process that takes a run up, and changes no number.
_FREE = frozenset(
    "resume coordinator processes process heartbeat data_dir compile_cache plan "
    "log_every tensorboard snapshot_every checkpoint_every keep_checkpoints "
    "weights".split()
)


def check_resumable(options: TrainOptions) -> tuple[str, ...]:
    """Return in what options differ from those of the run that they take up.

    What changes no number is left out.

    Raises:
        UsageError: if it is no run, or if one of them cannot be another.
    """
    run = _run(options)
    before, now = flat(options_of(run)), flat(options)
    if before["out"] != now["out"]:
        raise UsageError(f"--resume goes on in {run}: leave out --out")
    if (before["early_stop"] is None) != (now["early_stop"] is None):
        if now["validation_fraction"] is None:
            raise UsageError(
                "--early-stop would hold other images out than the run has trained on: "
                "leave it out, or start a new run"
            )
    names = [x for x in now if x not in _FREE and now[x] != before[x]]
    for name in names:
        stops = name == "record_every" and not now[name]
        if name in _FIXED and not stops:
            raise UsageError(
                f"{flag(name)} was {before[name]} and cannot change in a run that goes "
                "on: leave it out, or start a new run"
            )
    return tuple(change(name, now[name], before[name]) for name in names)


def find_start(job: Job) -> tuple[Start, list[str]]:
    """Return where the run of a job goes on, and lines about it.

    Raises:
        UsageError: if nothing is left to do, or it cannot go on.
    """
    run = _run(job.options)
    known = manifest_of(run)
    if (known.get("data") or {}).get("fingerprint") != job.data.fingerprint:
        raise UsageError(
            f"{run} was trained on other data than {flag('data')} "
            f"{job.options.source.data} gives here: give the same files"
        )
    read, refused = _newest(job, run)
    lines = [f"not used: {sentence}" for sentence in refused]
    if read is None:
        return _anew(job, run), [*lines, f"{run} has no checkpoint yet: from the start"]
    try:
        found = restored(read, job.plan, job.initial_state())
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    best = _best(job, run, read, found)
    ended = _has_ended(job, found.step, best)
    if ended and known.get("status") == "finished":
        raise UsageError(
            f"{run} has taken its {found.step} steps: give more, such as by --epochs, "
            "to go on"
        )
    taken_up = _taken_up(job, run, found.step)
    lines.append(f"going on in {run} after {found.step} of {job.total_steps} steps")
    return Start(found.state, found.step, best, taken_up, ended), lines


def _run(options: TrainOptions) -> Path:
    assert options.output.resume is not None
    return Path(options.output.resume)


def _newest(job: Job, run: Path) -> tuple[Read | None, tuple[str, ...]]:
    """Return the newest checkpoint of whose steps every line is there."""
    folder = run / FOLDER
    sealed = []
    if (folder / files.MARKER).exists():
        steps = files.steps_in(folder)
        sealed = [x for x in steps if (folder / str(x) / files.SEAL).exists()]
    if not sealed:
        return None, ()
    written = _Written(job, run)
    if not any(map(written.suits, sealed)):
        raise UsageError(
            f"{run} has lost what it wrote of the steps before its checkpoints: start "
            f"a new run; the weights are in {folder}"
        )
    try:
        return read_newest(folder, suits=written.suits)
    except CheckpointError as error:
        raise UsageError(str(error)) from error


class _Written:
    """How far the files of a run reach."""

    def __init__(self, job: Job, run: Path) -> None:
        # By its own options: others may ask for other evaluations.
        self._job = dataclasses.replace(job, options=options_of(run))
        rows = (row["step"] for row, _ in whole_lines(run / "metrics.jsonl"))
        self._last = max(rows, default=-1) + 1
        if job.options.output.record_every:
            self._last = min(self._last, _recorded(run / on_disk.FOLDER))
        evaluations = whole_lines(run / "evaluations.jsonl")
        self._evaluated = {row["step"] for row, _ in evaluations}

    def suits(self, step: int) -> bool:
        """Whether every line of the steps before is there, and of the evaluation."""
        epoch, rest = divmod(step, self._job.steps_per_epoch)
        ends = not rest or step == self._job.total_steps
        evaluates = ends and step and self._job.evaluates(epoch + bool(rest))
        return step <= self._last and (not evaluates or step in self._evaluated)


def _recorded(inner: Path) -> int:
    """Return how many steps the record of a run has seen."""
    try:
        row = on_disk.read_layout(inner).step_row
        rows = on_disk.Rows(inner / on_disk.STEPS, row)
        return int(rows.read(rows.count - 1, 1)["step"][0]) + 1 if rows.count else 0
    except RecordError:
        return 0


def _anew(job: Job, run: Path) -> Start:
    return Start(job.initial_state(), taken_up=_taken_up(job, run, 0))


def _taken_up(job: Job, run: Path, step: int) -> TakenUp:
    """Return what stays of the files of a run that goes on after a step."""
    last = max(step - 1, 0) // job.steps_per_epoch + 1
    rows, ends = [], []
    for name, stays in (("metrics", step - 1), ("evaluations", step)):
        path, end = run / f"{name}.jsonl", 0
        for row, after in whole_lines(path):
            if row["step"] > stays or (name == "evaluations" and not step):
                break
            end = after
            if name == "metrics" and row["epoch"] == last:
                rows.append(row)
        ends.append(end if path.exists() else None)
    return TakenUp(step, tuple(rows), *ends)


def _best(job: Job, run: Path, read: Read, found: Any) -> Best | None:
    """Return the best evaluation that early stopping has seen by then."""
    kept = (found.data or {}).get("best")
    if job.options.loop.early_stop is None or kept is None:
        return None
    epoch = kept["epoch"]
    step = min(epoch * job.steps_per_epoch, job.total_steps)
    try:
        if step != found.step:
            read = read_one(run / FOLDER / str(step))
        state = restored(read, job.plan, job.initial_state()).state
    except CheckpointError as error:
        raise UsageError(f"the best weights so far cannot be had: {error}") from error
    return Best(math.inf if kept["loss"] is None else kept["loss"], epoch, state)


def _has_ended(job: Job, step: int, best: Best | None) -> bool:
    if step >= job.total_steps:
        return True
    epoch, rest = divmod(step, job.steps_per_epoch)
    return best is not None and not rest and job.gives_up(epoch, best.epoch)


def weights_files(job: Job) -> dict[str, Any]:
    """Return the file of every kind of weights that a run leaves at its end."""
    suffix = job.options.output.weights
    if suffix == "none":
        return {}
    files = {f"weights.{suffix}": "master"}
    if job.config.ema is not None:
        files[f"weights_ema.{suffix}"] = "ema"
    return files


def leave_weights(job: Job, folder: Path, state: rjax.RegionState) -> None:
    """Write the weights that a run ends with into its folder."""
    for name, which in weights_files(job).items():
        rjax.checkpoint.export_weights(folder / name, job.plan, state, which)
