"""What logging costs a training loop: no log, `rjax train`'s, a sync at every step.

    PYTHONPATH=. python benchmarks/logging_cost.py [--steps 2000] [--repeats 5]

An MLP 784-256-128-10 on random images, fp16, Nesterov, EMA, batch 200 on the device.
The loops take turns; each sample is the time of one loop over all steps, in
microseconds a step. `fetch each` is `float(report.loss)` at every step.
"""

import argparse
import contextlib
import io
import json
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import rjax
from rjax.runs.console import Console
from rjax.runs.interrupts import Interrupts
from rjax.runs.recorder import Recorder


def criterion(logits, labels):
    losses = rjax.ops.softmax_cross_entropy(logits, labels)
    hits = (logits.argmax(-1).astype(labels.dtype) == labels).astype(jnp.float32)
    return losses.mean(), {"accuracy": hits.mean()}


def no_log(plan, steps):
    return contextlib.nullcontext(lambda report, state: None)


def fetch_each(plan, steps):
    return contextlib.nullcontext(lambda report, state: float(report.loss))


def recorder(log_every):
    @contextlib.contextmanager
    def make(plan, steps):
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
            Recorder(
                pathlib.Path(folder),
                plan,
                Console(steps),
                Interrupts(),
                epochs=1,
                steps_per_epoch=steps,
                batch_size=200,
                log_every=log_every,
                max_consecutive_skips=50,
            ) as recorder,
        ):
            recorder.start_epoch()
            yield recorder.add
            recorder.drain(None)

    return make


LOOPS = {
    "no log": no_log,
    "rjax train, a line each 500": recorder(500),
    "rjax train, a line each step": recorder(1),
    "fetch each": fetch_each,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.random((200, 28, 28, 1), np.float32))
    labels = jnp.asarray(rng.integers(0, 10, 200, np.int32))
    model = rjax.nn.MLP((256, 128), 10)
    params = model.init(jax.random.key(0), images)["params"]
    plan = rjax.make_plan(params, rjax.Config(ema=rjax.Ema(decay=0.99)))
    step = rjax.make_train_step(rjax.linen_loss(model, criterion), plan)
    step = jax.jit(step, donate_argnums=0)

    def sample(make):
        state = rjax.init_state(plan, params)
        state, report = jax.block_until_ready(step(state, (images, labels)))
        started = time.perf_counter()
        with make(plan, args.steps) as log:
            for _ in range(args.steps):
                state, report = step(state, (images, labels))
                log(report, state)
        jax.block_until_ready(state)
        return 1e6 * (time.perf_counter() - started) / args.steps

    samples = {name: [] for name in LOOPS}
    for _ in range(args.repeats + 1):  # the first round warms up
        for name, make in LOOPS.items():
            samples[name].append(sample(make))
    samples = {name: values[1:] for name, values in samples.items()}
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {args.steps} steps, us a step")
    for name, values in samples.items():
        each = "  ".join(f"{value:7.1f}" for value in values)
        print(f"{name:29s} median {statistics.median(values):7.1f}  each {each}")
    if args.json:
        result = {"device": device, "jax": jax.__version__, "samples": samples}
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
