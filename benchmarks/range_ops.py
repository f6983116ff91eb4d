"""Range operations at every size: XLA beside Mosaic GPU, and how near to a copy.

For each op, size and implementation: first the result is compared with the plain
reference, then timed. One program runs the op on several distinct arrays, one after
the other, and several such programs are in flight; a sample is the time of all of
them, divided. So at tiny sizes a figure is what one more operation costs inside a
jitted step, launch included, not what a call from Python costs. All samples are kept;
tables show medians. The copy is `x + 1`, out of place, over as many bytes, in the same
run. Small arrays fit into the second-level cache: there the share of the copy
bandwidth compares like with like, and may exceed what memory gives.

    PYTHONPATH=. python benchmarks/range_ops.py [--ops cast,ema] [--sizes 10,28]
        [--json FILE] [--plot FILE]
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax import ops
from rjax.ops import mosaic

SIZES = range(10, 29, 2)
SCALE = np.float32(8192.0)


@dataclasses.dataclass(frozen=True)
class Op:
    """What is timed: arrays of these dtypes in, `nbytes` moved per element."""

    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    nbytes: int
    donated: bool = False
    implementations: tuple[str, ...] = ("xla", "mosaic_gpu")
    ulps: int = 0  # allowed difference from the reference, of the largest value


def norm(x, implementation):
    return ops.check_finite(x, SCALE, implementation=implementation)


def slots(x, implementation):
    """Digest 64 slots of equal size, the last element of each being padding."""
    size = x.size // 64 // 128 * 128
    table = [(i * size, size - 1) for i in range(64)] if size else [(0, x.size)]
    return ops.digest_slots(x, table, implementation=implementation)


def cast_to(dtype):
    return lambda x, implementation: ops.cast(x, dtype, implementation=implementation)


OPS = {
    "copy": Op(lambda x, implementation: x + 1, (jnp.float32,), 8, False, ("xla",)),
    "cast": Op(cast_to(jnp.float16), (jnp.float32,), 6),
    "cast_bf16": Op(cast_to(jnp.bfloat16), (jnp.float32,), 6),
    "cast_up": Op(cast_to(jnp.float32), (jnp.float16,), 6),
    "ema": Op(
        lambda e, w, implementation: ops.ema(
            e, w, 0.999, implementation=implementation
        ),
        (jnp.float32, jnp.float32),
        12,
        donated=True,
        ulps=2,
    ),
    "check_finite": Op(norm, (jnp.float32,), 4, ulps=64),
    "digest": Op(ops.digest, (jnp.float32,), 4),
    "digest_fp16": Op(ops.digest, (jnp.float16,), 2),
    "digest_slots": Op(slots, (jnp.float32,), 4),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def arrays(dtype, n, count, seed):
    """Return `count` arrays of n normal numbers of one dtype."""
    keys = jax.random.split(jax.random.key(seed), count)
    return [jax.random.normal(key, (n,), jnp.float32).astype(dtype) for key in keys]


def verify(op, n, implementation):
    """Raise if one result is not what the reference gives."""
    make = lambda: [arrays(d, n, 1, i)[0] for i, d in enumerate(op.inputs)]  # noqa: E731
    found = jax.jit(functools.partial(op.run, implementation=implementation))(*make())
    wanted = jax.jit(functools.partial(op.run, implementation="xla"))(*make())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if op.ulps and a.dtype == jnp.float32:
            close = jnp.max(jnp.abs(a - b)) <= op.ulps * 2.0**-24 * jnp.max(jnp.abs(b))
            assert close, "differs by more than its bound"
        else:
            assert bool(jnp.array_equal(a, b)), "differs from the reference"


def measure(op, n, implementation, samples=7, budget=0.02):
    """Return seconds per operation, one a sample."""
    count = 8 if n >= 1 << 24 else 32
    run = functools.partial(op.run, implementation=implementation)

    def program(*columns):
        outs = []
        for row in zip(*columns, strict=True):
            if outs:  # one after the other: XLA would fuse small ones side by side
                outs[-1], row = jax.lax.optimization_barrier((outs[-1], row))
            outs.append(run(*row))
        return outs

    donate = (0,) if op.donated else ()
    columns = [arrays(d, n, count, i) for i, d in enumerate(op.inputs)]
    compiled = jax.jit(program, donate_argnums=donate).lower(*columns).compile()

    def repeat(times):
        nonlocal columns
        out = None
        start = time.perf_counter()
        for _ in range(times):
            out = compiled(*columns)
            if op.donated:
                columns = [out, *columns[1:]]
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / times / count

    repeat(2)
    times = max(1, min(50, math.ceil(budget / (repeat(2) * count))))
    return [repeat(times) for _ in range(samples)]


def table(rows):
    """Yield lines: one op and size a line, microseconds and share of a copy."""
    yield "| op | n | xla µs | mosaic µs | xla GB/s | mosaic GB/s | xla | mosaic |"
    yield "|---|---|---|---|---|---|---|---|"
    found = {(r["op"], r["n"], r["implementation"]): r for r in rows}
    for op, n in dict.fromkeys((r["op"], r["n"]) for r in rows):
        pair = [found.get((op, n, name)) for name in ("xla", "mosaic_gpu")]
        cells = [
            form.format(r[key] * factor) if r else ""
            for key, form, factor in (
                ("seconds", "{:.2f}", 1e6),
                ("bandwidth", "{:.0f}", 1e-9),
                ("share", "{:.0%}", 1),
            )
            for r in pair
        ]
        yield f"| {op} | 2^{n.bit_length() - 1} | " + " | ".join(cells) + " |"


def plot(rows, path):
    """Draw bandwidth over size, one panel an op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(r["op"] for r in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(3 * len(names), 3.2), sharey=True, squeeze=False
    )
    for axis, op in zip(axes[0], names, strict=True):
        for implementation, color in (("xla", "tab:gray"), ("mosaic_gpu", "tab:green")):
            for source, style in ((op, "-o"), ("copy", ":")):
                mine = [
                    r for r in rows
                    if r["op"] == source and r["implementation"] == implementation
                ]  # fmt: skip
                label = implementation if source == op else "copy"
                axis.plot(
                    [r["n"] for r in mine],
                    [r["bandwidth"] / 1e9 for r in mine],
                    style,
                    color=color if source == op else "black",
                    label=label if mine else None,
                    markersize=3,
                )
        axis.set(xscale="log", yscale="log", title=op, xlabel="elements")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("GB/s read and written")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default=",".join(OPS), help="names, with commas")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="log2 of n")
    parser.add_argument("--json", help="keep all samples here")
    parser.add_argument("--plot", help="draw the table here (PNG)")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}")
    if missing := mosaic.why_not():
        print(f"only xla: {missing}")
    rows = []
    names = dict.fromkeys(["copy", *args.ops.split(",")])
    for log in map(int, args.sizes.split(",")):
        copy = 0.0
        for name in names:
            op = OPS[name]
            for implementation in op.implementations:
                if implementation != "xla" and missing:
                    continue
                if implementation != "xla":
                    verify(op, 1 << log, implementation)
                samples = measure(op, 1 << log, implementation)
                seconds = statistics.median(samples)
                bandwidth = op.nbytes * (1 << log) / seconds
                copy = copy or bandwidth
                rows.append({
                    "op": name, "n": 1 << log, "implementation": implementation,
                    "seconds": seconds, "bandwidth": bandwidth,
                    "share": bandwidth / copy, "samples": samples,
                })  # fmt: skip
                say = f"{name} 2^{log} {implementation}: {1e6 * seconds:.2f} us"
                print(say, flush=True)
    print("\n".join(table(rows)))
    if args.json:
        record = {"device": device, "jax": jax.__version__, "rows": rows}
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
