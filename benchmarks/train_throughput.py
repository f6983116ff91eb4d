"""Images a second in training: rjax beside PyTorch and Flax, on one synthetic batch.

ResNet-50 v1.5, VGG16-BN or ResNet-20 in mixed precision, with SGD and Nesterov momentum
0.9, weight decay 1e-4, label smoothing 0.1 and a loss scale of 8192, each contender in
its own idiom: rjax as it comes, Flax Linen with Optax and a `where` gate, PyTorch with
autocast, channels last, a fused optimizer, eager or by `torch.compile`. The batch is
drawn once from a seed and stays on the device.

Every contender has a process of its own, one after another, so memory does not mix
and what is missing or fails leaves the rest. Timed are samples of several steps, in a
Python loop that blocks at the end of a sample, after a warm-up. Compiling lasts until
the first step is done. Peak memory is what was in use at most, by `memory_stats` and by
`max_memory_allocated`. "rjax is" is how many times as fast as the contender rjax is.

`--profile` adds where the time of a step goes, of contenders on JAX. `--learn` trains
rjax instead, on classes that have a pattern under noise, in the precision asked for and
in fp32, and says PASS or FAIL.

    PYTHONPATH=. python benchmarks/train_throughput.py [--model resnet50]
        [--batch 256] [--peers torch,torch-compile,torch-compile-max,flax]
        [--implementation xla,mosaic_gpu] [--folded] [--profile] [--json FILE]
    PYTHONPATH=. python benchmarks/train_throughput.py --model resnet50,vgg16bn --learn
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from throughput import profiling, table, verdict
from throughput.settings import (
    MODELS,
    Settings,
    chosen,
    contenders,
    make_parser,
    settings_of,
)

Say = Callable[[str], None]
_LEARN = "learn-"


def measure_one(name: str, settings: Settings) -> dict[str, Any]:
    """Run one contender in this process and return what was found of it."""
    if name.startswith(_LEARN):
        from throughput import learning

        return learning.train(settings)
    from throughput.measure import measure

    if name.startswith("torch"):
        from throughput.peers_torch import TorchRig

        return measure(TorchRig(name, settings), settings)
    from throughput import on_jax

    rig = on_jax.make(name, settings)
    found = measure(rig, settings)
    return found | ({"profiled": rig.profile()} if settings.profile else {})


def child(name: str, settings: Settings) -> dict[str, Any]:
    """Return the record of one contender, or why there is none."""
    head = {"contender": name, **dataclasses.asdict(settings)}
    try:
        return head | measure_one(name, settings)
    except Exception as error:  # whatever a peer raises is its result
        text = str(error).strip().partition("\n")[0]
        return head | {"failed": f"{type(error).__name__}: {text}"[:300]}


def spawn(name: str, settings: Settings, timeout: float) -> dict[str, Any]:
    """Run one contender in a process of its own and return its record."""
    head = {"contender": name, **dataclasses.asdict(settings)}
    command = [sys.executable, __file__, "--only", json.dumps(head)]
    with _process(command) as process:
        try:
            out, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return head | {"failed": f"not done after {timeout:g} s"}
    for text in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict) and record.get("contender") == name:
                return record
    last = (complaint.strip().splitlines() or ["no message"])[-1]
    return head | {"failed": f"ended with {process.returncode}: {last}"[:300]}


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen]:
    """Start a process in a group of its own; end the group, compilers included."""
    pipe = subprocess.PIPE
    started = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    with started as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def compare(names: list[str], settings: Settings, run: Any, say: Say) -> list[Any]:
    """Measure the contenders one after another, saying what is found."""
    say(f"{_title(settings)}, {settings.samples} samples of {settings.steps} steps")
    records = []
    try:
        for name in names:
            record = run(name, settings)
            records.append(record)
            say(table.line(record))
            if "profiled" in record:
                say("\n".join(profiling.lines(name, record["profiled"])))
    finally:  # also of what was measured before an interrupt
        say("\n".join(["", *table.lines(records), ""]))
    return records


def _title(settings: Settings) -> str:
    size = f"batch {settings.batch}, {settings.image}x{settings.image}"
    return (
        f"{settings.model}, {size}, {settings.classes} classes, "
        f"{settings.precision}, learning rate {settings.learning_rate:g}"
    )


def learn(settings: Settings, run: Any, say: Say) -> bool:
    """Train in half precision and in float32; return whether all checks passed."""
    say(f"{_title(settings)}, {settings.learn} steps")
    found = []
    for precision in (settings.precision, "fp32"):
        other = dataclasses.replace(settings, precision=precision)
        record = run(_LEARN + precision, other)
        found.append(record)
        if "failed" in record:
            say(f"  FAIL  {settings.model} {precision}: {record['failed']}")
            return False
    say("\n".join(verdict.lines(*found)))
    return all(passed for passed, _ in verdict.checks(*found))


def keeping(run: Any, path: str | None) -> Any:
    """Return `run`, which also appends every record to a file of JSON lines."""
    command = " ".join(["python", *sys.argv])
    if path is not None:
        pathlib.Path(path).write_text("")

    def kept(name: str, settings: Settings) -> dict[str, Any]:
        record = run(name, settings)
        if path is not None:
            more = {"command": command, "driver": driver()}
            with open(path, "a") as file:
                file.write(json.dumps({**record, **more}) + "\n")
        return record

    return kept


def driver() -> str:
    """Return the version of the GPU's driver, "" where there is none."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
        return text.partition("\n")[0].removeprefix("NVRM version: ")
    return ""


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> Any:
    """Return the arguments, the contenders and the settings of every model."""
    args = parser.parse_args(argv)
    try:
        models = chosen("--model", args.model, MODELS)
        if not models:
            raise ValueError("--model names no model")
        names = contenders(args)
        return args, names, [settings_of(args, model) for model in models]
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    parser = make_parser((__doc__ or "").partition("\n")[0])
    args, names, found = parse(parser)
    if args.only:
        head = json.loads(args.only)
        print(json.dumps(child(head.pop("contender"), Settings(**head))), flush=True)
        return
    say = functools.partial(print, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what is running
    try:
        run = keeping(functools.partial(spawn, timeout=args.timeout), args.json)
    except OSError as error:
        parser.error(f"--json {args.json}: {error.strerror}")
    if args.learn:
        passed = [learn(settings, run, say) for settings in found]
        raise SystemExit(0 if all(passed) else 1)
    for settings in found:
        compare(names, settings, run, say)


if __name__ == "__main__":
    main()
