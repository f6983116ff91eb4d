"""`rjax compare`."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import tyro

from rjax.repro import RecordError, compare
from rjax.repro.opened import open_record
from rjax.repro.scan import scan_digests
from rjax.runs.console import say
from rjax.runs.errors import UsageError
from rjax.runs.replay import replay_apart

_A = Annotated[str, tyro.conf.arg(metavar="RUN_A")]
_B = Annotated[str, tyro.conf.arg(metavar="RUN_B")]
_Steps = Annotated[int | None, tyro.conf.arg(metavar="STEP", help_behavior_hint="")]
_File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Say whether two runs are bit-identical (exit code 0) or where they differ (1).

    Attributes:
        run_a: Folder of a run, as `rjax train` leaves it.
        run_b: Folder of another run.
        html: Write the comparison to this file too, as a page with both runs' losses
            and loss scales drawn.
        replay: Number of steps at which the states differ: train both runs of `rjax
            train` again up to there, in processes of their own, and show the first
            element that differs on the way from the digests before.
    """

    run_a: tyro.conf.Positional[_A]
    run_b: tyro.conf.Positional[_B]
    html: _File = None
    replay: _Steps = None


def compare_runs(options: CompareOptions) -> int:
    """Compare two runs, say what was found, return the exit code.

    Raises:
        UsageError: if a record cannot be used, or the page cannot be written.
    """
    try:
        found = compare(options.run_a, options.run_b)
    except RecordError as error:
        raise UsageError(str(error)) from error
    say(found.text())
    if options.html is not None:
        try:
            Path(options.html).write_text(found.to_html(), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--html {options.html} cannot be written ({error.strerror}): give "
                "another file"
            ) from error
    if options.replay is not None:
        _replay(Path(options.run_a), Path(options.run_b), options.replay)
    return 0 if found.verdict == "bit-identical" else 1


def _replay(a: Path, b: Path, step: int) -> None:
    """Train both runs again up to a step and say where the last steps part.

    Raises:
        UsageError: if a run cannot be replayed.
    """
    if step < 1:
        raise UsageError(f"--replay must be a number of steps above 0, got {step}")
    first = max(0, step - max(1, *(open_record(run).layout.every for run in (a, b))))
    with tempfile.TemporaryDirectory() as folder:
        replays = Path(folder) / "A", Path(folder) / "B"
        for run, out in zip((a, b), replays, strict=True):
            say(f"\nreplaying {run}, the state after steps {first} to {step}")
            replay_apart(run, first, step, out)
            strange = scan_digests(open_record(run), open_record(out)).step
            if strange is not None:
                say(
                    f"the replay has other bits than {run} recorded after {strange} "
                    "steps: another machine, version or data, or a run that was not "
                    "deterministic; what follows is of the replays"
                )
        say("\nThe replays: " + compare(*replays).text())
