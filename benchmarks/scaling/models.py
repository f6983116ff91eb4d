"""Shapes of models, as rjax lays them out; nothing is computed."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.parallel import bytes_per_device

# Layers whose arenas stay below the 2^31 - 1 elements that one can have.
GROUP = 8
HALF = 2


@dataclasses.dataclass(frozen=True)
class Model:
    """What a step of one model moves, and how long one device takes for it.

    Attributes:
        name: of the model.
        plans: of its parameters; several where one arena could not hold them.
        optimizer: in words.
        norms: batch norms that look at the whole batch.
        step_ms: of one device at this batch.
        source: where that is from.
        window_ms: from the last gradient of the deep bucket to the end of the backward
            pass: what its reduction can hide behind.
        batch: in words.
    """

    name: str
    plans: tuple[rjax.Plan, ...]
    optimizer: str
    norms: int
    step_ms: float
    source: str
    window_ms: float
    batch: str

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(slot.size for plan in self.plans for slot in plan.slots)

    @property
    def deep_bytes(self) -> int:
        """Bytes of bucket 1, `G_DEEP_CONV` in float32."""
        deep = rjax.Region.G_DEEP_CONV
        bounds = [plan.bounds(deep, deep) for plan in self.plans]
        return sum(4 * (stop - start) for start, stop in bounds)

    @property
    def grad_bytes(self) -> int:
        """Bytes of all gradients in float32."""
        return sum(4 * plan.n for plan in self.plans)

    @property
    def half_bytes(self) -> int:
        """Bytes of the half copy."""
        return sum(HALF * (plan.n - plan.bias_like) for plan in self.plans)

    def state_bytes(self, devices: int, shard: bool) -> int:
        """Return the bytes of the state that each device holds."""
        found = 0
        for plan in self.plans:
            shapes = jax.eval_shape(lambda p=plan: _state(p))
            found += sum(
                bytes_per_device(plan, shapes, devices, shard_optimizer=shard).values()
            )
        return found


def _state(plan: rjax.Plan) -> rjax.RegionState:
    params: dict[str, Any] = {}
    for slot in plan.slots:
        *modules, name = slot.path.split("/")
        inner = params
        for module in modules:
            inner = inner.setdefault(module, {})
        inner[name] = jnp.zeros(slot.shape)
    return rjax.init_state(plan, params)


# Bytes a second of a copy on an H200, and passes over what the first layer returns
# from the deep bucket's last gradient on: two to reduce and three to apply the norm's
# backward pass, one for the kernel's gradient.
COPY, PASSES = 4.2e12, 6


def convolutional(name: str, module: Any, step_ms: float, first: tuple) -> Model:
    """Return ResNet-50 or VGG16-BN, whose steps were measured at batch 256.

    Args:
        name: of the model.
        module: of Linen.
        step_ms: measured.
        first: shape of what the first layer returns, for one image.
    """
    x = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    config = rjax.Config(optimizer=rjax.optim.nesterov())
    params = shapes["params"]
    plan = rjax.make_plan(params, config)
    nbytes = 256 * HALF
    for size in first:
        nbytes *= size
    return Model(
        name,
        (plan,),
        "Nesterov",
        sum(path.path.endswith("/scale") for path in plan.slots),
        step_ms,
        "measured on an H200",
        1e3 * PASSES * nbytes / COPY,
        "256 images",
    )


# FLOP/s of float16 products on an H200 (712e12 measured), and the share of them that a
# step of a dense model is taken to reach: assumed.
PRODUCTS, SHARE, TOKENS = 712e12, 0.45, 8192


def dense(name: str, width: int, hidden: int, layers: int, vocabulary: int) -> Model:
    """Return a decoder of gated feed-forward layers, its step by arithmetic alone."""
    config = rjax.Config(optimizer=rjax.optim.adamw())
    groups = _groups(width, hidden, layers, vocabulary)
    plans = tuple(rjax.make_plan(params, config) for params in groups)
    count = sum(slot.size for plan in plans for slot in plan.slots)
    seconds = 6 * count * TOKENS / (PRODUCTS * SHARE)
    return Model(
        name,
        plans,
        "AdamW",
        0,
        1e3 * seconds,
        f"6 FLOP a parameter and token at {SHARE:.0%} of {PRODUCTS / 1e12:.0f} TFLOP/s,"
        " assumed",
        0.0,
        f"{TOKENS} tokens",
    )


def _groups(
    width: int, hidden: int, layers: int, vocabulary: int
) -> Iterator[dict[str, Any]]:
    """Yield trees of shapes, each for an arena of its own."""

    def kernel(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    attention = {name: {"kernel": kernel(width, width)} for name in "qkvo"}
    wide = {name: {"kernel": kernel(width, hidden)} for name in ("gate", "up")}
    layer = {
        **attention,
        **wide,
        "down": {"kernel": kernel(hidden, width)},
        "norm1": {"scale": kernel(width)},
        "norm2": {"scale": kernel(width)},
    }
    for first in range(0, layers, GROUP):
        yield {f"layer{i}": layer for i in range(first, min(first + GROUP, layers))}
    yield {
        "embedding": {"kernel": kernel(vocabulary, width)},
        "head": {"kernel": kernel(width, vocabulary)},
        "norm": {"scale": kernel(width)},
    }


def all_models() -> list[Model]:
    """Return the models of the plan, the smallest first."""
    return [
        convolutional("ResNet-50", rjax.nn.ResNet50(1000), 30.7, (112, 112, 64)),
        convolutional("VGG16-BN", rjax.nn.VGG16BN(1000), 53.8, (224, 224, 64)),
        dense("dense 1.3 B", 2048, 5504, 24, 32000),
        dense("dense 6.7 B", 4096, 11008, 32, 32000),
    ]
