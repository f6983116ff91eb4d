"""How much of the copies to the device a training loop hides behind its steps.

    PYTHONPATH=. python benchmarks/prefetch.py [--model resnet20|mlp|resnet50]
        [--batch 256] [--image 32] [--dtype float32] [--gather] [--steps 50]
        [--samples 5] [--json FILE] [--profile DIR]

One compiled step, fed from host memory in five ways that take turns:

- resident: the batch lies on the device; the floor.
- one by one: copy, wait, step, wait; the ceiling.
- plain: `for batch in source: step(state, batch)`, copied by the call itself.
- prefetch: `rjax.data.prefetch`.
- flax: `flax.jax_utils.prefetch_to_device` of depth 2, where flax has it.

A sample is the time of a loop over `--steps` steps, in milliseconds a step, blocking
at its end; the first round warms up. *Hidden* is the share of the copy that a loop does
not pay for: (one by one - loop) / (one by one - resident), of medians. The source hands
out four batches in turn as they are; with `--gather` it picks the rows of each from a
data set in memory, as `rjax.data.train_batches` does.

`--profile` keeps a trace of a few steps of every loop but the floor in DIR, and says
how many microseconds a step host-to-device copies take there, and for how many of them
a kernel runs.
"""

import argparse
import itertools
import json
import pathlib
import re
import statistics
import time
import warnings

import flax.jax_utils
import jax
import numpy as np

import rjax
from rjax.data.prefetch import prefetch

MODELS = {
    "mlp": lambda: rjax.nn.MLP((1024, 512, 256), 10),
    "resnet20": lambda: rjax.nn.ResNet(num_classes=10),
    "resnet50": lambda: rjax.nn.ResNet50(num_classes=1000),
}
POOL, TRACED = 4, 10


def make(args):
    """Return a compiled step, its state, and the pool of examples on the host."""
    rng = np.random.default_rng(0)
    shape = (POOL * args.batch, args.image, args.image, 3)
    images = rng.random(shape, np.float32).astype(args.dtype)
    labels = rng.integers(0, 10, len(images), np.int32)
    model = MODELS[args.model]()
    variables = jax.jit(model.init)(jax.random.key(0), images[:1].astype(np.float32))
    stats = variables.get("batch_stats")
    config = rjax.Config(learning_rate=0.01)
    plan = rjax.make_plan(variables["params"], config, batch_stats=stats)
    loss = rjax.linen_loss(model, rjax.ops.softmax_cross_entropy)
    state = rjax.init_state(plan, variables["params"], stats)
    step = jax.jit(rjax.make_train_step(loss, plan), donate_argnums=0)
    batch = images[: args.batch], labels[: args.batch]
    return step.lower(state, batch).compile(), state, (images, labels)


def make_source(args, pool):
    """Return a function of a number of steps that gives an iterator of batches."""
    if args.gather:
        return lambda steps: rjax.data.train_batches(pool, args.batch, stop=steps)
    size = args.batch
    parts = [tuple(x[i * size :][:size] for x in pool) for i in range(POOL)]
    return lambda steps: itertools.islice(itertools.cycle(parts), steps)


def one_by_one(step, state, batches):
    for batch in batches:
        batch = jax.block_until_ready(jax.device_put(batch))
        state, _ = jax.block_until_ready(step(state, batch))
    return state


def plain(step, state, batches):
    for batch in batches:
        state, _ = step(state, batch)
    return state


# `prefetch_to_device` splits the first axis over devices; the step wants it gone.
without_first_axis = jax.jit(lambda batch: jax.tree.map(lambda x: x[0], batch))


def by_flax(step, state, batches):
    batches = (jax.tree.map(lambda x: x[None], batch) for batch in batches)
    devices = jax.local_devices()[:1]
    for batch in flax.jax_utils.prefetch_to_device(batches, 2, devices):
        state, _ = step(state, without_first_axis(batch))
    return state


def make_loops(batch, waited):
    """Return all loops by name, each of which takes a step, a state and batches.

    For what `rjax.data.prefetch` waited in each loop is added to `waited`.
    """
    on_device = jax.device_put(batch)

    def resident(step, state, batches):
        return plain(step, state, (on_device for _ in batches))

    def prefetched(step, state, batches):
        with prefetch(batches) as ahead:
            state = plain(step, state, ahead)
        waited.append(ahead.waited)
        return state

    loops = {
        "resident": resident,
        "one by one": one_by_one,
        "plain": plain,
        "prefetch": prefetched,
    }
    if hasattr(flax.jax_utils, "prefetch_to_device"):
        loops["flax"] = by_flax
    return loops


def measure(step, state, loops, source, steps, samples):
    """Return the milliseconds a step of every sample, by loop, and the last state."""
    found = {name: [] for name in loops}
    for _ in range(samples + 1):  # the first round warms up
        for name, loop in loops.items():
            start = time.perf_counter()
            state = jax.block_until_ready(loop(step, state, source(steps)))
            found[name].append(1e3 * (time.perf_counter() - start) / steps)
    return {name: values[1:] for name, values in found.items()}, state


