"""The ops that are measured, by their names in tables of measurements.

Their arrays are drawn anew for every set of arguments, so that no two ops of one
program read the same memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax import ops
from rjax.ops.batch_norm.training import run_pass
from rjax.ops.digest.base import mix
from rjax.ops.max_pool import Window
from rjax.ops.pointwise_batch_norm.training import back, mask, moments, pull
from rjax.ops.slots import ROW, SlotTable
from rjax.ops.update import AdamRule, Arenas, LarsRule, Rule, SgdRule

_DECAY = 0.999
_SLOTS = 64
_CHANNELS = (64, 256)
_INNER = (64, 128, 256, 512)
_RULES: dict[str, Rule] = {
    "sgd": SgdRule(),
    "momentum": SgdRule(momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": AdamRule(weight_decay=0.01, decay="decoupled"),
    "lars": LarsRule(weight_decay=1e-4),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One op as it is measured.

    Attributes:
        name: as in tables of measurements.
        make: from n and a seed to (first, others): the argument that may be donated,
            and the tuple of all that are only read.
        run: of these arguments and `implementation`; gives the op's result, which
            takes the place of `first` where that is donated.
        nbytes: read and written per element.
        donated: whether the op moves its first argument in place.
        kernel: whether there is a kernel; the copy has none.
        ulps: how far results of two implementations may lie apart, in units of the
            last place of the largest value.
        least: elements below which it is not measured.
        blocks: of its kernel, where only some can be.
    """

    name: str
    make: Callable[[int, int], tuple[Any, tuple[Any, ...]]]
    run: Callable[..., Any]
    nbytes: float
    donated: bool = False
    kernel: bool = True
    ulps: int = 0
    least: int = 0
    blocks: tuple[int, ...] | None = None


@functools.partial(jax.jit, static_argnums=0)
def _uniform(n: int, seed: jax.Array) -> jax.Array:
    bits, _ = mix(seed, lax.iota(jnp.uint32, n))
    return bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-30


def draw(n: int, seed: int) -> jax.Array:
    """Return float32[n] in [-2, 2): a hash of the index, not for statistics."""
    return _uniform(n, jnp.uint32(seed * 0x85EBCA6B % 2**32))


