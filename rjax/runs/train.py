"""`rjax train`."""

import dataclasses
import shlex
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import rjax
from rjax.checkpoint.weights import find_safetensors
from rjax.data import DataError
from rjax.repro import RecordError, deterministic
from rjax.repro.manifest import Manifest, describe_data
from rjax.runs.console import Console, describe_evaluation, percent, say
from rjax.runs.errors import NO_ROOM, UsageError
from rjax.runs.evaluate import Evaluator, all_views
from rjax.runs.interrupts import Interrupted, Interrupts
from rjax.runs.lock import only_writer
from rjax.runs.loop import Run, fit
from rjax.runs.options import TrainOptions, flat
from rjax.runs.processes import is_first, run_folder
from rjax.runs.recipes import describe
from rjax.runs.recorder import Recorder
from rjax.runs.resume import (
    check_resumable,
    find_start,
    leave_weights,
    weights_files,
)
from rjax.runs.saver import Saver
from rjax.runs.setup import Job, prepare_job
from rjax.runs.start import Start, TakenUp
from rjax.runs.tensorboard import TensorBoard, find_writer


def train(options: TrainOptions, command: Sequence[str]) -> int:
    """Train as `options` ask, leave the run's folder, return the exit code.

    Raises:
        UsageError: for bad input; before anything is trained wherever that can be.
        rjax.NonFiniteGradientsError: with the diagnosis, when no scale helps.
    """
    if options.loop.deterministic:
        try:
            deterministic()
        except RuntimeError as error:
            raise UsageError(f"--deterministic: {error}") from None
    with suppress(RuntimeError):  # JAX has started, in a notebook say: without them
        rjax.set_xla_flags()
    if options.loop.compile_cache:
        _enable_cache()
    with Interrupts() as interrupts, ExitStack() as held:
        if options.output.tensorboard:
            find_writer()
        if options.output.weights == "safetensors":
            try:
                find_safetensors()
            except ImportError as error:
                raise UsageError(f"--weights safetensors: {error}") from None
        resume = options.output.resume
        changes = () if resume is None else check_resumable(options)
        if resume is not None and is_first():  # before it is read
            held.enter_context(only_writer(Path(resume)))
        job = prepare_job(options)
        start, lines = None, _opening_lines(job, options)
        if resume is not None:
            start, found = find_start(job)
            lines += [*found, *(f"with {change}" for change in changes)]
        for line in lines:
            say(line)
        source, network = options.source.data, options.network.model
        name = f"{source}-{network}-{options.numerics.precision}"
        folder = run_folder(options.output.out, name, resume)
        try:
            if resume is None:
                held.enter_context(only_writer(folder))
            manifest = _manifest(job, folder, command, start, changes)
            return _record(job, folder, manifest, interrupts, start)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise _no_room(folder) from error


def _enable_cache() -> None:
    """Keep compiled programs if that can be; nothing of the run depends on it."""
    try:
        rjax.enable_compilation_cache()
    except ValueError as error:
        say(f"compiling without a cache: {error}")
    # Of a full disk the run tells itself, should it be its own.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache")


def _manifest(
    job: Job,
    folder: Path,
    command: Sequence[str],
    start: Start | None,
    changes: Sequence[str],
) -> Manifest:
    """Return the manifest of a new run, or of one that goes on."""
    facts = _facts(job, command)
    if start is None or not is_first():
        return Manifest(folder, **facts)
    return Manifest.resumed(folder, start.step, changes=list(changes), **facts)


def _record(
    job: Job,
    folder: Path,
    manifest: Manifest,
    interrupts: Interrupts,
    start: Start | None,
) -> int:
    """Train, and see to it that the manifest says how that ended."""
    with (
        Console(job.total_steps) as console,
        _recorder(job, folder, console, interrupts, start) as recorder,
    ):
        try:
            results = _train(job, folder, console, recorder, start)
        except Interrupted as stop:
            with interrupts.ending():
                recorder.drain(None)
                facts = {"signal": str(stop)}
                manifest.finish("interrupted", _progress(recorder), **facts)
                console.line(f"interrupted {_how_far(recorder, job)}")
                console.line(f"run left in {folder}")
            return stop.code
        except BaseException as error:
            # A full disk may refuse this as well; the first error is the one to tell.
            with interrupts.ending():
                with suppress(OSError):
                    recorder.drain(None)
                with suppress(OSError):
                    manifest.finish("failed", _progress(recorder), error=str(error))
            how_far = _how_far(recorder, job)
            if isinstance(error, DataError | RecordError):
                raise UsageError(f"{error} (ended {how_far})") from error
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise _no_room(folder, f", ended {how_far}") from error
            raise
        with interrupts.ending():
            manifest.finish("finished", results)
            for line in _closing_lines(job, folder, results):
                console.line(line)
    return 0


