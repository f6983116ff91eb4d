"""`rjax train` and `rjax plan`."""

import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rjax.runs.console import Console
from rjax.runs.evaluate import evaluate
from rjax.runs.folder import claim_folder
from rjax.runs.manifest import Manifest, describe_data
from rjax.runs.options import PlanOptions, TrainOptions, fill_in
from rjax.runs.recorder import Recorder
from rjax.runs.setup import Job, prepare_job, prepare_plan

# Steps between two looks at the reports: often enough for a bar to move and for a
# hopeless run to end, seldom enough for the device never to wait.
DRAIN_EVERY = 50


def print_plan(options: PlanOptions) -> int:
    """Print the layout that `options` ask for; return the exit code."""
    print(prepare_plan(options).table())
    return 0


def train(options: TrainOptions, command: Sequence[str]) -> int:
    """Train as `options` ask, leave the run's folder, return the exit code.

    Raises:
        UsageError: before anything is trained, for bad input.
        rjax.NonFiniteGradientsError: with the diagnosis, when no scale helps.
    """
    job = prepare_job(options)
    name = f"{options.data}-{options.model}-{options.precision}"
    folder = claim_folder(options.out, name)
    manifest = Manifest(folder, **_facts(job, command))
    size = options.batch_size
    with (
        Console(job.total_steps) as console,
        Recorder(folder, job.plan, console, options.epochs, size) as recorder,
    ):
        try:
            results = _train(job, folder, console, recorder)
        except KeyboardInterrupt:
            manifest.finish("interrupted", _progress(recorder))
            console.line(
                f"interrupted after {recorder.steps} of {job.total_steps} steps, in "
                f"epoch {recorder.epoch} of {options.epochs}; run left in {folder}"
            )
            return 130
        except BaseException as error:
            manifest.finish("failed", _progress(recorder), error=str(error))
            raise
        manifest.finish("finished", results)
        for line in _closing_lines(job, folder, results):
            console.line(line)
    return 0


def _train(
    job: Job, folder: Path, console: Console, recorder: Recorder
) -> dict[str, Any]:
    if job.options.plan:
        console.line(job.plan.table())
    started = time.perf_counter()
    step = job.lowered.compile()
    compiled = time.perf_counter()
    console.line(
        f"training {job.total_steps} steps in {folder}, "
        f"compiled in {compiled - started:.1f} s"
    )
    state = _fit(job, step, recorder)
    return {
        **_progress(recorder),
        "compile_seconds": compiled - started,
        "train_seconds": time.perf_counter() - compiled,
        "test": evaluate(job, state),
    }


def _fit(job: Job, step: Any, recorder: Recorder) -> Any:
    """Run all epochs and return the last state."""
    state = job.initial_state()
    for epoch in range(job.options.epochs):
        recorder.start_epoch()
        first = epoch * job.steps_per_epoch
        try:
            for index in range(first, first + job.steps_per_epoch):
                state, report = step(state, job.batch(index))
                recorder.add(report)
                if recorder.pending >= DRAIN_EVERY:
                    recorder.drain(state)
        except KeyboardInterrupt:
            recorder.drain(state)
            raise
        recorder.end_epoch(state)
    return state


def _progress(recorder: Recorder) -> dict[str, Any]:
    return {"steps": recorder.steps, "train": recorder.last or None}


def _facts(job: Job, command: Sequence[str]) -> dict[str, Any]:
    return {
        "command": shlex.join(command),
        "options": fill_in(job.options),
        # With the rule that `None` stands for.
        "config": dataclasses.replace(job.config, scaling=job.config.scale_rule),
        "seed": job.options.seed,
        "data": describe_data(job.data),
        "plan": {"fingerprint": job.plan.fingerprint, "slots": len(job.plan.slots)},
    }


def _closing_lines(job: Job, folder: Path, results: Mapping[str, Any]) -> list[str]:
    test = results["test"]
    seconds = results["train_seconds"]
    lines = [f"trained {results['steps']} steps in {seconds:.1f} s"]
    lines += [f"run left in {folder}: manifest.json, metrics.jsonl"]
    lines += [f"test set, {len(job.data.test[1])} images"]
    for which, metrics in test.items():
        lines.append(
            f"  {which:9}loss {metrics['loss']:.4f}  accuracy "
            + _percent(metrics["accuracy"])
        )
    final = f"test accuracy: {_percent(test['master']['accuracy'])} from masters"
    if "ema" in test:
        final += f", {_percent(test['ema']['accuracy'])} from EMA"
    return [*lines, final]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