def slot_table(n: int) -> SlotTable:
    """Return eight slots that tile n elements, fewer where there are fewer rows.

    The first, 1/64 of the rows and at least one, is bias-like: it has no decay, no
    trust ratio and no half-precision copy. The others have all three.
    """
    rows = n // ROW
    first = min(max(1, rows // 64), rows - 1)
    others = min(7, rows - first)
    cuts = [(rows - first) * i // others for i in range(others + 1)]
    sizes = [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
    marks = (False,) + (True,) * others
    return SlotTable((first, *sizes), decay=marks, adaptive=marks)


def _one(dtype: Any) -> Callable[[int, int], tuple[Any, tuple[Any, ...]]]:
    return lambda n, seed: (draw(n, seed).astype(dtype), ())


def _copy(x: jax.Array, *, implementation: str | None) -> jax.Array:
    del implementation
    return x + 1


def _cast(dtype: Any) -> Callable[..., Any]:
    return lambda x, implementation: ops.cast(x, dtype, implementation=implementation)


def _ema_arrays(n: int, seed: int) -> tuple[Any, tuple[Any, ...]]:
    return draw(n, 2 * seed), (draw(n, 2 * seed + 1),)


def _ema(average: jax.Array, value: jax.Array, implementation: str | None) -> Any:
    return ops.ema(average, value, _DECAY, implementation=implementation)


def _scaled(n: int, seed: int) -> tuple[Any, tuple[Any, ...]]:
    return draw(n, seed), (jnp.float32(8192.0),)


def _digest_slots(x: jax.Array, implementation: str | None) -> Any:
    """Digest equal slots of whole rows, the last element of each being padding."""
    slots = min(_SLOTS, x.size // ROW)
    size = x.size // slots // ROW * ROW
    table = [(i * size, size - 1) for i in range(slots)]
    return ops.digest_slots(x, table, implementation=implementation)


def _fused(family: str, average: bool) -> Case:
    """Return the case of an optimizer with fp16 copies, `average` with an EMA."""
    rule = _RULES[family]

    def make(n: int, seed: int) -> tuple[Any, tuple[Any, ...]]:
        half = lambda x: x[slot_table(n).rows[0] * ROW :].astype(jnp.float16)  # noqa: E731
        arrays = [draw(n, 5 * seed + i) for i in range(3 + average)]
        master, grads, mu = arrays[:3]
        arenas = Arenas(
            master,
            compute=half(master),
            mu=mu if rule.has_mu else None,
            nu=jnp.square(draw(n, 5 * seed + 4)) if rule.has_nu else None,
            ema=arrays[3] if average else None,
            ema_compute=half(arrays[3]) if average else None,
        )
        scalars = jnp.float32(8192.0), jnp.float32(1e-3), jnp.int32(100)
        return arenas, (grads, jnp.zeros((), jnp.bool_), *scalars)

    def run(arenas, grads, skip, scale, learning_rate, count, implementation):
        return ops.fused_update(
            rule,
            arenas,
            grads,
            scale=scale,
            learning_rate=learning_rate,
            count=count,
            table=slot_table(grads.size),
            skip=skip,
            ema_decay=_DECAY if average else None,
            implementation=implementation,
        )

    moved = 1 + rule.has_mu + rule.has_nu + average
    copies = 1 + average
    norms = 8 if rule.has_ratios else 0  # of gradients and masters, before the step
    nbytes = 4 + 8 * moved + 2 * copies + norms
    name = f"fused_update/{family}" + ("+ema" if average else "")
    return Case(name, make, run, nbytes, donated=True, ulps=4)


def _norm(channels: int, name: str, nbytes: float, ulps: int, ride: str = "") -> Case:
    """Return the case of a pass over float16 images, with a ReLU.

    Vectors are powers of two, so that implementations agree about what is clamped.
    """
    vectors = [np.full(channels, v, np.float32) for v in (0.5, 0.5, 0.25, 0.125, 0.25)]
    window = _WINDOWS.get(ride)
    count = {"statistics": 0, "apply": 3, "reduce": 3, "gradient": 5}[name]
    options: dict[str, Any] = {}
    if name != "statistics":
        options = {"relu": True, "window": window}

    def make(n: int, seed: int) -> tuple[Any, tuple[Any, ...]]:
        shape = _images(n, channels)

        def image(i: int) -> jax.Array:
            # About 1: sums that nearly vanish would show the order of their terms.
            values = draw(n, 3 * seed + i) + 1.0
            return values.astype(jnp.float16).reshape(shape)

        gradient = image(1) if window is None else image(1)[:, ::2, ::2]
        read = {"reduce": [(gradient,)], "gradient": [gradient]}.get(name, [])
        return image(0), (*read, *([image(2)] if ride == "residual" else []))

    def run(x, *read, implementation):
        last = (None,) if name in ("apply", "reduce") else ()
        if ride == "residual":
            read, last = read[:-1], read[-1:]
        arrays = (*read, *vectors[:count], *last)
        return run_pass(name, x, *arrays, implementation=implementation, **options)

    full = f"batch_norm/{name}" + (f"+{ride}" if ride else "") + f"/{channels}"
    # Two windows side by side, and two rows of images.
    least = max(channels, 128) * (16 if window else 1)
    blocks = (512, 1024)
    return Case(full, make, run, nbytes, ulps=ulps, least=least, blocks=blocks)


def _masked(uses: int) -> Case:
    """Return the case of the masked sum of that many float16 gradients."""

    def make(n: int, seed: int) -> tuple[Any, tuple[Any, ...]]:
        read = [draw(n, 3 * seed + i).astype(jnp.float16) for i in range(uses + 1)]
        y, *dys = (values.reshape(-1, 256) for values in read)
        # About 1, for the same reason as above.
        return y, tuple(dy + jnp.float16(1.0) for dy in dys)

    def run(y, *dys, implementation):
        return mask(dys, y, implementation)

    nbytes, name = 2 * (uses + 2), f"pointwise_batch_norm/mask/{uses}"
    blocks = (512, 1024)
    return Case(name, make, run, nbytes, ulps=64, least=256, blocks=blocks)


def _halves(seed: int, *shapes: tuple[int, int]) -> list[jax.Array]:
    """Return float16 arrays of values about 1, of these shapes."""
    drawn = (draw(a * b, 8 * seed + i) for i, (a, b) in enumerate(shapes))
    return [
        (values + 1.0).astype(jnp.float16).reshape(shape)
        for values, shape in zip(drawn, shapes, strict=True)
    ]


def _products(name: str, channels: int) -> Case:
    """Return the case of a product within ResNet's blocks of that many channels.

    `pull` counts the elements of an array of four times as many channels, the others
    those of the narrow one.
    """
    wide = 4 * channels
    counted = wide if name == "pull" else channels
    product: Any = {"moments": moments, "back": back, "pull": pull}[name]

    def run(*arrays, implementation):
        found = product(*arrays, implementation=implementation)
        if name == "pull":
            found = found[0] * (counted / found[1].size), found[1]
        # Accumulated in float32, but of factors in half precision.
        return jax.tree.map(lambda x: x.astype(jnp.float16), found)

    def make(n: int, seed: int) -> tuple[Any, tuple[Any, ...]]:
        narrow, broad = (n // counted, channels), (n // counted, wide)
        if name == "moments":
            return _halves(seed, narrow)[0], ()
        if name == "pull":
            dy, *read, y = _halves(seed, broad, narrow, (wide, channels), broad)
            return dy, (*read, y - jnp.float16(1.0))
        square = channels, channels
        dz, *read = _halves(seed, broad, (channels, wide), narrow, square)
        unit, bias = jnp.float32(2.0**-9), jnp.ones((channels,), jnp.float32)
        return dz, (*read, unit, bias)

    nbytes = {"moments": 2.0, "back": 12.0, "pull": 6.5}[name]
    full, least = f"pointwise_batch_norm/{name}/{counted}", 64 * counted
    return Case(full, make, run, nbytes, ulps=4, least=least, blocks=(64, 128))


def _images(n: int, channels: int) -> tuple[int, int, int, int]:
    """Return the shape of n elements as images, up to 64 pixels wide."""
    pixels = n // channels
    width = min(64, max(1, pixels // 2))
    height = min(width, pixels // width)
    return pixels // (width * height), height, width, channels


_WINDOWS = {"pool": Window(2), "overlap": Window(3, 2, ((1, 1), (1, 1)))}
_PASSES: tuple[tuple[str, float, int, str], ...] = (
    ("statistics", 2, 64, ""),
    ("apply", 4, 2, ""),
    ("apply", 6, 2, "residual"),
    ("apply", 2.5, 2, "pool"),
    ("reduce", 4, 64, ""),
    ("reduce", 8, 64, "residual"),
    ("reduce", 2.5, 64, "pool"),
    ("gradient", 6, 2, ""),
    ("gradient", 4.5, 2, "pool"),
    ("gradient", 4.5, 2, "overlap"),
)
_ALL = (
    Case("copy", _one(jnp.float32), _copy, 8, kernel=False),
    Case("cast/32-16", _one(jnp.float32), _cast(jnp.float16), 6),
    Case("cast/16-32", _one(jnp.float16), _cast(jnp.float32), 6),
    Case("ema", _ema_arrays, _ema, 12, donated=True, ulps=2),
    Case("check_finite", _scaled, ops.check_finite, 4, ulps=64),
    Case("digest/32", _one(jnp.float32), ops.digest, 4),
    Case("digest/16", _one(jnp.float16), ops.digest, 2),
    Case("digest_slots/32", _one(jnp.float32), _digest_slots, 4),
    Case("digest_slots/16", _one(jnp.float16), _digest_slots, 2),
    *(_fused(family, average) for family in _RULES for average in (False, True)),
    *(_norm(channels, *row) for channels in _CHANNELS for row in _PASSES),
    *map(_masked, (1, 2)),
    *(_products(name, c) for name in ("moments", "back", "pull") for c in _INNER),
)
CASES = {case.name: case for case in _ALL}