def _train(
    job: Job, folder: Path, console: Console, recorder: Recorder, start: Start | None
) -> dict[str, Any]:
    if job.options.output.plan:
        console.line(job.plan.table())
    started = time.perf_counter()
    program = job.compile()
    compiled = time.perf_counter()
    start = start or Start(job.initial_state())
    console.line(
        f"training {job.total_steps - start.step} steps in {folder}, "
        f"compiled in {compiled - started:.1f} s"
    )
    evaluator = Evaluator(job)
    with Saver(job, folder, recorder) as saver:
        outcome = fit(Run(job, program, recorder, evaluator, saver), start)
    leave_weights(job, folder, outcome.state)
    trained = time.perf_counter()
    return {
        **_progress(recorder),
        "ended_by": outcome.ended_by,
        "best_epoch": outcome.best_epoch,
        "compile_seconds": compiled - started,
        "train_seconds": trained - compiled,
        "test": evaluator(outcome.state, job.data.test, all_views(job.config)),
    }


def _recorder(
    job: Job,
    folder: Path,
    console: Console,
    interrupts: Interrupts,
    start: Start | None,
) -> Recorder:
    options = job.options
    taken_up = None if start is None else start.taken_up
    board = None
    if options.output.tensorboard:
        first = None if taken_up is None else taken_up.step + 1
        board = TensorBoard(folder / "tensorboard", first)
    if not is_first():
        taken_up = _elsewhere(taken_up)
    return Recorder(
        folder,
        job.plan,
        console,
        interrupts,
        epochs=options.loop.epochs,
        steps_per_epoch=job.steps_per_epoch,
        batch_size=options.loop.batch_size,
        log_every=job.steps_per_epoch if job.sampling else options.output.log_every,
        max_consecutive_skips=options.numerics.max_consecutive_skips,
        tensorboard=board,
        record_every=options.output.record_every,
        snapshot_every=options.output.snapshot_every,
        taken_up=taken_up,
    )


def _elsewhere(taken_up: TakenUp | None) -> TakenUp | None:
    """Return what a process goes on from whose folder is not that of the run."""
    if taken_up is None:
        return None
    return dataclasses.replace(taken_up, metrics=None, evaluations=None)


def _progress(recorder: Recorder) -> dict[str, Any]:
    return {"steps": recorder.steps, "train": recorder.last}


def _how_far(recorder: Recorder, job: Job) -> str:
    return (
        f"after {recorder.steps} of {job.total_steps} steps, in epoch "
        f"{recorder.epoch} of {job.options.loop.epochs}"
    )


def _no_room(folder: Path, how_far: str = "") -> UsageError:
    return UsageError(
        f"no space is left for the run in {folder}{how_far}: free some, or give --out "
        "a folder on another disk"
    )


def _facts(job: Job, command: Sequence[str]) -> dict[str, Any]:
    return {
        "command": shlex.join(command),
        "options": {
            **flat(job.options),
            "learning_rate": job.learning_rate,
            "resume": None,
        },
        # With the rule that `None` stands for.
        "config": dataclasses.replace(job.config, scaling=job.config.scale_rule),
        "seed": job.options.loop.seed,
        "data": describe_data(job.data),
        "plan": {"fingerprint": job.plan.fingerprint, "slots": len(job.plan.slots)},
    }


def _opening_lines(job: Job, given: TrainOptions) -> list[str]:
    """Return what to know of the options before a run begins."""
    lines = [] if given.recipe.recipe is None else [describe(given)]
    wanted, every = given.output.record_every, job.options.output.record_every
    if every != wanted:
        lines.append(
            f"digests every {every} steps: --record-every {wanted} does not divide "
            f"the {job.steps_per_epoch} of an epoch"
        )
    return lines


def _closing_lines(job: Job, folder: Path, results: Mapping[str, Any]) -> list[str]:
    test = results["test"]
    lines = [f"trained {results['steps']} steps in {results['train_seconds']:.1f} s"]
    if results["ended_by"] == "early_stop":
        lines[0] += ", stopped early"
    if results["best_epoch"] is not None:
        lines[0] += f"; the best weights are those of epoch {results['best_epoch']}"
    lines += [describe_evaluation("test", which, seen) for which, seen in test.items()]
    output = job.options.output
    files = "manifest.json, metrics.jsonl, evaluations.jsonl"
    files += ", record" if output.record_every else ""
    files += ", checkpoints" if output.checkpoint_every != 0 else ""
    files += "".join(f", {name}" for name in weights_files(job))
    lines += [f"run left in {folder}: {files}"]
    final = f"test accuracy: {percent(test['master']['accuracy'])} from masters"
    if "ema" in test:
        final += f", {percent(test['ema']['accuracy'])} from EMA"
    return [*lines, final]