def trace(step, state, loops, source, folder):
    """Keep a trace of each loop; return its microseconds a step and the last state."""
    found = {}
    for name, loop in loops.items():
        if name == "resident":
            continue
        where = folder / name.replace(" ", "_")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(where, profiler_options=options)
        state = jax.block_until_ready(loop(step, state, source(TRACED)))
        jax.profiler.stop_trace()
        file = max(where.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        with warnings.catch_warnings():
            # Python 3.12 warns of a type of the reader.
            warnings.simplefilter("ignore", DeprecationWarning)
            data = jax.profiler.ProfileData.from_file(str(file))
            found[name] = overlap(data, TRACED)
    return found, state


def overlap(data, steps):
    """Return what the streams of a GPU do, in microseconds a step, or `None`.

    `copies`: host-to-device copies run; `hidden`: a kernel runs meanwhile; `kernels`:
    any kernel runs.
    """
    copies, kernels = [], []
    for plane in data.planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                span = (event.start_ns, event.start_ns + event.duration_ns)
                if re.match("Memcpy(H2D|HtoD)", event.name):
                    copies.append(span)
                elif not re.match("Mem(cpy|set)", event.name):
                    kernels.append(span)
    if not kernels:
        return None
    copies, kernels = union(copies), union(kernels)
    both = length(copies) + length(kernels) - length(union(copies + kernels))
    times = {"copies": length(copies), "hidden": both, "kernels": length(kernels)}
    return {name: ns / 1e3 / steps for name, ns in times.items()}


def union(spans):
    """Return spans that cover the same and do not overlap, in order."""
    merged = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(spans):
    return sum(stop - start for start, stop in spans)


def table(samples):
    """Yield medians, ranges, and the share of the copy that is hidden, as rows."""
    middle = {name: statistics.median(values) for name, values in samples.items()}
    floor, ceiling = middle["resident"], middle["one by one"]
    yield "| loop       | ms a step [min max]        | hidden |"
    yield "|------------|---------------------------:|-------:|"
    for name, values in samples.items():
        times = f"{middle[name]:.3f} [{min(values):.3f} {max(values):.3f}]"
        hidden = ""
        if ceiling > floor and name not in ("resident", "one by one"):
            hidden = f"{(ceiling - middle[name]) / (ceiling - floor):.0%}"
        yield f"| {name:10} | {times:>26} | {hidden:>6} |"


def told(name, times):
    """Return the overlap in the trace of one loop as a line."""
    if times is None:
        return f"{name}: no GPU in the trace"
    copies, hidden, kernels = (times[key] for key in ("copies", "hidden", "kernels"))
    return (
        f"{name}: copies {copies:.1f} us a step, {hidden:.1f} of them beside kernels, "
        f"which take {kernels:.1f}"
    )


def parse(argv):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="resnet20")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image", type=int, help="224 for resnet50, 32 for the others")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--gather", action="store_true", help="pick rows from a set")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="keep all samples here")
    parser.add_argument("--profile", type=pathlib.Path, help="keep traces here")
    args = parser.parse_args(argv)
    args.image = args.image or (224 if args.model == "resnet50" else 32)
    for name in ("batch", "image", "steps", "samples"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv=None):
    args = parse(argv)
    step, state, pool = make(args)
    source = make_source(args, pool)
    waited = []
    loops = make_loops(next(source(1)), waited)
    size = sum(x.nbytes for x in next(source(1)))
    device = jax.devices()[0].device_kind
    print(
        f"{args.model}, batches of {size / 1e6:.1f} MB, {args.steps} steps a sample, "
        f"{device}, jax {jax.__version__}"
    )
    samples, state = measure(step, state, loops, source, args.steps, args.samples)
    rows = [
        {"loop": name, "sample": i, "ms": ms}
        for name, values in samples.items()
        for i, ms in enumerate(values)
    ]
    if args.profile:
        traces, state = trace(step, state, loops, source, args.profile)
        rows += [{"loop": name, "us": us} for name, us in traces.items()]
        print("\n".join(told(name, us) for name, us in traces.items()))
    if args.json:
        kept = ("model", "batch", "image", "dtype", "gather", "steps")
        facts = {name: getattr(args, name) for name in kept}
        facts |= {"bytes": size, "device": device, "jax": jax.__version__}
        args.json.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    last = waited[args.samples]  # the first one is that of the warm-up
    print(
        f"prefetch waited in its last sample, ms a step: source "
        f"{1e3 * last.source / args.steps:.3f}, copy {1e3 * last.copy / args.steps:.3f}"
        f", device {1e3 * last.device / args.steps:.3f}"
    )
    print("\n".join(table(samples)))


if __name__ == "__main__":
    main()
