"""What a record costs a training loop, and whether two processes give the same bits.

    PYTHONPATH=. python benchmarks/record_cost.py [--model mlp|resnet50|vgg16bn]
        [--steps 100] [--samples 5] [--processes 1] [--overflow STEP]
        [--scan [--epochs 10]] [--json FILE]

The loop is a user's: a jitted step on a batch that lies on the device, with and without
`rjax.repro.record` around it at its default of a digest every ten steps. Both take
turns; a sample is the time of all steps, closing the record included. `mlp` is
784-1024-512-256-10 at batch 200 (an epoch of MNIST has 300 steps), the others take
224x224 images at batch 256. `--scan` puts `--steps` steps, shuffled, into one program
(`rjax.capture_epoch`), with the digests inside; a sample is `--epochs` calls of it, one
after the other through one recording. `--overflow` puts an infinity into the images of
one step, which has to be skipped.

With more processes the same is done in each, one after another, in deterministic mode
(`rjax.repro.deterministic`), and their records are compared.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

import rjax

MODELS = {
    "mlp": lambda: rjax.nn.MLP((1024, 512, 256), 10),
    "resnet50": lambda: rjax.nn.ResNet50(num_classes=1000),
    "vgg16bn": lambda: rjax.nn.VGG16BN(num_classes=1000),
}


def criterion(logits, labels):
    return rjax.ops.softmax_cross_entropy(logits, labels, label_smoothing=0.1).mean()


def make(name, batch, image):
    """Return plan, step, a function that makes a fresh state, and a batch."""
    rng = np.random.default_rng(0)
    shape = (batch, 28, 28, 1) if name == "mlp" else (batch, image, image, 3)
    images = jnp.asarray(rng.standard_normal(shape, np.float32), jnp.float16)
    labels = jnp.asarray(rng.integers(0, 10, batch, np.int32))
    model = MODELS[name]()
    variables = jax.jit(model.init)(jax.random.key(0), images[:1].astype(jnp.float32))
    stats = variables.get("batch_stats")
    plan = rjax.make_plan(
        variables["params"], rjax.Config(learning_rate=0.01), batch_stats=stats
    )
    step = rjax.make_train_step(rjax.linen_loss(model, criterion), plan)
    fresh = lambda: rjax.init_state(plan, variables["params"], stats, seed=0)  # noqa: E731
    return plan, jax.jit(step, donate_argnums=0), fresh, (images, labels)


def loop(step, state, batch, steps, recording=None, overflow=0):
    """Return seconds for all steps, one call each; that of `overflow` is skipped."""
    images, labels = batch
    bad = images.at[0].set(jnp.inf) if overflow else images
    started = time.perf_counter()
    for i in range(1, steps + 1):
        state, report = step(state, (bad if i == overflow else images, labels))
        if recording is not None:
            recording.add(state, report)
    if recording is not None:
        recording.close()
    jax.block_until_ready(state)
    return time.perf_counter() - started


def whole_epochs(plan, step, state, batch, steps, epochs):
    """Return a function like `loop` whose steps are one program, called many times."""
    images, labels = batch
    data = jnp.tile(images, (steps, 1, 1, 1)), jnp.tile(labels, steps)
    size = len(labels)
    plain = rjax.capture_epoch(step, state, data, size, plan=plan)
    recorded = rjax.capture_epoch(step, state, data, size, plan=plan, every=10)

    def run(step, state, batch, steps, recording=None):
        del step, batch, steps
        epoch = plain if recording is None else recorded
        started = time.perf_counter()
        for _ in range(epochs):
            state, report = epoch(state)
            if recording is not None:
                recording.add_scanned(state, report.reports, report.digests)
        if recording is not None:
            recording.close()
        jax.block_until_ready(state)
        return time.perf_counter() - started

    return run


def measure(args, keep):
    """Return milliseconds a step, plain and recorded; the first record stays."""
    plan, step, fresh, batch = make(args.model, args.batch, args.image)
    run = functools.partial(loop, overflow=args.overflow)
    if args.scan:
        run = whole_epochs(plan, step, fresh(), batch, args.steps, args.epochs)
    samples = {"plain": [], "recorded": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.samples + 1):  # the first round warms up
            for name, values in samples.items():
                state, recording = fresh(), None
                if name == "recorded":
                    where = keep if i == 0 else f"{folder}/{i}"
                    recording = rjax.repro.record(where, plan, state)
                seconds = run(step, state, batch, args.steps, recording)
                values.append(1e3 * seconds / (args.epochs * args.steps))
    return {name: values[1:] for name, values in samples.items()}


def told(args, samples):
    """Return what one process measured as a line."""
    plain, recorded = (statistics.median(samples[name]) for name in samples)
    device = jax.devices()[0].device_kind
    scanned = f"{args.epochs} scans of " if args.scan else ""
    return (
        f"{args.model} on {device}, jax {jax.__version__}, {scanned}{args.steps} steps:"
        f" plain {plain:.3f} ms a step, recorded {recorded:.3f}, "
        f"{recorded / plain - 1:+.1%}"
    )


def several(args, folder):
    """Run one process after another; return their records' folders and figures."""
    keeps = [f"{folder}/run{i}" for i in range(args.processes)]
    found = []
    for keep in keeps:
        subprocess.run([sys.executable, *sys.argv, "--keep", keep], check=True)
        found.append(json.loads(pathlib.Path(keep + ".json").read_text()))
    return keeps, found


def parse():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--overflow", type=int, default=0, help="step to be skipped")
    parser.add_argument("--scan", action="store_true", help="all steps in one program")
    parser.add_argument("--epochs", type=int, help="calls of it; 10 if not given")
    parser.add_argument("--json", help="keep all samples here")
    parser.add_argument("--keep", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scan and args.overflow:
        parser.error("--overflow needs a step of its own: leave out --scan")
    if args.epochs and not args.scan:
        parser.error("--epochs are calls of a program of all steps: add --scan")
    args.epochs = args.epochs or (10 if args.scan else 1)
    args.batch = args.batch or (200 if args.model == "mlp" else 256)
    return args


def main():
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        if args.keep or args.processes == 1:
            if args.keep:
                rjax.repro.deterministic()
            found = [measure(args, args.keep or f"{folder}/run0")]
            print(told(args, found[0]), flush=True)
            if args.keep:
                pathlib.Path(args.keep + ".json").write_text(json.dumps(found[0]))
                return
        else:
            keeps, found = several(args, folder)
            for other in keeps[1:]:
                print(rjax.repro.compare(keeps[0], other))
        if args.json:
            what = {
                "model": args.model,
                "batch": args.batch,
                "steps": args.steps,
                "overflow": args.overflow,
                "scan": args.scan,
                "epochs": args.epochs,
            }
            device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
            text = json.dumps({**what, **device, "processes": found})
            pathlib.Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
