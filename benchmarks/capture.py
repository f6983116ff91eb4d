"""What capturing a step costs and what it saves: rjax beside Flax and Optax.

Every measurement has a process of its own. *Cold*: nothing is kept, so XLA compiles:
seconds to trace and lower the step, and to compile it, rjax and the peer by turns.
*Warm*: an earlier process has filled the compilation cache; seconds from the end of the
imports to the end of the first step, with what they are made of: parameters (`init`),
plan and state (`state`), tracing (`trace`), compiling or reading (`compile`), the
step itself (`first`). *Reloaded*: the same with `rjax.load_captured` of a saved program
in place of trace and compile.

*Dispatch* is the time that the host spends in the call of a captured step on an idle
device: the median over calls, after each of which it waits. (On a device that still has
some steps before it the call takes as long as a step.) Kernels and bytes by stage are
read from the program.

    PYTHONPATH=. python benchmarks/capture.py [--model resnet50] [--batch 256]
        [--repeats 3] [--cold 3] [--peers flax] [--stages] [--json FILE]
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CALLS = 50
PARTS = ("init", "state", "trace", "compile", "first")


@dataclasses.dataclass(frozen=True)
class Task:
    """One measurement.

    Attributes:
        who: "rjax", "rjax-reloaded" or "flax".
        kind: "cold", "warm" or "fill".
        model: one of `throughput.settings.MODELS`.
        batch: images a step.
        image: height and width.
        classes: logits.
        folder: of the compilation cache and of the saved program, "" for none.
    """

    who: str
    kind: str
    model: str
    batch: int
    image: int
    classes: int
    folder: str = ""


def measure(task: Task) -> dict:
    """Run one measurement in this process."""
    import jax
    import jax.numpy as jnp
    from throughput import on_jax, peers_flax
    from throughput.settings import Settings

    import rjax
    from rjax.programs import trace

    jax.devices()
    settings = Settings(
        model=task.model, batch=task.batch, image=task.image, classes=task.classes
    )
    saved = pathlib.Path(task.folder or ".") / "step.rjax"
    clock = Clock()
    if task.folder:
        rjax.enable_compilation_cache(pathlib.Path(task.folder) / "xla")
    shape = (task.batch, task.image, task.image, 3)
    batch = (jnp.zeros(shape, jnp.float16), jnp.zeros(task.batch, jnp.int32))
    if task.who == "flax":
        step, state, _ = peers_flax.make(settings)
        clock.lap("init")
        clock.lap("state")
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        clock.lap("trace")
        run = lowered.compile()
    else:
        model = on_jax.make_model(settings)
        params, stats = on_jax.init(model, settings)
        jax.block_until_ready(params)
        clock.lap("init")
        config = rjax.Config(learning_rate=0.01)
        plan = rjax.make_plan(params, config, batch_stats=stats)
        state = rjax.init_state(plan, params, stats)
        clock.lap("state")
        if task.who == "rjax-reloaded":
            clock.lap("trace")
            run = rjax.load_captured(saved, plan)
        else:
            loss_fn = rjax.linen_loss(model, on_jax.criterion)
            traced = trace(rjax.make_train_step(loss_fn, plan), state, batch)
            clock.lap("trace")
            run = traced.compile()
    clock.lap("compile")
    state, out = jax.block_until_ready(run(state, batch))
    clock.lap("first")
    found = {"seconds": clock.laps, **on_jax.environment()}
    if task.kind == "fill" and task.who == "rjax":
        run.save(saved)
    if task.kind == "cold":
        calls = []
        for _ in range(CALLS):
            start = time.perf_counter()
            state, out = run(state, batch)
            calls.append(time.perf_counter() - start)
            jax.block_until_ready(state)
        found["dispatch_us"] = [1e6 * call for call in calls]
        if task.who == "rjax":
            table = run.stages()
            rows = [(row.name, row.kernels, row.nbytes) for row in table.rows]
            found |= {"stages": rows, "text": str(table), "memory": str(run.memory())}
    return found


class Clock:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def spawn(task: Task) -> dict:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--only", json.dumps(dataclasses.asdict(task))]
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": str(bool(task.folder)).lower()}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"{task.who}, {task.kind}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def line(task: Task, found: dict) -> str:
    """Return the seconds of one measurement as a row."""
    seconds = found["seconds"]
    parts = [f"{seconds[part]:8.2f}" for part in PARTS]
    dispatch = found.get("dispatch_us")
    host = f"{statistics.median(dispatch):9.0f}" if dispatch else ""
    name = f"{task.who} {task.kind}"
    return f"{name:20}{''.join(parts)}{sum(seconds.values()):9.2f}{host}"


def main() -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", type=int, help="repeats of cold ones, if others")
    parser.add_argument("--peers", default="flax", help="flax, or nothing")
    parser.add_argument("--stages", action="store_true", help="print kernels by stage")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(Task(**json.loads(options.only)))))
        return
    size = (options.model, options.batch, options.image, options.classes)
    print(f"{options.model}, batch {options.batch}, seconds; dispatch in microseconds")
    print(f"{'':20}{''.join(f'{p:>8}' for p in PARTS)}{'all':>9}{'dispatch':>9}")
    records = []

    def run(task: Task) -> dict:
        found = spawn(task)
        records.append({**dataclasses.asdict(task), **found, "folder": None})
        print(line(task, found), flush=True)
        return found

    peers = [peer for peer in options.peers.split(",") if peer]
    for _ in range(options.cold or options.repeats):
        for who in ("rjax", *peers):
            found = run(Task(who, "cold", *size))
            text = found["text"] if who == "rjax" else ""
            table = text or (records[0]["text"] if records else "")
    with tempfile.TemporaryDirectory() as folder:
        for who in ("rjax", "rjax-reloaded", *peers):
            for kind in ("fill", *["warm"] * options.repeats):
                run(Task(who, kind, *size, folder=folder))
    print(f"device {records[0]['device']}, {records[0]['versions']}")
    if options.stages:
        print(table)
    if options.json:
        options.json.write_text("".join(json.dumps(r) + "\n" for r in records))


if __name__ == "__main__":
    main()
