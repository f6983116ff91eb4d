"""Passes of a batch norm, and max pooling, at the shapes of ResNet-50 and VGG16-BN.

Every (height, width, channels) of ResNet-50 v1.5 and VGG16-BN at one batch, float16,
channel last: XLA beside Mosaic GPU, and how near to a copy of as many bytes each comes
(`x + 1` in float32: XLA copies float16 more slowly).
Times are taken as `rjax bench` takes them (`rjax/bench/measure.py`), after every kernel
was compared with XLA. Bytes are those that the definition of an op has to read and
write; vectors, one number a channel, are not counted. Arrays below the size of the
second-level cache may exceed what memory gives: compare with the copy.

`batch_norm` is the op that users call, with a ReLU: `both` is forward and backward,
`default` leaves the choice to rjax. Rows `flax.*` are stock Flax. Pooled are the stem
of ResNet (3x3, stride 2) and the ends of VGG's stages (2x2), residuals are added where
ResNet's blocks end; a shape of neither network has all variants.

    PYTHONPATH=. python benchmarks/norm_ops.py [--batch 256] [--shapes 56x56x256,...]
        [--ops statistics,apply/pool,...] [--implementations xla,mosaic_gpu,default]
        [--json FILE] [--plot FILE]
    PYTHONPATH=. python benchmarks/norm_ops.py --read FILE [--plot FILE]
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax import ops
from rjax.bench.cases import Case, draw
from rjax.bench.measure import BenchError, time_programs, verify
from rjax.bench.programs import XLA, Variant, build_all, memory, needed
from rjax.ops import mosaic
from rjax.ops.batch_norm.training import run_pass
from rjax.ops.digest.base import mix
from rjax.ops.max_pool import Window, max_pool

STEM, STEM_WINDOW = (112, 112, 64), Window(3, 2, ((1, 1), (1, 1)))
RESIDUAL = [(56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048)]
NETWORKS = {
    "ResNet-50": [
        STEM, (56, 56, 64), (56, 56, 128), (28, 28, 128), (28, 28, 256), (14, 14, 256),
        (14, 14, 512), (7, 7, 512), *RESIDUAL,
    ],
    "VGG16-BN": [
        (224, 224, 64), (112, 112, 128), (56, 56, 256), (28, 28, 512), (14, 14, 512),
    ],
}  # fmt: skip
IMPLEMENTATIONS = ("xla", "mosaic_gpu", "default")
DTYPE, BYTES = jnp.float16, 2
# How far results may lie apart, in units of the last place of the largest: float32 is
# summed in an order of one's own, float16 is rounded once.
ULPS = {jnp.dtype(jnp.float32): 64, jnp.dtype(DTYPE): 2}


@dataclasses.dataclass(frozen=True)
class Op:
    """One op in one variant.

    Attributes:
        run: of x, the vectors, the others, `window` and `implementation`.
        moved: arrays of the size of x that are read or written.
        pooled: arrays of the size of the pooled x.
        others: what is read besides x: "image", "clamped" or "pooled".
        where: "", or "pool" or "residual" for shapes that have it.
        kernel: whether others than XLA can serve; stock Flax and the copy have none.
    """

    run: Callable[..., Any]
    moved: int
    pooled: int = 0
    others: tuple[str, ...] = ()
    where: str = ""
    kernel: bool = True


def _copy(x, vectors, *, window, implementation):
    return x + 1


def _statistics(x, vectors, *, window, implementation):
    return run_pass("statistics", x, implementation=implementation)


def _apply(x, vectors, residual=None, **how):
    return run_pass("apply", x, *vectors[:3], residual, relu=True, **how)


def _reduce(x, vectors, dy, y=None, **how):
    return run_pass("reduce", x, (dy,), *vectors[:3], y, relu=True, **how)


def _gradient(x, vectors, dy, *, relu, **how):
    return run_pass("gradient", x, dy, *vectors, relu=relu, **how)


def _max_pool(x, vectors, *, window, implementation):
    how = window.size, window.strides, window.padding
    return max_pool(x, *how, implementation=implementation)


def _flax_max_pool(x, vectors, *, window, implementation):
    return nn.max_pool(x, window.size, window.strides, window.padding)


def _max_pool_backward(forward, x, vectors, dy, **how):
    return jax.vjp(lambda x: forward(x, vectors, **how), x)[1](dy)


def _batch_norm(x, scale, bias, vectors, implementation):
    named = None if implementation == "default" else implementation
    y, *stats = ops.batch_norm(x, scale, bias, relu=True, implementation=named)
    return y, stats


def _flax_batch_norm(x, scale, bias, vectors, implementation):
    module = nn.BatchNorm(use_running_average=False, dtype=DTYPE)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": vectors[0], "var": vectors[1]},
    }
    y, stats = module.apply(variables, x, mutable=["batch_stats"])
    return nn.relu(y), stats


def _forward(norm, x, vectors, *, window, implementation):
    return norm(x, vectors[1], vectors[2], vectors, implementation)


def _both(norm, x, vectors, dy, *, window, implementation):
    run = lambda *args: norm(*args, vectors, implementation)  # noqa: E731
    y, pullback, stats = jax.vjp(run, x, vectors[1], vectors[2], has_aux=True)
    y, dy = lax.optimization_barrier((y, dy))  # the backward pass comes after y
    return y, stats, pullback(dy)


_bind = functools.partial
_relu, _plain = _bind(_gradient, relu=True), _bind(_gradient, relu=False)
_back, _flax_back = (_bind(_max_pool_backward, f) for f in (_max_pool, _flax_max_pool))
_IMAGE, _POOLED = ("image",), ("pooled",)
OPS = {
    "copy": Op(_copy, 2, kernel=False),
    "statistics": Op(_statistics, 1),
    "apply/relu": Op(_apply, 2),
    "apply/residual": Op(_apply, 3, 0, _IMAGE, "residual"),
    "apply/pool": Op(_apply, 1, 1, (), "pool"),
    "reduce/relu": Op(_reduce, 2, 0, _IMAGE),
    "reduce/residual": Op(_reduce, 4, 0, ("image", "clamped"), "residual"),
    "reduce/pool": Op(_reduce, 1, 1, _POOLED, "pool"),
    "gradient/relu": Op(_relu, 3, 0, _IMAGE),
    "gradient/plain": Op(_plain, 3, 0, _IMAGE),
    "gradient/pool": Op(_relu, 2, 1, _POOLED, "pool"),
    "max_pool/forward": Op(_max_pool, 1, 1, (), "pool"),
    "flax.max_pool/forward": Op(_flax_max_pool, 1, 1, (), "pool", False),
    "max_pool/backward": Op(_back, 2, 1, _POOLED, "pool"),
    "flax.max_pool/backward": Op(_flax_back, 2, 1, _POOLED, "pool", False),
    # Statistics read x, apply reads x and writes y; then reduce reads x and dy,
    # gradient reads both again and writes dx.
    "batch_norm/forward": Op(_bind(_forward, _batch_norm), 3),
    "flax.batch_norm/forward": Op(_bind(_forward, _flax_batch_norm), 3, kernel=False),
    "batch_norm/both": Op(_bind(_both, _batch_norm), 8, 0, _IMAGE),
    "flax.batch_norm/both": Op(_bind(_both, _flax_batch_norm), 8, 0, _IMAGE, "", False),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """An op at a shape.

    Attributes:
        op: its name.
        shape: `(batch, height, width, channels)` of x.
        nbytes: what must be read and written.
        case: as it is measured.
    """

    op: str
    shape: tuple[int, int, int, int]
    nbytes: int
    case: Case

    @property
    def n(self) -> int:
        return math.prod(self.shape)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _grid(shape, kind, seed):
    """Return 64 equidistant values about 1 for x, else about 0, as float16.

    With the factors of `_vectors` they make numbers that float32 holds exactly, so that
    no two implementations can see a value on different sides of a clamp, or another
    first largest one.
    """
    bits, _ = mix(seed, lax.iota(jnp.uint32, math.prod(shape)))
    values = ((bits >> 26).astype(jnp.float32) - 31.5) / 16.0
    values = values + 1.0 if kind == "x" else values
    values = jnp.maximum(values, 0.0) if kind == "clamped" else values
    return values.astype(DTYPE).reshape(shape)


def _draw(shape, kind, seed):
    return _grid(shape, kind, jnp.uint32(seed * 0x85EBCA6B % 2**32))


def _vectors(channels):
    """Return mean, factor, bias, mean of dz and slope: few bits, powers of two."""
    c = np.arange(channels)
    mean, bias = 1 + (c % 5 - 2) / 8, (c % 7 - 3) / 8
    found = mean, 2.0 ** (c % 3 - 1), bias, c % 3 / 64, c % 5 / 32
    return tuple(jnp.asarray(v, jnp.float32) for v in found)


def window_of(shape) -> Window:
    """Return how images of (height, width, channels) are pooled."""
    return STEM_WINDOW if shape == STEM else Window(2)


def has(shape, where: str) -> bool:
    """Whether a network pools images of that shape, or adds a residual to them."""
    if not where or not networks(shape):
        return True
    pools = [STEM, *NETWORKS["VGG16-BN"]]
    return shape in (RESIDUAL if where == "residual" else pools)


def networks(shape) -> list[str]:
    return [name for name, shapes in NETWORKS.items() if shape in shapes]


def make_row(name: str, batch: int, image: tuple[int, int, int]) -> Row:
    """Return an op at (height, width, channels)."""
    op, window, shape = OPS[name], window_of(image), (batch, *image)
    small = shape
    if op.where == "pool":
        small = (batch, *window.output(*image[:2]), image[2])
    nbytes = BYTES * (op.moved * math.prod(shape) + op.pooled * math.prod(small))

    def make(n, seed):
        if name == "copy":
            return draw(n * BYTES // 4, seed), (None,)
        seeds = range(4 * seed, 4 * seed + 1 + len(op.others))
        x, *others = (
            _draw(small if kind == "pooled" else shape, kind, s)
            for kind, s in zip(("x", *op.others), seeds, strict=True)
        )
        return x, (_vectors(image[2]), *others)

    pool = window if op.where == "pool" else None
    run = functools.partial(op.run, window=pool)
    per_element = round(nbytes / math.prod(shape))
    case = Case(f"{name} {label(shape)}", make, run, per_element, kernel=op.kernel)
    return Row(name, shape, nbytes, case)


def label(shape) -> str:
    return "x".join(map(str, shape[-3:]))


def variants(row: Row, chosen, target: str) -> list[Variant]:
    """Return how a row is run: by XLA, with which all others are compared, first."""
    found = [XLA]
    for name in chosen:
        if name == "xla" or not row.case.kernel:
            continue
        variant, users = Variant(name, target=target), row.op.startswith("batch_norm")
        if users if name == "default" else _serves(row, variant):
            found.append(variant)
    return found


def _serves(row: Row, variant: Variant) -> bool:
    first, others = jax.eval_shape(lambda: row.case.make(row.n, 0))
    run = functools.partial(row.case.run, implementation=variant.implementation)
    try:
        with mosaic.mode(variant.target, variant.block):
            jax.eval_shape(run, first, *others)
    except NotImplementedError:
        return False
    return True


def check(program, wanted) -> None:
    """Compare a program's results with XLA's, each dtype within its own bound.

    Raises:
        BenchError: if they are too far away.
    """
    found = program.compiled(*program.arguments())
    for dtype, ulps in ULPS.items():
        case = dataclasses.replace(program.case, ulps=ulps)
        some = functools.partial(lambda part, *_: part, _of_dtype(found, dtype))
        part = dataclasses.replace(program, case=case, compiled=some)
        verify(part, _of_dtype(wanted, dtype))


def _of_dtype(tree, dtype):
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype == dtype]


def measure(rows, chosen, target, say):
    """Yield what was measured of each row and implementation, as plain data."""
    limit = memory() or math.inf
    for shape in dict.fromkeys(row.shape for row in rows):
        jobs, mine = [], []
        for row in rows:
            if row.shape != shape:
                continue
            if (need := needed(row.case, row.n)) > limit:
                say(f"{row.case.name}: left out, needs {need / 1e9:.1f} GB of memory")
                continue
            mine.append(row)
            jobs += [(row.case, row.n, v) for v in variants(row, chosen, target)]
        say(f"{label(shape)}, batch {shape[0]}: compiling {len(jobs)} programs")
        built = build_all(jobs)
        for row in mine:
            programs = [p for p in built if p.case is row.case]
            yield from _timed(row, programs, chosen)


def _timed(row: Row, programs, chosen):
    wanted, timed = None, []
    for program in programs:
        name = program.variant.implementation
        if name != "xla":
            wanted = wanted or programs[0].compiled(*programs[0].arguments())
            check(program, wanted)
        if name in chosen or not row.case.kernel:
            timed.append(program)
    wanted = None  # its memory is needed
    for program, samples in zip(timed, time_programs(timed), strict=True):
        yield _figure(row, program.variant.implementation, samples)


def _figure(row: Row, implementation: str, samples):
    seconds = statistics.median(samples)
    return {
        "op": row.op,
        "shape": list(row.shape),
        "networks": networks(row.shape[1:]),
        "implementation": implementation,
        "x_bytes": BYTES * row.n,
        "nbytes": row.nbytes,
        "samples": samples,
        "seconds": seconds,
        "bandwidth": row.nbytes / seconds,
    }


def share(figure, copies) -> float | None:
    """Return a bandwidth over that of the copy of that shape, `None` without one."""
    copy = copies.get(tuple(figure["shape"]))
    return copy and figure["bandwidth"] / copy["bandwidth"]


def copies_of(figures):
    return {tuple(f["shape"]): f for f in figures if f["op"] == "copy"}


def line(figure, copies) -> str:
    """Return one figure as a line."""
    part = share(figure, copies)
    return (
        f"{figure['op']} {label(figure['shape'])} {figure['implementation']}: "
        f"{1e6 * figure['seconds']:.1f} us, {figure['bandwidth'] / 1e9:.1f} GB/s"
        + (f", {part:.0%} of a copy" if part else "")
    )


def lines(record):
    """Yield a Markdown table: one op and shape a line, columns of nothing left out."""
    figures, copies = record["rows"], copies_of(record["rows"])
    found: dict[Any, dict[str, Any]] = {}
    for figure in figures:
        key = figure["op"], tuple(figure["shape"])
        found.setdefault(key, {})[figure["implementation"]] = figure
    titles = {"xla": "xla", "mosaic_gpu": "kernel", "default": "default"}
    shows = {
        "us": lambda f: f"{1e6 * f['seconds']:.1f}",
        "GB/s": lambda f: f"{f['bandwidth'] / 1e9:.1f}",
        "/copy": lambda f: f"{part:.0%}" if (part := share(f, copies)) else "",
    }
    header = ["op", "shape", "of", "x MB", "moved MB"]
    header += [f"{title} {unit}" for unit in shows for title in titles.values()]
    table, order = [header], list(OPS)
    for key in sorted(found, key=lambda k: (order.index(k[0]), math.prod(k[1]), k[1])):
        by = found[key]
        one = next(iter(by.values()))
        cells = [key[0], label(key[1]), ", ".join(one["networks"])]
        cells += [f"{one[size] / 1e6:.1f}" for size in ("x_bytes", "nbytes")]
        for show in shows.values():
            cells += [show(by[name]) if name in by else "" for name in titles]
        table.append(cells)
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    padded = [
        [f" {cell.ljust(w) if column[0] in header[:3] else cell.rjust(w)} "
         for cell in column]
        for column in kept
        for w in [max(map(len, column))]
    ]  # fmt: skip
    for column in padded:
        column.insert(1, "-" * len(column[0]))
    yield from (f"|{'|'.join(cells)}|" for cells in zip(*padded, strict=True))


STYLES = {
    "copy": {"color": "black", "marker": "_", "linestyle": ":", "zorder": 1},
    "flax": {"color": "tab:orange", "marker": "s", "linestyle": "-", "zorder": 2},
    "xla": {"color": "tab:gray", "marker": "o", "linestyle": "-", "zorder": 3},
    "default": {"color": "tab:blue", "marker": "x", "linestyle": "--", "zorder": 5},
    "mosaic_gpu": {"color": "tab:green", "marker": "o", "linestyle": "-", "zorder": 4},
}


def curve(figures, op: str, name: str):
    """Return GB/s by shape, of an op as one of `STYLES` names it."""
    if name == "copy":
        op, name = "copy", "xla"
    elif name == "flax":
        op, name = f"flax.{op}", "xla"
    return {
        tuple(f["shape"]): f["bandwidth"] / 1e9
        for f in figures
        if (f["op"], f["implementation"]) == (op, name)
    }


def plot(record, path) -> None:
    """Draw bandwidth over the shapes, smallest first, one panel an op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures = record["rows"]
    measured = dict.fromkeys(f["op"].removeprefix("flax.") for f in figures)
    names = [op for op in OPS if op in measured and op != "copy"] or ["copy"]
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.1 * rows + 0.8), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    shown: dict[str, Any] = {}
    for axis, op in zip(axes.flat, names, strict=False):
        shown |= _panel(axis, figures, op)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    figure.supylabel("GB/s that must be read and written", fontsize=10)
    figure.suptitle(
        f"{record['device']}, jax {record['jax']}: float16, batch {record['batch']}, "
        "shapes with MB of x",
        fontsize=11,
    )
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown)
    )
    figure.savefig(path, dpi=110)


