"""The command line: `rjax train` and `rjax plan`.

Exit codes: 0 done, 1 the run failed, 2 bad input (one line says what to change),
130 interrupted.
"""

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import tyro

import rjax
from rjax.runs.errors import UsageError
from rjax.runs.options import PlanOptions, TrainOptions
from rjax.runs.train import print_plan, train

_COMMANDS = {"train": TrainOptions, "plan": PlanOptions}
_DESCRIPTION = "Mixed-precision training for JAX: static, explicit, one program a step."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words after `rjax`; `None` takes them from the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv and argv[0] in _COMMANDS else ""
    prefix = f"rjax {name}".rstrip()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _dispatch(argv)
    except UsageError as error:
        return _complain(prefix, error, 2)
    except rjax.NonFiniteGradientsError as error:
        return _complain(prefix, error, 1)
    except BrokenPipeError:
        # The reader has left; so does what is still in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(prefix, f"cannot go on: {error}", 1)
    except KeyboardInterrupt:
        return _complain(prefix, "interrupted before the first step", 130)


def _dispatch(argv: list[str]) -> int:
    if argv in (["--version"], ["-V"]):
        print(f"rjax {rjax.__version__}")
        return 0
    options = _parse(argv)
    if options is None:
        return 0
    if isinstance(options, TrainOptions):
        return train(options, ["rjax", *argv])
    return print_plan(options)


def _parse(argv: list[str]) -> PlanOptions | None:
    """Return the options of the command that `argv` names, `None` after `--help`."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                _COMMANDS, prog="rjax", description=_DESCRIPTION, args=argv
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        raise UsageError(_one_line(said.getvalue())) from None


def _one_line(box: str) -> str:
    """Return tyro's framed complaint as one line: its first part and its remedies.

    Example:
        >>> _one_line('''╭─ Unrecognized options ─────╮
        ... │ Unrecognized options: --ep │
        ... │ ────────────────────────── │
        ... │ Perhaps you meant:         │
        ... │     --epochs INT           │
        ... │ ────────────────────────── │
        ... │ For full helptext, …       │
        ... ╰────────────────────────────╯''')
        'unrecognized options: --ep (did you mean --epochs? see --help)'
    """
    rows = [row.strip("│ ") for row in box.splitlines() if row.startswith("│")]
    sections: list[list[str]] = [[]]
    for row in rows:
        if row and not row.strip("─"):
            sections.append([])
        else:
            sections[-1].append(row)
    message = " ".join(" ".join(sections[0]).split()).rstrip(".")
    if not message:
        return "the options could not be read: see --help"
    similar = [
        match.group()
        for section in sections[1:-1]
        for match in [re.search(r"^--[\w-]+", "\n".join(section), re.MULTILINE)]
        if match
    ]
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    return f"{message[:1].lower()}{message[1:]} ({hint}see --help)"


def _complain(prefix: str, error: Any, code: int) -> int:
    print(f"{prefix}: {error}", file=sys.stderr)
    return code


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"rjax: warning: {message}", file=sys.stderr)
