"""Runs every setting with every seed, each run in a process of its own."""

import concurrent.futures
import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rjax.files import write_atomically
from rjax.runs.sweeps import axes
from rjax.runs.sweeps.axes import Choice
from rjax.runs.sweeps.outcome import Sweep
from rjax.runs.sweeps.reading import Seen, manifest, read

# Runs of a sweep leave what is compared, and no more.
_WORDS = ("--no-plan", "--checkpoint-every", "0", "--weights", "none")
_RUNS = "runs"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run that is to be there in the end.

    Attributes:
        choice: its setting.
        seed: its seed.
        folder: where it lies.
        words: the words of `rjax train`, without where it goes.
    """

    choice: Choice
    seed: int
    folder: Path
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """As a person reads it."""
        return f"{self.choice.name}, seed {self.seed}"

    @property
    def done(self) -> bool:
        """Whether a finished run of these very words lies there already."""
        found = manifest(self.folder)
        if found is None or found.get("status") != "finished":
            return False
        words = shlex.split(str(found.get("command")))
        return words[:-2] == ["rjax", *self.words] and words[-2:-1] == ["--out"]


def sweep(
    settings: Mapping[str, Sequence[object]],
    out: str | os.PathLike[str],
    *,
    train: Sequence[str] = (),
    seeds: int | Sequence[int] = 3,
    jobs: int = 1,
    progress: Callable[[str], Any] | None = None,
) -> Sweep:
    """Train once for every combination of settings and every seed, and compare.

    Every run is `rjax train` in a process of its own. Runs that are there already, of
    the same words, are kept: a sweep that was interrupted, or gets one more value, does
    what is missing. A run that fails is told and costs no other.

    Args:
        settings: values by axis. An axis is an option of `rjax train` (`"precision"`,
            `"devices"`, `"deterministic"`, `"implementation"`, ...), `"rule"` for the
            rule of the loss scale, or `"python"`: paths of interpreters, each with its
            own JAX. Where `"devices"` is varied on a CPU, every run sees as many as
            the largest value, by `JAX_NUM_CPU_DEVICES`.
        out: folder of the sweep: `runs/`, `sweep.json` and `sweep.html`.
        train: words of `rjax train` that all runs share, such as `["--epochs", "5"]`.
        seeds: how many, from 0, or which.
        jobs: runs at a time; they share the machine, and their throughput shows it.
        progress: gets a line for every run that begins or ends.

    Returns:
        What came out: print it, or let a notebook show it.

    Raises:
        ValueError: for settings that there are not.
        OSError: if `out` cannot be written to, or holds what is no run.

    Example:
        With ``{"precision": ["fp32", "fp16"], "rule": ["halving", "dynamic"]}`` and
        ``train=["--data", "digits", "--epochs", "5"]`` it trains twelve times. What
        cannot be is refused before the first run:

        >>> import rjax
        >>> try:
        ...     rjax.repro.sweep({"precison": ["fp32"]}, "sweeps/digits")
        ... except ValueError as error:
        ...     print(error)
        `precison` is no axis: take devices, precision, python, rule or any option ...
    """
    numbers = [*range(seeds)] if isinstance(seeds, int) else [*seeds]
    if not numbers or len({*numbers}) < len(numbers) or min(numbers) < 0:
        raise ValueError(f"`seeds` must be different numbers from 0 up, got {seeds}.")
    if jobs < 1:
        raise ValueError(f"`jobs` must be at least 1, got {jobs}.")
    axes.check_words(train)
    found = axes.choices(settings)
    folder = Path(out)
    wanted = [
        Job(
            choice,
            seed,
            folder / _RUNS / f"{choice.folder},seed={seed}",
            ("train", *train, *choice.words, *_WORDS, "--seed", str(seed)),
        )
        for seed in numbers
        for choice in found
    ]
    if len({job.folder for job in wanted}) < len(wanted):
        raise ValueError("`settings` must differ in more than signs of punctuation.")
    (folder / _RUNS).mkdir(parents=True, exist_ok=True)
    seen = _run_all(wanted, axes.environment(settings), jobs, progress or _silent)
    names = [name.replace("-", "_") for name in settings]
    done = Sweep.of(names, ["rjax", "train", *train], found, numbers, seen)
    write_atomically(folder / "sweep.json", done.to_json() + "\n")
    write_atomically(folder / "sweep.html", done.to_html())
    return done


def _silent(line: str) -> None:
    del line


def _run_all(
    wanted: Sequence[Job],
    environment: Mapping[str, str],
    jobs: int,
    progress: Callable[[str], Any],
) -> list[Seen]:
    """Run what is not there, and return what all of them left."""
    kept = [job for job in wanted if job.done]
    if kept:
        progress(f"{len(kept)} of {len(wanted)} runs are there already, and kept")
    missing = [job for job in wanted if job not in kept]
    errors: dict[Job, str] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        begun = time.perf_counter()
        under_way = {pool.submit(_run, job, environment): job for job in missing}
        try:
            for future in concurrent.futures.as_completed(under_way):
                job = under_way[future]
                errors[job] = future.result()
                said = errors[job] or read(job.choice, job.seed, job.folder).line
                spent = time.perf_counter() - begun
                place = f"[{len(kept) + len(errors)}/{len(wanted)}]"
                progress(f"{place} {job.name}: {said} ({spent:.0f} s)")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [
        read(job.choice, job.seed, job.folder, errors.get(job, "")) for job in wanted
    ]


def _run(job: Job, environment: Mapping[str, str]) -> str:
    """Train, and return why that failed, nothing if it did not."""
    _clear(job.folder)
    python = job.choice.python or sys.executable
    words = [python, "-m", "rjax", *job.words, "--out", str(job.folder)]
    # An interrupt of the terminal reaches the run by itself, and ends it in order.
    done = subprocess.run(
        words,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"failed: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _clear(folder: Path) -> None:
    """Remove a run that did not finish, or was of other options.

    Raises:
        FileExistsError: if what lies there is no run.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "manifest.json").exists():
        raise FileExistsError(
            f"{folder} is no run of `rjax train`: remove it, or give another `out`."
        )
    shutil.rmtree(folder)
