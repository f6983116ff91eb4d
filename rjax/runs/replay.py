"""Run a part of a recorded run again, and record it step by step.

A run of `rjax train` is a function of what its manifest holds, so any of its steps can
be had again: from the first one on, in a process that is set up as the run's was.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rjax.repro import RecordError, deterministic, record
from rjax.runs.errors import UsageError
from rjax.runs.options import TrainOptions

# What a replay's manifest repeats, so that a comparison of replays names the causes.
_FACTS = ("options", "seed", "data")


def replay_apart(run: Path, first: int, last: int, out: Path) -> None:
    """Replay in a process of its own, with the environment that the manifest names.

    Args:
        run: folder of a run of `rjax train`.
        first: number of steps that the first recorded state has seen.
        last: number of steps that the last one has seen.
        out: folder that gets a record of the steps between, with digests and snapshots
            of every state.

    Raises:
        UsageError: if the run cannot be replayed here.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_"))
    }
    found = manifest_of(run).get("environment")
    named = found if isinstance(found, Mapping) else {}
    environment = kept | {str(name): str(value) for name, value in named.items()}
    words = [sys.executable, "-m", __name__, str(run), str(first), str(last), str(out)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise UsageError(f"{run} cannot be replayed: {lines[-1]}")


def manifest_of(run: Path) -> dict[str, Any]:
    """Return the manifest of a run of `rjax train`.

    Raises:
        UsageError: if there is none.
    """
    path = run / "manifest.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("options"), dict):
        raise UsageError(
            f"{path} names no options of `rjax train`: only its runs can be replayed "
            "or resumed; record runs of your own loop with snapshot_every instead"
        )
    return found


def options_of(run: Path) -> TrainOptions:
    """Return the options that a run was started with.

    Raises:
        UsageError: if its manifest does not hold them, or others than are known here.
    """
    left = dict(manifest_of(run)["options"])
    groups = {}
    for group in dataclasses.fields(TrainOptions):
        default = getattr(TrainOptions(), group.name)
        values = {}
        for field in dataclasses.fields(default):
            if field.name not in left:
                raise _other_version(run, field.name)
            value = left.pop(field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
        groups[group.name] = dataclasses.replace(default, **values)
    if left:
        raise _other_version(run, next(iter(left)))
    return TrainOptions(**groups)


def _other_version(run: Path, name: str) -> UsageError:
    return UsageError(
        f"{run} was trained by a version of rjax with other options ({name}): replay "
        "it with that version"
    )


def replay(run: Path, first: int, last: int, out: Path) -> None:
    """Run the first `last` steps of a run again, and record them from `first` on.

    Arguments and errors as for :func:`replay_apart`.
    """
    from rjax.runs.setup import prepare_job

    options = options_of(run)
    for again in manifest_of(run).get("resumed", ()):
        if again.get("changes"):
            raise UsageError(
                f"{run} went on with other options after {again['step']} steps "
                f"({again['changes'][0]}): such a run cannot be replayed"
            )
    if options.loop.deterministic:
        deterministic()
    job = prepare_job(options)
    if last > job.total_steps:
        raise UsageError(f"the run has {job.total_steps} steps, not {last}")
    step = job.spread.program(job.traced.compile())
    state = job.initial_state()
    batches = job.batches()
    for _ in range(first):
        state, _ = step(state, next(batches))
    known = manifest_of(run)
    facts = {name: known[name] for name in _FACTS if name in known}
    with record(
        out, job.plan, state, every=1, snapshot_every=1, facts=facts
    ) as recording:
        for _ in range(first, last):
            state, report = step(state, next(batches))
            recording.add(state, report)
    batches.close()


def main(words: list[str]) -> int:
    """Replay as the command line says; complain in one line."""
    run, first, last, out = words
    try:
        replay(Path(run), int(first), int(last), Path(out))
    except (UsageError, RecordError, RuntimeError, ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
