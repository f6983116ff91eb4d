"""Range operations at every size: XLA beside Mosaic GPU, and how near to a copy.

Measures as `rjax bench` does (how is said in `rjax/bench/measure.py`) and draws the
bandwidths over the sizes. The copy is `x + 1`, out of place. Small arrays fit into the
second-level cache: there compare with the copy, which may exceed what memory gives.

    PYTHONPATH=. python benchmarks/range_ops.py [--ops cast,ema] [--sizes 10,28]
        [--json FILE] [--plot FILE]
    PYTHONPATH=. python benchmarks/range_ops.py --read FILE --plot FILE
"""

import argparse
import json
import math
import pathlib
import tempfile

from rjax.bench.command import bench
from rjax.bench.options import BenchOptions
from rjax.runs.errors import UsageError

COLUMNS = 4
# By op and implementation: the copy is drawn into every panel.
STYLES = {
    "copy": {"color": "black", "linestyle": ":", "zorder": 1},
    "xla": {"color": "tab:gray", "marker": "o", "zorder": 2},
    "mosaic_gpu": {"color": "tab:green", "marker": "o", "zorder": 3},
}


def best(rows, op, implementation):
    """Return (n, GB/s) by size, each of the fastest block."""
    found = {}
    for row in rows:
        if (row["op"], row["implementation"]) == (op, implementation):
            found[row["n"]] = max(found.get(row["n"], 0.0), row["bandwidth"] / 1e9)
    return sorted(found.items())


def plot(record, path):
    """Draw bandwidth over size, one panel an op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = record["rows"]
    names = [op for op in dict.fromkeys(row["op"] for row in rows) if op != "copy"]
    names = names or ["copy"]
    columns = min(COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.1 * columns, 2.5 * lines + 0.8),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    shown, sizes = {}, sorted({row["n"] for row in rows})
    for axis, op in zip(axes.flat, names, strict=False):
        for label, style in STYLES.items():
            source = ("copy", "xla") if label == "copy" else (op, label)
            curve = best(rows, *source)
            if curve and (label == "copy" or op != "copy"):
                points = zip(*curve, strict=True)
                (shown[label],) = axis.plot(*points, markersize=3, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes[:: math.ceil(len(sizes) / 6)])
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(op, fontsize=10)
        axis.grid(alpha=0.25)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for column in range(columns):  # the lowest panel of a column names the sizes
        lowest = max(i for i in range(column, len(names), columns))
        axes.flat[lowest].tick_params(labelbottom=True)
        axes.flat[lowest].set_xlabel("elements")
    figure.supylabel("GB/s read and written", fontsize=10)
    figure.suptitle(f"{record['device']}, jax {record['jax']}", fontsize=11)
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown)
    )
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", help="names as for rjax bench, with commas")
    parser.add_argument("--sizes", help="log2 of n, with commas")
    parser.add_argument("--json", help="keep all samples here")
    parser.add_argument("--read", help="measure nothing, take samples kept before")
    parser.add_argument("--plot", help="draw the bandwidths here (PNG)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = args.read or args.json or f"{folder}/samples.json"
        if args.read is None:
            options = BenchOptions(ops=args.ops, sizes=args.sizes, json=kept)
            try:
                code = bench(options)
            except UsageError as error:
                parser.error(str(error))
            if code:
                raise SystemExit(code)
        if args.plot:
            plot(json.loads(pathlib.Path(kept).read_text()), args.plot)


if __name__ == "__main__":
    main()
