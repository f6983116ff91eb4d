"""`rjax sweep`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from rjax.runs.console import say
from rjax.runs.errors import UsageError
from rjax.runs.sweeps import sweep
from rjax.runs.sweeps.axes import parse

_Settings = Annotated[tuple[str, ...], tyro.conf.arg(metavar="AXIS=VALUE,VALUE ...")]
_Folder = Annotated[str, tyro.conf.arg(metavar="DIR")]
_seeds = tyro.conf.arg(metavar="INT ...", help_behavior_hint="")
_Seeds = Annotated[tuple[int, ...] | None, _seeds]


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Train one run under several settings and lay out what came of it, side by side.

    What all runs share stands at the end, after `--`, as for `rjax train`:
    `rjax sweep precision=fp32,fp16 rule=halving,dynamic -- --data digits --epochs 5`

    Attributes:
        settings: What is varied: options of `rjax train` by their names, `rule` for
            the rule of the loss scale, or `python` for interpreters by their paths.
        out: Folder of the sweep; runs that it holds already are kept, and those that
            are missing are done.
        seeds: How many seeds each setting is trained with.
        only_seeds: Which seeds, instead of how many.
        jobs: Runs at a time; their throughput then is that of a shared machine.
    """

    settings: tyro.conf.Positional[_Settings]
    out: _Folder = "sweep"
    seeds: int = 3
    only_seeds: _Seeds = None
    jobs: int = 1


def words_of_train(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words at `--`: those of the sweep, and those of every run.

    Example:
        >>> words_of_train(["sweep", "rule=static", "--", "--epochs", "2"])
        (['sweep', 'rule=static'], ['--epochs', '2'])
    """
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def run_sweep(options: SweepOptions, train: Sequence[str]) -> int:
    """Run a sweep, say what came out, return the exit code: 1 if a run failed.

    Args:
        options: of the sweep.
        train: words of `rjax train` that all runs share.

    Raises:
        UsageError: for settings that cannot be.
    """
    seeds = options.seeds if options.only_seeds is None else options.only_seeds
    if isinstance(seeds, int) and seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds}")
    try:
        settings = parse(options.settings)
        found = sweep(
            settings, options.out, train=train, seeds=seeds, jobs=options.jobs,
            progress=say,
        )  # fmt: skip
    except (ValueError, FileExistsError) as error:
        raise UsageError(str(error)) from error
    say(
        f"\n{found.text()}\n\nsweep left in {options.out}: sweep.html, sweep.json, runs"
    )
    return 1 if found.failed else 0
