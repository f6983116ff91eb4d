"""Which flags of XLA help a train step: every set in a process of its own, by turns.

    PYTHONPATH=. python benchmarks/xla_flags.py [--model mlp,resnet50,vgg16bn]
        [--sets default,autotune0,...] [--repeats 2] [--steps 20] [--samples 5]
        [--json FILE]

A sample is a Python loop over captured steps on a batch that lies on the device, `mlp`
at batch 200 with 300 steps in one `lax.scan`, the others at batch 256 of 224x224.
A set is measured beside the default of the same round; told are its median milliseconds
a step, how many times the default's that is, the median host time of a call on an idle
device, seconds to compile, the memory XLA plans, and whether the state ends with the
bits it has in the set's first round. `chosen` is what `rjax.set_xla_flags` sets.
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from rjax.xla_flags import DEFAULTS

CHOSEN = " ".join(f"{name}={value}" for name, value in DEFAULTS.items())
SETS = {
    "default": "",
    "chosen": CHOSEN,
    "convolutions": "--xla_gpu_enable_command_buffer=+CONVOLUTION",
    "chosen+branches": CHOSEN.replace("=+", "=+CONDITIONAL,+"),
    "chosen+loops": CHOSEN.replace("=+", "=+CONDITIONAL,+WHILE,+"),
    "chosen+skip": f"{CHOSEN} --xla_gpu_command_buffer_update_mode=SKIP_TEMP",
    "chosen+fusion": f"{CHOSEN} --xla_gpu_experimental_enable_conv_fusion=true",
    "chosen+no-triton": f"{CHOSEN} --xla_gpu_enable_triton_gemm=false",
    "autotune0": "--xla_gpu_autotune_level=0",
    "deterministic": "--xla_gpu_deterministic_ops=true",
    "no-buffers": "--xla_gpu_enable_command_buffer=",
    "latency": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no-triton": "--xla_gpu_enable_triton_gemm=false",
}
SCANNED, IDLE_CALLS = 300, 10


def measure(model: str, batch: int, image: int, steps: int, samples: int) -> dict:
    """Time one model in this process."""
    import jax
    import numpy as np
    from record_cost import make

    import rjax

    plan, step, fresh, data = make(model, batch, image)
    state = fresh()
    if model == "mlp":
        steps = SCANNED

        def many(state, data):
            return jax.lax.scan(lambda s, _: step(s, data), state, length=steps)

        run, calls = rjax.capture(many, state, data, plan=plan), 1
    else:
        run, calls = rjax.capture(step, state, data), steps
    state, _ = jax.block_until_ready(run(state, data))
    seconds = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            state, _ = run(state, data)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / steps)
    dispatch = []
    for _ in range(IDLE_CALLS):
        start = time.perf_counter()
        state, _ = run(state, data)
        dispatch.append(time.perf_counter() - start)
        jax.block_until_ready(state)
    return {
        "seconds": seconds,
        "dispatch": statistics.median(dispatch),
        "compile": run.compile_seconds,
        "peak": run.memory().peak,
        "bits": hashlib.sha256(np.asarray(state.master).tobytes()).hexdigest()[:12],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def spawn(name: str, arguments: list) -> dict:
    """Time one model under one set of flags."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {SETS[name]}".strip()
    done = subprocess.run(
        [sys.executable, __file__, "--only", json.dumps(arguments)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every set and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="mlp,resnet50,vgg16bn")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batch", type=int, help="200 for mlp, 256 for others")
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(*json.loads(options.only))))
        return
    names = options.sets.split(",")
    if unknown := set(names) - set(SETS):
        parser.error(
            f"no set {', '.join(sorted(unknown))}: choose of {', '.join(SETS)}"
        )
    records, bits = [], {}
    print(
        f"{'':28}{'ms a step':>10}{'ratio':>8}{'call us':>9}{'compile s':>11}{'GB':>8}"
    )
    for model in options.model.split(","):
        batch = options.batch or (200 if model == "mlp" else 256)
        arguments = [model, batch, options.image, options.steps, options.samples]
        for _ in range(options.repeats):
            base = None
            for name in names:
                found = spawn(name, arguments)
                records.append({"model": model, "set": name, "batch": batch, **found})
                label = f"{model} {name}"
                if "failed" in found:
                    print(f"{label:28}  {found['failed'][:100]}", flush=True)
                    continue
                middle = statistics.median(found["seconds"])
                base = base or middle
                first = bits.setdefault(label, found["bits"])
                print(
                    f"{label:28}{1e3 * middle:10.3f}{middle / base:8.3f}"
                    f"{1e6 * found['dispatch']:9.0f}"
                    f"{found['compile']:11.1f}{found['peak'] / 1e9:8.2f}"
                    f"{'' if first == found['bits'] else '  other bits'}",
                    flush=True,
                )
    if options.json:
        options.json.write_text("".join(json.dumps(r) + "\n" for r in records))


if __name__ == "__main__":
    main()
