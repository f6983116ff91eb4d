"""The command line: `rjax train`, `plan`, `bench`, `compare` and `sweep`.

Exit codes: 0 done, 1 the run failed or two runs differ, 2 bad input (one line says
what to change), 130 interrupted.
"""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

import rjax
from rjax.bench.command import bench
from rjax.bench.measure import BenchError
from rjax.bench.options import BenchOptions
from rjax.compare_command import CompareOptions, compare_runs
from rjax.plan_command import PlanCommand, run_plan
from rjax.runs.complaints import one_line
from rjax.runs.errors import RunError, UsageError
from rjax.runs.options import TrainOptions
from rjax.runs.processes import together
from rjax.runs.recipes import defaults, named, without_idle
from rjax.runs.replay import options_of
from rjax.runs.train import train
from rjax.sweep_command import SweepOptions, run_sweep, words_of_train

Options = TrainOptions | PlanCommand | BenchOptions | CompareOptions | SweepOptions

_COMMANDS = {
    "train": TrainOptions,
    "plan": PlanCommand,
    "bench": BenchOptions,
    "compare": CompareOptions,
    "sweep": SweepOptions,
}
# The groups of options are for the eye: no flag carries their names.
_CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
_MISSING = "the folders of two runs are needed: rjax compare RUN_A RUN_B"
_DESCRIPTION = "Mixed-precision training for JAX: static, explicit, one program a step."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words after `rjax`; `None` takes them from the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = "rjax"
    try:
        if argv in (["--version"], ["-V"]):
            print(f"rjax {rjax.__version__}")
            return 0
        if argv and argv[0] in _COMMANDS:
            name = f"rjax {argv[0]}"
        options = _parse(argv)
        if options is None:
            return 0
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(options, argv)
    except (UsageError, rjax.data.DataError) as error:
        return _complain(name, error, 2)
    except (rjax.NonFiniteGradientsError, BenchError, RunError) as error:
        return _complain(name, error, 1)
    except BrokenPipeError:
        # The reader has left; what is still in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(name, f"cannot go on: {error}", 1)
    except KeyboardInterrupt as stop:
        code = getattr(stop, "code", 130)
        return _complain(name, "interrupted", code)


def _run(options: Options, argv: list[str]) -> int:
    if isinstance(options, BenchOptions):
        return bench(options)
    if isinstance(options, CompareOptions):
        return compare_runs(options)
    if isinstance(options, SweepOptions):
        return run_sweep(options, words_of_train(argv)[1])
    if isinstance(options, TrainOptions):
        words = ["rjax", *argv]
        return together(options.devices, lambda: train(without_idle(options), words))
    return run_plan(options)


def _parse(argv: list[str]) -> Options | None:
    """Return the options of the command that `argv` names, `None` after `--help`."""
    if not argv or (argv[0] not in _COMMANDS and argv[0] not in ("-h", "--help")):
        known = " or ".join(f"rjax {command}" for command in _COMMANDS)
        got = f"got {argv[0]!r}" if argv else "got none"
        raise UsageError(f"a command is needed, {got}: use {known} (see rjax --help)")
    said = io.StringIO()
    if argv[0] == "sweep":
        argv = words_of_train(argv)[0]
    try:
        with contextlib.redirect_stderr(said):
            if argv[0] in _COMMANDS:
                how: dict[str, Any] = {"prog": f"rjax {argv[0]}", "config": _CONFIG}
                if argv[0] == "train":
                    run = named(argv[1:], "--resume")
                    known = options_of(Path(run)) if run else defaults(argv[1:])
                    how["default"] = known
                return tyro.cli(_COMMANDS[argv[0]], args=argv[1:], **how)
            return tyro.extras.subcommand_cli_from_dict(
                _COMMANDS,
                prog="rjax",
                description=_DESCRIPTION,
                args=argv,
                config=_CONFIG,
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        what = one_line(said.getvalue())
        if what.startswith("missing from"):
            what = _MISSING  # no other command has arguments that must be there
        raise UsageError(f"{what} (see rjax {argv[0]} --help)") from None


def _complain(prefix: str, error: Any, code: int) -> int:
    print(f"{prefix}: {error}", file=sys.stderr)
    return code


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"rjax: warning: {message}", file=sys.stderr)
