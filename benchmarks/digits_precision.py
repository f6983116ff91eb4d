"""Test accuracy of `rjax train` on digits in fp32, bf16 and fp16, over three seeds.

    PYTHONPATH=. python benchmarks/digits_precision.py [--model mlp] [--seeds 3]

Prints every accuracy, in per cent, from masters and from EMA, and the means.
"""

import argparse
import contextlib
import io
import json
import pathlib
import statistics
import tempfile

import jax

from rjax.cli import main as rjax_main


def accuracy(folder, model, precision, seed):
    """Train once; return the test accuracies of the run's manifest and its skips."""
    out = pathlib.Path(folder) / f"{precision}-{seed}"
    options = ["--model", model, "--precision", precision, "--seed", str(seed)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = rjax_main(["train", "--no-plan", *options, "--out", str(out)])
    assert code == 0, f"rjax train ended with {code}"
    results = json.loads((out / "manifest.json").read_text())["results"]
    test = results["test"]
    return [100 * test[w]["accuracy"] for w in ("master", "ema")] + [
        results["train"]["skipped"]
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.model}")
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "bf16", "fp16"):
            rows = [
                accuracy(folder, args.model, precision, s) for s in range(args.seeds)
            ]
            for i, name in enumerate(("masters", "EMA")):
                values = [row[i] for row in rows]
                print(
                    f"{precision}  {name:8s} mean {statistics.mean(values):6.2f}  "
                    f"each {'  '.join(f'{v:6.2f}' for v in values)}"
                )
            print(f"{precision}  skipped  {[row[2] for row in rows]}")


if __name__ == "__main__":
    main()