def _panel(axis, figures, op):
    """Draw an op; return what is drawn by its name in `STYLES`."""
    curves = {name: curve(figures, op, name) for name in STYLES}
    ours = [curve for name, curve in curves.items() if name != "copy" or op == "copy"]
    shapes = sorted(
        {shape for c in ours for shape in c}, key=lambda s: (math.prod(s), s)
    )
    shown = {}
    for name, values in curves.items():
        points = [(i, values[s]) for i, s in enumerate(shapes) if s in values]
        if points and not (op == "copy" and name == "xla"):
            x, y = zip(*points, strict=True)
            (shown[name],) = axis.plot(
                x, y, label=name, markersize=5, linewidth=1, **STYLES[name]
            )
    ticks = [f"{label(s)}  {BYTES * math.prod(s) / 1e6:.4g}" for s in shapes]
    axis.set_xticks(range(len(shapes)), ticks, rotation=50, ha="right", fontsize=7)
    axis.set_xlim(-0.5, len(shapes) - 0.5)
    axis.set_ylim(bottom=0)
    axis.tick_params(axis="y", labelleft=True, labelsize=8)
    axis.set_title(op, fontsize=10)
    axis.grid(alpha=0.25)
    return shown


def chosen_ops(text: str | None) -> list[str]:
    """Return the names that `--ops` asks for, after the copy.

    Raises:
        ValueError: for a name that is none.
    """
    words = list(OPS) if text is None else [word.strip() for word in text.split(",")]
    for word in words:
        if not any(word in (name, name.partition("/")[0]) for name in OPS):
            raise ValueError(f"--ops knows no {word!r}: use {', '.join(OPS)}")
    wanted = {"copy", *words}
    return [name for name in OPS if wanted & {name, name.partition("/")[0]}]


