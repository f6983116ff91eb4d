"""A run over several processes, each with devices of its own (`jax.distributed`).

All processes load the data and take the same steps, on the share of their own devices;
the first one alone tells of the run and leaves its folder. One that fails ends at once,
and that ends the others.
"""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from rjax.runs.device_options import DeviceOptions
from rjax.runs.errors import RunError, UsageError
from rjax.runs.folder import claim_folder

# Seconds that processes wait for one another: at the start, and at the end.
START, END = 120, 60

_NAMES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}


def together(options: DeviceOptions, train: Callable[[], int]) -> int:
    """Train together with the other processes that the options name, if any.

    Args:
        options: of the command line, or the environment.
        train: returns the exit code.

    Raises:
        UsageError: for options that do not fit, or processes that do not meet.
        RunError: if the devices of the others are gone.
    """
    arguments = _arguments(options)
    if arguments is None:
        return train()
    _join(arguments, options.heartbeat)
    ending = _Ending()
    atexit.register(ending.leave)
    try:
        with _quiet_unless_first():
            ending.code = train()
    except UsageError:
        ending.code = 2
        raise
    except jax.errors.JaxRuntimeError as error:
        raise RunError(_lost(error)) from error
    except KeyboardInterrupt as stop:
        ending.code = getattr(stop, "code", 130)
        raise
    return ending.code


def is_first() -> bool:
    """Whether this process is the one that leaves the run's folder."""
    return jax.process_index() == 0


class _Ending:
    """How this process ends; it may not wait for the others after a failure."""

    def __init__(self) -> None:
        self.code = 1

    def leave(self) -> None:
        """End at once, unless all went well: JAX would wait for every process."""
        if self.code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def _arguments(options: DeviceOptions) -> dict[str, Any] | None:
    """Return what `jax.distributed.initialize` takes, `None` for one process alone."""
    given = {name: getattr(options, name) for name in _NAMES}
    if given["coordinator"] == "auto":
        for name in ("processes", "process"):
            if given[name] is not None:
                raise UsageError(
                    f"--coordinator auto finds out --{name} by itself: leave it out"
                )
        return {}
    for name, variable in _NAMES.items():
        if given[name] is None:
            given[name] = _number(name, variable, os.environ.get(variable))
    if all(value is None for value in given.values()):
        return None
    for name, value in given.items():
        if value is None:
            raise UsageError(
                f"--{name} is missing: several processes need --coordinator, "
                f"--processes and --process, or {_NAMES[name]}"
            )
    count, index = given["processes"], given["process"]
    if not 0 <= index < count:
        raise UsageError(
            f"--process must be from 0 to --processes less 1, got {index} of {count}"
        )
    host, _, port = given["coordinator"].rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            "--coordinator must be HOST:PORT of the first process, such as "
            f"10.0.0.1:1234, got {given['coordinator']}"
        )
    return {
        "coordinator_address": given["coordinator"],
        "num_processes": count,
        "process_id": index,
    }


def _number(name: str, variable: str, text: str | None) -> Any:
    if text is None or name == "coordinator":
        return text
    if not text.isdecimal():
        raise UsageError(f"{variable} must be a number, got {text!r}")
    return int(text)


def _join(arguments: dict[str, Any], heartbeat: int) -> None:
    if heartbeat < 1:
        raise UsageError(f"--heartbeat must be at least 1, got {heartbeat}")
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=START,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=END,
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the processes did not meet: {text}; give all of them the same "
            "--coordinator and --processes, each its own --process, and start them "
            f"within {START} s"
        ) from error


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def run_folder(out: str | None, name: str, resume: str | None = None) -> Path:
    """Claim the folder of a run; of other processes than the first, one that goes.

    Arguments and errors as for :func:`rjax.runs.folder.claim_folder`; a run that goes
    on has its folder.
    """
    if is_first():
        return claim_folder(out, name) if resume is None else Path(resume)
    folder = tempfile.mkdtemp(prefix="rjax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _lost(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return (
        f"process {jax.process_index()} of {jax.process_count()} cannot go on, most "
        f"likely as another one has ended; see what that said. JAX says: {text}"
    )
