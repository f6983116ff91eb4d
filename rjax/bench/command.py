"""`rjax bench`."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from rjax.bench import table, tune
from rjax.bench.cases import Case
from rjax.bench.measure import BenchError, Figure, sweep
from rjax.bench.options import BenchOptions, chosen_cases, chosen_sizes
from rjax.bench.programs import XLA, Variant
from rjax.ops import mosaic, tuned
from rjax.runs.console import say
from rjax.runs.errors import UsageError
from rjax.runs.interrupts import Interrupted, Interrupts


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
        cases: the ops.
        sizes: numbers of elements.
        missing: why no kernel can run here, or `None`.
        tuning: the table to add to, `None` without `--tune`.
        out: its file.
        json: the file of all samples, if there is to be one.
    """

    cases: Sequence[Case]
    sizes: Sequence[int]
    missing: str | None
    tuning: tuned.Tuning | None
    out: Path
    json: Path | None

    def variants(self, case: Case, n: int) -> Sequence[Variant]:
        """Return how a case is run."""
        if self.tuning is not None:
            return tune.variants(case, n)
        kernel = case.kernel and not self.missing
        return [XLA, Variant("mosaic_gpu")] if kernel else [XLA]


def bench(options: BenchOptions) -> int:
    """Measure as `options` ask, say what came out, return the exit code.

    Raises:
        UsageError: for bad input, before anything is measured.
        BenchError: if a kernel is wrong, or the device gives up; what was measured
            until then is told all the same.
    """
    figures: list[Figure] = []
    with Interrupts() as interrupts:
        try:
            job = prepare(options)
            say(f"{_device()}, jax {jax.__version__}")
            if job.missing:
                say(f"only xla is measured: {job.missing}")
            try:
                _run(job, figures, interrupts)
            finally:
                with interrupts.held():
                    _leave(job, figures)
        except Interrupted as stop:
            say(f"interrupted after {len(figures)} figures")
            return stop.code
        except jax.errors.JaxRuntimeError as error:
            what = str(error).partition("\n")[0]
            raise BenchError(f"the device gives up: {what}") from error
    return 0


def prepare(options: BenchOptions) -> Job:
    """Return what `options` ask for.

    Raises:
        UsageError: if that cannot be.
    """
    cases = chosen_cases(options.ops)
    largest = 22 if jax.default_backend() == "cpu" else 28
    sizes = chosen_sizes(options.sizes, largest)
    if options.out is not None and not options.tune:
        raise UsageError(
            "--out is the file of --tune: give that too, or --json for the samples"
        )
    missing = mosaic.why_not()
    out = tune.default_path(_device()) if options.out is None else Path(options.out)
    tuning = _table(cases, missing, out) if options.tune else None
    try:
        tuned.here()
    except ValueError as error:
        raise UsageError(str(error)) from None
    samples = None if options.json is None else Path(options.json)
    if samples is not None:
        _try(lambda: samples.open("a").close(), "--json", samples)
    return Job(cases, sizes, missing, tuning, out, samples)


def _table(cases: Sequence[Case], missing: str | None, out: Path) -> tuned.Tuning:
    if missing:
        raise UsageError(f"--tune has no kernel to measure: {missing}")
    if not any(case.kernel for case in cases):
        raise UsageError("--tune has nothing to choose for copy: give other --ops")
    try:
        tuning = tune.begin(out, _device())
    except ValueError as error:
        raise UsageError(f"--tune cannot add to a table: {error}") from None
    except OSError as error:
        raise _unusable("--out", out, error) from None
    _try(lambda: _probe(out), "--out", out)
    return tuning


def _probe(path: Path) -> None:
    """Raise `OSError` if no file can be put in that place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def _try(action: Callable[[], Any], flag: str, path: Path) -> None:
    try:
        action()
    except OSError as error:
        raise _unusable(flag, path, error) from None


def _unusable(flag: str, path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{flag} {path} cannot be written ({error.strerror}): give another file"
    )


def _device() -> str:
    return jax.devices()[0].device_kind


def _run(job: Job, figures: list[Figure], interrupts: Interrupts) -> None:
    """Measure; put every figure into the list, and the table into its file."""

    def keep(tuning: tuned.Tuning) -> None:
        with interrupts.held():
            tune.save(job.out, tuning)

    groups = _told(sweep(job.cases, job.sizes, job.variants, say), figures)
    if job.tuning is not None:
        tune.tune(groups, job.tuning, keep)
        return
    for group in groups:
        list(group)


def _told(
    groups: Iterable[Iterable[Figure]], figures: list[Figure]
) -> Iterator[Iterator[Figure]]:
    """Pass figures on, saying and keeping each of them as it comes."""

    def each(group: Iterable[Figure]) -> Iterator[Figure]:
        for figure in group:
            figures.append(figure)
            say(table.line(figure))
            yield figure

    return (each(group) for group in groups)


def _leave(job: Job, figures: Sequence[Figure]) -> None:
    """Say what was measured, and where it lies."""
    if figures:
        say("")
        for line in table.lines(figures):
            say(line)
    if job.tuning is not None and job.out.exists():
        say(f"table in {job.out}")
    if job.json is not None:
        job.json.write_text(json.dumps(record(figures), indent=1) + "\n")
        say(f"samples in {job.json}")


def record(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return figures and where they come from as plain data."""
    rows = [
        {
            **dataclasses.asdict(figure),
            "seconds": figure.seconds,
            "bandwidth": figure.bandwidth,
        }
        for figure in figures
    ]
    return {"device": _device(), "jax": jax.__version__, "rows": rows}