def chosen_shapes(text: str | None) -> list[tuple[int, int, int]]:
    """Return the shapes that `--shapes` asks for, all by default, smallest first.

    Raises:
        ValueError: for one that is none.
    """
    known = {shape for shapes in NETWORKS.values() for shape in shapes}
    words = map(label, known) if text is None else text.split(",")
    found = set()
    for word in words:
        try:
            height, width, channels = map(int, word.split("x"))
        except ValueError:
            height = width = channels = 0
        if min(height, width) < 2 or channels < 1:
            raise ValueError(f"--shapes takes such as 56x56x256, got {word!r}")
        found.add((height, width, channels))
    return sorted(found, key=lambda shape: (math.prod(shape), shape))


def chosen_implementations(text: str) -> list[str]:
    """Return the implementations asked for, XLA first.

    Raises:
        ValueError: for one that is none.
    """
    words = {word.strip() for word in text.split(",")}
    if not words <= set(IMPLEMENTATIONS):
        raise ValueError(f"--implementations are {IMPLEMENTATIONS}, got {text!r}")
    return [name for name in IMPLEMENTATIONS if name in words]


def run(batch, shapes, names, chosen, path=None, target="device", say=print):
    """Measure, say every figure as it comes, then the table; return the record."""
    with mosaic.mode(target):
        missing = mosaic.why_not()
    if missing and chosen != ["xla"]:
        chosen = ["xla"]
        say(f"only xla is measured: {missing}")
    rows = [
        make_row(name, batch, shape)
        for shape in shapes
        for name in names
        if has(shape, OPS[name].where)
    ]
    device = jax.devices()[0].device_kind
    record = {"device": device, "jax": jax.__version__, "batch": batch, "rows": []}
    say(f"{device}, jax {jax.__version__}, float16, batch {batch}")
    try:
        for figure in measure(rows, chosen, target, say):
            record["rows"].append(figure)
            say(line(figure, copies_of(record["rows"])))
            if path is not None:  # now, in case there is no later
                pathlib.Path(path).write_text(json.dumps(record, indent=1) + "\n")
    finally:
        say("\n".join(["", *lines(record)]))
    return record


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shapes", help="such as 56x56x256, with commas")
    parser.add_argument("--ops", help="such as apply or apply/pool, with commas")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--json", help="keep all samples here")
    parser.add_argument("--read", help="measure nothing, take samples kept before")
    parser.add_argument("--plot", help="draw the bandwidths here (PNG)")
    args = parser.parse_args()
    try:
        shapes, names = chosen_shapes(args.shapes), chosen_ops(args.ops)
        chosen = chosen_implementations(args.implementations)
    except ValueError as error:
        parser.error(str(error))
    if args.read:
        record = json.loads(pathlib.Path(args.read).read_text())
        print("\n".join(lines(record)))
    else:
        say = functools.partial(print, flush=True)
        try:
            record = run(args.batch, shapes, names, chosen, args.json, say=say)
        except (BenchError, jax.errors.JaxRuntimeError) as error:
            raise SystemExit(str(error).partition("\n")[0]) from error
    if args.plot:
        plot(record, args.plot)


if __name__ == "__main__":
    main()
