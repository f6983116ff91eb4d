"""The same small CNN, weights and batches in PyTorch and in rjax, step by step.

    python benchmarks/parity_torch.py [--steps 100] [--every 10] [--json FILE]

In float32 both must stay as near to a training in float64 as rounding explains (the
bound is measured, see benchmarks/parity/bound.py). In fp16, with autocast and
GradScaler there and the dynamic rule here, the loss of a few steps is multiplied by
2^20: both must skip these, and have the same loss scale at every step. `--decay
decoupled` shows what a real difference looks like. Exit code 1 if it does not hold.
"""

import argparse
import json
import sys

import jax
import numpy as np
import torch
from parity import in_rjax, in_torch
from parity.bound import apart, reference
from parity.problem import make_problem


def float32(steps, decay):
    """Return the distances in float32, by name, and whether they hold."""
    given = make_problem(steps, provoke=False)
    exact, bound = reference(given)
    theirs = in_torch.train(given, torch.float32)
    ours = in_rjax.train(given, "fp32", decay)
    found = {
        "loss": {"torch": theirs.losses, "rjax": ours.losses, "float64": exact.losses},
        "bound": bound.tolist(),
        "closest": exact.closest,
        "torch": apart(theirs, exact).tolist(),
        "rjax": apart(ours, exact).tolist(),
        "between": apart(ours, theirs).tolist(),
        "stats": {
            name: float(np.abs(ours.stats[name] - exact.stats[name]).max())
            for name in exact.stats
        },
    }
    within = [max(x) for x in zip(found["torch"], found["rjax"], strict=True)]
    holds = all(x <= y for x, y in zip(within, found["bound"], strict=True))
    return found | {"holds": holds}


def float16(steps, decay):
    """Return losses, scales and skips in fp16, and whether the last two agree."""
    given = make_problem(steps, provoke=True)
    theirs = in_torch.train(given, torch.float32, half=True)
    ours = in_rjax.train(given, "fp16", decay)
    return {
        "provoked": np.flatnonzero(given.boosts != 1).tolist(),
        "loss": {"torch": theirs.losses, "rjax": ours.losses},
        "scale": {"torch": theirs.scales, "rjax": ours.scales},
        "skipped": {
            name: [step for step, applied in enumerate(of.applied) if not applied]
            for name, of in (("torch", theirs), ("rjax", ours))
        },
        "between": apart(ours, theirs).tolist(),
        "holds": theirs.scales == ours.scales and theirs.applied == ours.applied,
    }


def show(single, half, steps, every):
    """Print both, every few steps."""
    print("\nfloat32: ||w - w64|| / ||w64||")
    print("step  loss torch    loss rjax     torch     rjax      between   bound")
    loss = single["loss"]
    for step in sorted({*range(0, steps, every), steps - 1}):
        print(
            f"{step:4}  {loss['torch'][step]:.8f}  {loss['rjax'][step]:.8f}  "
            f"{single['torch'][step]:.2e}  {single['rjax'][step]:.2e}  "
            f"{single['between'][step]:.2e}  {single['bound'][step]:.2e}"
        )
    print(f"within the bound at every step: {single['holds']}")
    print(f"nearest that a unit came to the kink of ReLU: {single['closest']:.1e}")
    print("\nfloat16")
    print("step  loss torch  loss rjax  scale torch  scale rjax  skipped")
    skips = {*half["skipped"]["torch"], *half["skipped"]["rjax"]}
    for step in sorted({*range(0, steps, every), steps - 1} | skips):
        skipped = [n for n in ("torch", "rjax") if step in half["skipped"][n]]
        print(
            f"{step:4}  {half['loss']['torch'][step]:.6f}    "
            f"{half['loss']['rjax'][step]:.6f}   "
            f"{half['scale']['torch'][step]:11g}  {half['scale']['rjax'][step]:10g}  "
            f"{' and '.join(skipped)}"
        )
    print(f"same skips and same scales at every step: {half['holds']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--decay", choices=("coupled", "decoupled"), default="coupled")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, jax {jax.__version__}, {jax.devices()[0]}")
    single = float32(args.steps, args.decay)
    half = float16(args.steps, args.decay)
    show(single, half, args.steps, args.every)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"float32": single, "float16": half}, file)
    return 0 if single["holds"] and half["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
