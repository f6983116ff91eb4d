"""What saving checkpoints costs a training loop, asynchronously and all in one process.

    PYTHONPATH=. python benchmarks/checkpoint_cost.py [--model resnet50|vgg16bn]
        [--batch 256] [--image 224] [--every 500] [--saves 1] [--samples 5]
        [--folder DIR] [--json FILE]

The loop is a user's: the jitted step of `train_throughput.py` on a batch that lies on
the device, its state donated, with and without `rjax.checkpoint.Checkpoints.save` every
`--every` steps. Both take turns; a sample is the time of `--saves` times `--every`
steps, each of which begins with a save, until the last step is done. What a save still
writes then is told and waited for outside of samples, so that a plain one never pays.

Told beside the cost of a step: for how long `save` held the loop, what of the writing
was left when the steps were done (if that is not 0, steps are too few to hide it), the
seconds from `save` to a checkpoint that is sealed, and its size on disk.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import jax
from throughput import on_jax
from throughput.settings import MODELS, PRECISIONS, Settings

from rjax.checkpoint import Checkpoints
from rjax.checkpoint.files import SEAL


def make(settings):
    """Return the plan, the compiled step, a state and a batch."""
    _, plan, step, state = on_jax.pipeline(settings, settings.learning_rate)
    batch = on_jax.make_batch(settings)
    step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return plan, step, state, batch


def take(step, state, batch, args, saved=None):
    """Take the steps of a sample; return the state and what was measured."""
    found = {"held": [], "called": []}
    started = time.perf_counter()
    for i in range(args.saves * args.every):
        if saved is not None and i % args.every == 0:
            found["called"].append(time.time())
            before = time.perf_counter()
            saved.save(state)
            found["held"].append(time.perf_counter() - before)
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    done = time.perf_counter()
    found["milliseconds"] = 1e3 * (done - started) / (args.saves * args.every)
    if saved is not None:
        saved.wait()
        found["left"] = time.perf_counter() - done
        newest = saved.folder / str(saved.steps()[-1])
        found["seconds"] = (newest / SEAL).stat().st_mtime - found["called"][-1]
        found["bytes"] = sum(x.stat().st_size for x in newest.rglob("*") if x.is_file())
    return state, found


def measure(args, settings, folder):
    """Return the samples of both, in turns; the first of each warms up."""
    plan, step, state, batch = make(settings)
    samples = {"plain": [], "saving": []}
    with Checkpoints(folder, plan, keep=1) as saved:
        for _ in range(args.samples + 1):
            for name, values in samples.items():
                how = saved if name == "saving" else None
                state, found = take(step, state, batch, args, how)
                values.append(found)
    return {name: values[1:] for name, values in samples.items()}


def told(args, samples):
    """Return lines about what was measured."""
    plain, saving = (
        [found["milliseconds"] for found in samples[name]] for name in samples
    )
    one, other = statistics.median(plain), statistics.median(saving)
    held = [1e3 * x for found in samples["saving"] for x in found["held"]]
    left = max(found["left"] for found in samples["saving"])
    seconds = [found["seconds"] for found in samples["saving"]]
    size = samples["saving"][-1]["bytes"]
    device = jax.devices()[0].device_kind
    return [
        f"{args.model} batch {args.batch} on {device}, jax {jax.__version__}, a save "
        f"every {args.every} steps, {len(plain)} samples of {args.saves * args.every}",
        f"  a step: plain {one:.3f} ms ({min(plain):.3f} to {max(plain):.3f}), saving "
        f"{other:.3f} ({min(saving):.3f} to {max(saving):.3f}), {other / one - 1:+.2%}",
        f"  a save: {(other - one) * args.every:.1f} ms of the loop, held for "
        f"{statistics.median(held):.1f} ms (at most {max(held):.1f})",
        f"  {size / 1e6:.1f} MB, sealed after {statistics.median(seconds):.2f} s (at "
        f"most {max(seconds):.2f}); {left:.2f} s left after the last step at most",
    ]


def parse():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--ema", action="store_true", help="keep an average, too")
    parser.add_argument("--folded", action="store_true", help="ResNet50(folded=True)")
    parser.add_argument("--every", type=int, default=500, help="steps between saves")
    parser.add_argument("--saves", type=int, default=1, help="saves in a sample")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--folder", help="where to save; a temporary one if not given")
    parser.add_argument("--json", help="keep all samples here")
    args = parser.parse_args()
    for name in ("batch", "image", "classes", "every", "saves", "samples"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.folded and args.model != "resnet50":
        parser.error("--folded is for resnet50: leave it out")
    return args


def main():
    args = parse()
    names = ("model", "precision", "batch", "image", "classes", "ema", "folded")
    settings = Settings(**{name: getattr(args, name) for name in names})
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        samples = measure(args, settings, pathlib.Path(folder))
    print("\n".join(told(args, samples)), flush=True)
    if args.json:
        found = {**vars(args), **on_jax.environment(), "samples": samples}
        pathlib.Path(args.json).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
