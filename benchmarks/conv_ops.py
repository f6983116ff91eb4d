"""Every convolution of ResNet-50 and VGG16-BN, forward and backward, way by way.

The layers are read from the networks themselves. Float16, channel last, float32
accumulation. Ways: `conv` is XLA's convolution, as the networks use it; `dot` a product
of all pixels with a matrix, for kernels of one pixel; `patches` a product as well, of
what each window sees, for the three channels of an image. Of each: the result
(`forward`), the gradient of the input (`input`, not of images) and that of the kernel
(`kernel`); what a backward pass has to form again counts as its time.

A time is the median of samples that take turns (`rjax/bench/measure.py`), after results
were compared with those of `conv`. Beside it: TFLOP/s as the share of a product of
8192 x 8192 matrices, and the bytes of operands and result, each once, as the share of a
copy; a layer near neither leaves something to win. The end sums each network up.

    PYTHONPATH=. python benchmarks/conv_ops.py [--model resnet50,vgg16bn] [--batch 256]
        [--image 224] [--ways conv,dot,patches] [--json FILE]
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

import rjax
from rjax.bench.cases import Case
from rjax.bench.measure import BenchError, time_programs
from rjax.bench.programs import XLA, Program, build_all

MODELS = {"resnet50": rjax.nn.ResNet50, "vgg16bn": rjax.nn.VGG16BN}
WAYS, PASSES = ("conv", "dot", "patches"), ("forward", "input", "kernel")
DTYPE, BYTES = jnp.float16, 2
DIMENSIONS = ("NHWC", "HWIO", "NHWC")
# Of the largest value; float16 is rounded once, sums have an order of their own.
BOUND = 4 * float(jnp.finfo(DTYPE).eps)
CEILING, COPIED = 8192, 1 << 28


@dataclasses.dataclass(frozen=True, order=True)
class Layer:
    """A convolution.

    Attributes:
        x: shape of the input, `(batch, height, width, channels)`.
        kernel: shape of the kernel, `(height, width, inputs, features)`.
        strides: along height and width.
        padding: (low, high) along each.
    """

    x: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], ...]

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return jax.eval_shape(self.convolve, *map(_like, (self.x, self.kernel))).shape

    @property
    def flops(self) -> int:
        """Of one pass: two for every product."""
        return 2 * math.prod(self.result) * math.prod(self.kernel[:3])

    @property
    def nbytes(self) -> int:
        """Of kernel, result and what of the input is met."""
        met = math.prod(self.x)
        if self.kernel[:2] == (1, 1):  # strides leave pixels out
            met = math.prod(self.result[:3]) * self.x[3]
        return BYTES * (met + math.prod(self.kernel) + math.prod(self.result))

    def __str__(self) -> str:
        height, width, inputs, features = self.kernel
        rows, columns = self.x[1:3]
        stride = f"/{self.strides[0]}" if self.strides[0] > 1 else ""
        return f"{height}x{width}{stride} {inputs}-{features} at {rows}x{columns}"

    def convolve(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return the convolution by XLA's operation of that name."""
        return lax.conv_general_dilated(
            x, kernel, self.strides, self.padding, dimension_numbers=DIMENSIONS
        )

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return it as a product of the pixels that are met with a matrix."""
        pixels = x[:, :: self.strides[0], :: self.strides[1]]
        return _product(pixels, kernel[0, 0])

    def gather(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Return it as a product of what each window sees with a matrix."""
        height, width, inputs, features = kernel.shape
        rows, columns = self.result[1:3]
        x = jnp.pad(x, ((0, 0), *self.padding, (0, 0)))
        seen = [
            x[:, i : i + (rows - 1) * self.strides[0] + 1 : self.strides[0],
              j : j + (columns - 1) * self.strides[1] + 1 : self.strides[1]]
            for i in range(height) for j in range(width)
        ]  # fmt: skip
        depth = height * width * inputs
        blank = -depth % 16  # or no tensor core multiplies them
        seen.append(jnp.zeros((*seen[0].shape[:3], blank), x.dtype))
        matrix = jnp.pad(kernel.reshape(depth, features), ((0, blank), (0, 0)))
        return _product(lax.optimization_barrier(jnp.concatenate(seen, -1)), matrix)


def _product(pixels: jax.Array, matrix: jax.Array) -> jax.Array:
    rows = pixels.reshape(-1, pixels.shape[-1])
    found = lax.dot(rows, matrix, preferred_element_type=jnp.float32)
    return found.astype(pixels.dtype).reshape(*pixels.shape[:3], -1)


def _like(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, DTYPE)


def layers(model: str, batch: int, image: int) -> collections.Counter[Layer]:
    """Return the convolutions of a network, and how often it has each."""
    module, x = MODELS[model](1000), _like((batch, image, image, 3))
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: _like(leaf.shape), variables)
    run = functools.partial(module.apply, mutable=["batch_stats"])
    rngs = {"dropout": jax.random.key(0)}
    found = jax.make_jaxpr(lambda v, x: run(v, x, train=True, rngs=rngs))(variables, x)
    return collections.Counter(_convolutions(found.jaxpr))


def _convolutions(jaxpr: Any) -> Iterator[Layer]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            shapes = (atom.aval.shape for atom in eqn.invars)
            params = eqn.params
            yield Layer(*shapes, params["window_strides"], params["padding"])
        for value in eqn.params.values():
            body = getattr(value, "jaxpr", value)
            if isinstance(body, jex_core.Jaxpr):
                yield from _convolutions(body)


def ways_of(layer: Layer) -> dict[str, Any]:
    """Return the functions that compute a layer, by their names."""
    found: dict[str, Any] = {"conv": layer.convolve}
    if layer.kernel[:2] == (1, 1):
        found["dot"] = layer.multiply
    if layer.kernel[2] < 8:
        found["patches"] = layer.gather
    return found


