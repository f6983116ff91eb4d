"""The recipe `mnist-mlp`, rjax beside PyTorch: epochs a second, and what is learned.

An MLP 784-1024-512-256-10 on MNIST in fp16, batch 200, AdamW with decay on kernels,
label smoothing, a warm-up and a cosine, each batch cropped, turned, zoomed and erased
on the device, and an evaluation of all test images after every epoch. Everything is
timed but compiling and one epoch to warm up; the data lie on the device, and epochs are
begun one ahead of their results. Each run has a process of its own, as a run of `rjax
train` has; contenders take turns, seed by seed.

rjax is what `rjax train --recipe mnist-mlp` runs, without its record: one program an
epoch. PyTorch ("torch") does the same work on the GPU, a compiled forward pass with the
augmentation in it, autocast, GradScaler and a fused AdamW, all of a step captured into
one CUDA graph; "torch-reduce-overhead" leaves the graphs to `torch.compile`, and
"torch-eager" captures a step that is not compiled.

    PYTHONPATH=. python benchmarks/mnist_mlp.py --data-dir DIR [--epochs 100]
        [--seeds 0,1,2] [--peers torch,torch-reduce-overhead,torch-eager] [--json FILE]
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mnist import table
from mnist.settings import Settings, from_json, make_parser, settings_of


def child(settings: Settings) -> dict[str, Any]:
    """Run a contender in this process; return its record, or why there is none."""
    from mnist.measure import measure

    head = dataclasses.asdict(settings)
    try:
        if settings.contender == "rjax":
            from mnist.on_rjax import Rig
        else:
            from mnist.on_torch import Rig
        return head | measure(Rig(settings), settings)
    except Exception as error:  # whatever a contender raises is its result
        text = str(error).strip().partition("\n")[0]
        return head | {"failed": f"{type(error).__name__}: {text}"[:300]}


def spawn(settings: Settings, timeout: float) -> dict[str, Any]:
    """Run a contender in a process of its own and return its record."""
    head = dataclasses.asdict(settings)
    command = [sys.executable, __file__, "--only", json.dumps(head)]
    pipe = subprocess.PIPE
    # A group of its own, so that compilers end with it.
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, complaint = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return head | {"failed": f"not done after {timeout:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for text in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            if isinstance(record, dict) and record.get("contender"):
                return record
    last = (complaint.strip().splitlines() or ["no message"])[-1]
    return head | {"failed": f"ended with {process.returncode}: {last}"[:300]}


def by_turns(
    contenders: Sequence[Settings], timeout: float
) -> Iterator[dict[str, Any]]:
    """Run every seed of every contender; yield records, those of a contender joined."""
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in range(len(contenders[0].seeds)):
        for settings in contenders:
            one = dataclasses.replace(settings, seeds=settings.seeds[turn : turn + 1])
            found.setdefault(settings.contender, []).append(spawn(one, timeout))
    for settings in contenders:
        parts = found[settings.contender]
        failed = [part for part in parts if "failed" in part]
        if failed:
            yield failed[0]
            continue
        runs = [run for part in parts for run in part["runs"]]
        compiled = [part["compile_s"] for part in parts]
        seeds = list(settings.seeds)
        yield parts[0] | {"seeds": seeds, "compile_s": compiled, "runs": runs}


def main(argv: list[str] | None = None) -> None:
    """Measure the contenders one after another; print lines and a table."""
    parser = make_parser((__doc__ or "").partition("\n")[0])
    args = parser.parse_args(argv)
    if args.only:
        record = child(from_json(json.loads(args.only)))
        print(json.dumps(record), flush=True)
        return
    try:
        contenders = settings_of(args)
        if args.json:
            pathlib.Path(args.json).write_text("")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--json {args.json}: {error.strerror}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what is running
    records = []
    for record in by_turns(contenders, args.timeout):
        records.append(record)
        print("\n".join(table.lines(record)), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(record) + "\n")
    print("\n".join(["", *table.table(records)]))


if __name__ == "__main__":
    main()
