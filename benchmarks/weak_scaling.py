"""Weak scaling: one device against all of them, the same batch on each, in one call.

ResNet-50 v1.5, VGG16-BN or ResNet-20 as in `train_throughput.py`, with rjax alone. The
parts: `one` is `rjax.make_train_step` on one device; `all` is
`rjax.parallel.data_parallel` over every device, with norms over the whole batch;
`sharded` is that with a sharded optimizer; `local` is `all` with norms over each
device's own share. Weak scaling is the time of `one` over that of the part, of the same
round. Every device has the same images, so that all parts have the same losses but for
rounding (and dropout, in VGG16-BN), and a part that computes something else is told.

Parts are compiled in one process and sampled in turn, to and fro, in a Python loop that
blocks at the end of a sample. Memory is measured in a process of its own for each part,
which finds its program in a cache. `--profile` says, in one more process, when the
buckets are reduced relative to the backward pass of the first layer; command buffers
are off there, as within them the profiler does not say what a kernel is of.

    PYTHONPATH=. python benchmarks/weak_scaling.py [--model resnet50,vgg16bn]
        [--batch 256] [--parts one,all,sharded,local] [--profile] [--json FILE]

On CPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=2 PYTHONPATH=. python \
        benchmarks/weak_scaling.py --model resnet20 --batch 8 --image 32 --classes 10 \
        --steps 2 --samples 3 --learning-rate 0.05 --profile
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from scaling import overlap, table
from scaling.settings import Settings, make_parser, settings_of
from throughput.settings import MODELS, chosen

Say = Callable[[str], None]
_NO_BUFFERS = "--xla_gpu_enable_command_buffer="


def child(job: str, settings: Settings) -> dict[str, Any]:
    """Return the record of one job, or why there is none."""
    head = {"job": job, **dataclasses.asdict(settings)}
    try:
        from scaling import jobs

        return head | jobs.run(job, settings)
    except Exception as error:  # whatever fails is the result
        text = str(error).strip().partition("\n")[0]
        return head | {"failed": f"{type(error).__name__}: {text}"[:400]}


def spawn(job: str, settings: Settings, timeout: float, cache: str) -> dict[str, Any]:
    """Run one job in a process of its own and return its record."""
    head = {"job": job, **dataclasses.asdict(settings)}
    command = [sys.executable, __file__, "--only", json.dumps(head)]
    try:
        done = subprocess.run(
            command,
            env=environment(job, cache),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return head | {"failed": f"not done after {timeout:g} s"}
    for text in reversed(done.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict) and record.get("job") == job:
                return record
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return head | {"failed": f"ended with {done.returncode}: {last}"[:400]}


def environment(job: str, cache: str) -> dict[str, str]:
    """Return the variables of a job's process: a shared cache, and flags."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = os.environ.get("XLA_FLAGS", "")
    if job == "profile" and _NO_BUFFERS not in flags:
        flags = f"{flags} {_NO_BUFFERS}".strip()
    return {**kept, **os.environ, "XLA_FLAGS": flags}


def measure(settings: Settings, args: Any, run: Any, say: Say) -> bool:
    """Measure one model, saying what is found; return whether all of it was."""
    say(
        f"{settings.model}, batch {settings.batch} a device, {settings.image}x"
        f"{settings.image}, {settings.classes} classes, {settings.precision}, "
        f"{settings.samples} samples of {settings.steps} steps"
    )
    record = run("turns", settings)
    for text in _or_failed(record, table.lines):
        say(text)
    found = [record]
    if not args.no_memory:
        found += _memory(settings, run, say)
    if args.profile:
        record = run("profile", settings)
        for text in _or_failed(record, lambda r: overlap.lines(r["profiled"])):
            say(text)
        found.append(record)
    say("")
    return not any("failed" in record for record in found)


def _memory(settings: Settings, run: Any, say: Say) -> list[Any]:
    found = {}
    for part in settings.parts.split(","):
        found[part] = record = run(f"memory:{part}", settings)
        for text in _or_failed(record, lambda r: [table.memory_line(r)]):
            say(text)
    measured = {part: r for part, r in found.items() if "failed" not in r}
    if measured.keys() >= {"all", "sharded"}:
        text = table.fall_line(measured["all"], measured["sharded"])
        if text is not None:
            say(text)
    return list(found.values())


def _or_failed(record: Any, lines: Callable[[Any], Any]) -> Iterator[str]:
    if "failed" in record:
        yield f"{record['model']} {record['job']}: {record['failed']}"
    else:
        yield from lines(record)


def keeping(run: Any, path: str | None) -> Any:
    """Return `run`, which also appends every record to a file of JSON lines."""
    command = " ".join(["python", *sys.argv])
    if path is not None:
        pathlib.Path(path).write_text("")

    def kept(job: str, settings: Settings) -> dict[str, Any]:
        record = run(job, settings)
        if path is not None:
            with open(path, "a") as file:
                file.write(json.dumps({**record, "command": command}) + "\n")
        return record

    return kept


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> Any:
    """Return the arguments and the settings of every model."""
    args = parser.parse_args(argv)
    try:
        models = chosen("--model", args.model, MODELS)
        if not models:
            raise ValueError("--model names no model")
        return args, [settings_of(args, model) for model in models]
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    args, found = parse(parser)
    if args.only:
        head = json.loads(args.only)
        print(json.dumps(child(head.pop("job"), Settings(**head))), flush=True)
        return
    say = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory() as cache:
        run = functools.partial(spawn, timeout=args.timeout, cache=cache)
        try:
            run = keeping(run, args.json)
        except OSError as error:
            parser.error(f"--json {args.json}: {error.strerror}")
        passed = [measure(settings, args, run, say) for settings in found]
    raise SystemExit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