def case_of(layer: Layer, way: str, which: str) -> Case:
    """Return a pass of a layer as it is measured."""
    convolve = ways_of(layer)[way]

    def make(n: int, seed: int) -> Any:
        del n
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = layer.x, layer.kernel, layer.result
        scale = 1 / math.sqrt(math.prod(layer.kernel[:3]))
        x, kernel, dz = map(_normal, keys, shapes)
        return x, (kernel * DTYPE(scale), dz)

    def run(x: Any, kernel: Any, dz: Any, implementation: str | None = None) -> Any:
        del implementation
        if which == "forward":
            return convolve(x, kernel)
        if which == "input":
            return jax.vjp(lambda x: convolve(x, kernel), x)[1](dz)[0]
        return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](dz)[0]

    n = math.prod(layer.x)
    return Case(f"{layer} {which}", make, run, layer.nbytes / n, kernel=False)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, DTYPE)


def measure(layer: Layer, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what was measured of each pass of a layer, the ways by turns."""
    known = [way for way in ways_of(layer) if way in names or way == "conv"]
    for which in PASSES:
        if which == "input" and layer.kernel[2] == 3:
            continue  # nobody asks for the gradient of images
        cases = [case_of(layer, way, which) for way in known]
        programs = build_all([(case, math.prod(layer.x), XLA) for case in cases])
        check(programs)
        for way, samples in zip(known, time_programs(programs), strict=True):
            yield {
                "layer": str(layer), "pass": which, "way": way, "samples": samples,
                "seconds": statistics.median(samples),
                "flops": layer.flops, "nbytes": layer.nbytes,
            }  # fmt: skip


def check(programs: list[Program]) -> None:
    """Compare all ways with the first.

    Raises:
        BenchError: if one is too far from it.
    """
    if len(programs) == 1:
        return
    wanted, *others = (
        program.compiled(*program.arguments())[0] for program in programs
    )
    for program, found in zip(programs[1:], others, strict=True):
        gap = jnp.abs(found.astype(jnp.float32) - wanted.astype(jnp.float32)).max()
        if not gap <= BOUND * jnp.abs(wanted).max():
            raise BenchError(f"{program.case.name}: the ways differ by {float(gap):g}")


def ceilings() -> tuple[float, float]:
    """Return FLOP/s of a large product, and bytes a second of a large copy."""

    def square(n: int, seed: int) -> Any:
        a = _normal(jax.random.key(seed), (CEILING, CEILING))
        return a, (a,)

    def line(n: int, seed: int) -> Any:
        return jnp.full(COPIED // 4, seed, jnp.float32), ()

    product = Case("product", square, lambda a, b, implementation: a @ b, 0)
    copy = Case("copy", line, lambda x, implementation: x + 1, 8)
    jobs = [(product, CEILING**2, XLA), (copy, COPIED // 4, XLA)]
    found = map(statistics.median, time_programs(build_all(jobs)))
    seconds, copied = found
    return 2 * CEILING**3 / seconds, 2 * COPIED / copied


def line_of(row: dict[str, Any], flops: float, bandwidth: float) -> str:
    """Return one measurement as a line."""
    seconds = row["seconds"]
    return (
        f"{row['layer']:28} {row['pass']:8}{row['way']:8}{1e6 * seconds:9.1f} us "
        f"{row['flops'] / seconds / flops:5.0%} of the product "
        f"{row['nbytes'] / seconds / bandwidth:5.0%} of a copy"
    )


def summary(rows: list[dict[str, Any]], counts: dict[str, int]) -> Iterator[str]:
    """Yield a network's milliseconds by pass: as it is, and by the best ways."""
    for which in PASSES:
        plain = best = 0.0
        for name, count in counts.items():
            mine = [r for r in rows if r["layer"] == name and r["pass"] == which]
            if mine:
                plain += count * next(r["seconds"] for r in mine if r["way"] == "conv")
                best += count * min(r["seconds"] for r in mine)
        yield f"  {which:8}{1e3 * plain:8.2f} ms by conv, {1e3 * best:.2f} by the best"


def main(argv: list[str] | None = None) -> None:
    """Measure all layers of the networks asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="resnet50,vgg16bn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", help="keep all samples here")
    args = parser.parse_args(argv)
    models, names = args.model.split(","), args.ways.split(",")
    for option, words, known in (("model", models, MODELS), ("ways", names, WAYS)):
        if unknown := [word for word in words if word not in known]:
            parser.error(f"--{option} knows no {unknown[0]!r}: use {', '.join(known)}")
    if min(args.batch, args.image) < 1:
        parser.error("--batch and --image must be at least 1")
    counts = {model: layers(model, args.batch, args.image) for model in models}
    device = jax.devices()[0].device_kind
    flops, bandwidth = ceilings()
    print(f"{device}, jax {jax.__version__}, float16, batch {args.batch}")
    print(
        f"ceilings {flops / 1e12:.0f} TFLOP/s, {bandwidth / 1e9:.0f} GB/s", flush=True
    )
    rows: list[dict[str, Any]] = []
    record = {"device": device, "jax": jax.__version__, "batch": args.batch}
    record |= {"flops": flops, "bandwidth": bandwidth, "rows": rows}
    for layer in sorted(set().union(*counts.values())):
        for row in measure(layer, names):
            rows.append(row)
            print(line_of(row, flops, bandwidth), flush=True)
            if args.json:  # now, in case there is no later
                pathlib.Path(args.json).write_text(json.dumps(record) + "\n")
    for model, found in counts.items():
        print(model)
        named = {str(layer): count for layer, count in found.items()}
        print("\n".join(summary(rows, named)))


if __name__ == "__main__":
    main()
