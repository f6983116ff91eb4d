"""`rjax compare`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from rjax.repro import RecordError, compare
from rjax.runs.console import say
from rjax.runs.errors import UsageError

_A = Annotated[str, tyro.conf.arg(metavar="RUN_A")]
_B = Annotated[str, tyro.conf.arg(metavar="RUN_B")]
_File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Say whether two runs are bit-identical (exit code 0) or where they differ (1).

    Attributes:
        run_a: Folder of a run, as `rjax train` leaves it.
        run_b: Folder of another run.
        html: Write the comparison to this file too, as a page with both runs' losses
            and loss scales drawn.
    """

    run_a: tyro.conf.Positional[_A]
    run_b: tyro.conf.Positional[_B]
    html: _File = None


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
    return 0 if found.verdict == "bit-identical" else 1
