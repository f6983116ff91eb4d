"""Stock Flax Linen and Optax: the modules of rjax by `nn.Conv` and `nn.BatchNorm`.

Modules and parameters have the names that they have in rjax, so that one's weights are
the other's. Nothing here is rjax's but the average to 7x7 of VGG, which does nothing to
images of 224x224. Half precision is `dtype=`, parameters are float32, and the loss
scale is Flax's `DynamicScale`, told never to grow.
"""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from rjax.nn.vgg import POOLED, STAGES, adaptive_mean
from throughput.on_jax import DTYPES, count, init
from throughput.settings import (
    EMA,
    MOMENTUM,
    SCALE,
    SMOOTHING,
    WEIGHT_DECAY,
    Settings,
)

_kaiming = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_head = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
_normal = nn.initializers.normal(0.01)


def _conv(features: int, kernel: int, strides: int, dtype: Any, name: str) -> nn.Conv:
    around = [(kernel // 2, kernel // 2)] * 2
    return nn.Conv(
        features,
        (kernel, kernel),
        (strides, strides),
        padding=around,
        use_bias=False,
        dtype=dtype,
        kernel_init=_kaiming,
        name=name,
    )


def _norm(train: bool, dtype: Any, name: str) -> nn.BatchNorm:
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        name=name,
    )


class ConvBNReLU(nn.Module):
    """A convolution, a batch norm, a ReLU."""

    features: int
    kernel: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = _conv(self.features, self.kernel, self.strides, self.dtype, "conv")(x)
        return nn.relu(_norm(train, self.dtype, "bn")(x))


class Block(nn.Module):
    """A residual block: 1x1, 3x3, 1x1 if it is a bottleneck, else 3x3, 3x3."""

    features: int
    strides: int
    bottleneck: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        n, strides, dtype = self.features, self.strides, self.dtype
        if self.bottleneck:
            y = ConvBNReLU(n, 1, 1, dtype, name="cbr1")(x, train)
            y = ConvBNReLU(n, 3, strides, dtype, name="cbr2")(y, train)
            last, n, kernel = 3, 4 * n, 1
        else:
            y = ConvBNReLU(n, 3, strides, dtype, name="cbr1")(x, train)
            last, kernel = 2, 3
        y = _conv(n, kernel, 1, dtype, f"conv{last}")(y)
        y = _norm(train, dtype, f"bn{last}")(y)
        if x.shape != y.shape:
            x = _conv(n, 1, strides, dtype, "shortcut_conv")(x)
            x = _norm(train, dtype, "shortcut_bn")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50 v1.5, or ResNet-20 where it has no bottlenecks."""

    num_classes: int
    dtype: Any
    blocks: Sequence[int] = (3, 4, 6, 3)
    width: int = 64
    bottleneck: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        large, dtype = self.bottleneck, self.dtype
        kernel, strides = (7, 2) if large else (3, 1)
        x = ConvBNReLU(self.width, kernel, strides, dtype, name="stem")(x, train)
        if large:
            around: Any = [(1, 1), (1, 1)]
            x = nn.max_pool(x, (3, 3), (2, 2), around)
        for stage, depth in enumerate(self.blocks):
            for i in range(depth):
                strides = 2 if stage > 0 and i == 0 else 1
                name = f"stage{stage + 1}_block{i + 1}"
                block = Block(self.width * 2**stage, strides, large, dtype, name=name)
                x = block(x, train)
        x = x.mean((1, 2))
        how = {"dtype": dtype, "kernel_init": _head}
        return nn.Dense(self.num_classes, name="head", **how)(x)


class VGG16BN(nn.Module):
    """VGG-16 with batch norm, its convolutions without a bias."""

    num_classes: int
    dtype: Any
    width: int = 64
    hidden: int = 4096

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        how = {"dtype": self.dtype, "kernel_init": _normal}
        for stage, (depth, widening) in enumerate(STAGES, start=1):
            for i in range(1, depth + 1):
                name, n = f"stage{stage}_cbr{i}", widening * self.width
                x = ConvBNReLU(n, 3, 1, self.dtype, name=name)(x, train)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = adaptive_mean(x, POOLED)
        x = x.reshape(x.shape[0], -1)
        for i in (1, 2):
            x = nn.relu(nn.Dense(self.hidden, name=f"hidden{i}", **how)(x))
            x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes, name="head", **how)(x)


def make_model(settings: Settings) -> nn.Module:
    """Return the module of that name, as large as rjax's."""
    classes, dtype = settings.classes, DTYPES[settings.precision]
    if settings.model == "vgg16bn":
        return VGG16BN(classes, dtype)
    if settings.model == "resnet50":
        return ResNet(classes, dtype)
    return ResNet(classes, dtype, (3, 3, 3), 16, bottleneck=False)


class State(TrainState):
    """A train state with statistics, average, loss scale and the key of dropout."""

    batch_stats: Any
    ema: Any
    dynamic_scale: DynamicScale | None
    key: jax.Array


def train_step(state: State, batch: Any) -> tuple[State, jax.Array]:
    """Train on one batch; a step that is not finite moves nothing but the scale."""
    images, labels = batch

    def loss_fn(params: Any) -> Any:
        logits, moved = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.fold_in(state.key, state.step)},
        )
        logits = logits.astype(jnp.float32)
        targets = jax.nn.one_hot(labels, logits.shape[-1])
        targets = optax.smooth_labels(targets, SMOOTHING)
        return optax.softmax_cross_entropy(logits, targets).mean(), moved["batch_stats"]

    scale, finite = state.dynamic_scale, None
    if scale is None:
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    else:
        found = scale.value_and_grad(loss_fn, has_aux=True)(state.params)
        scale, finite, (loss, stats), grads = found
    with jax.named_scope("update"):
        return _moved(state, grads, stats, scale, finite), loss


def _moved(state: State, grads: Any, stats: Any, scale: Any, finite: Any) -> State:
    new = state.apply_gradients(grads=grads, batch_stats=stats, dynamic_scale=scale)
    if state.ema is not None:
        new = new.replace(ema=optax.incremental_update(new.params, state.ema, 1 - EMA))
    if finite is None:
        return new
    keep = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
    return new.replace(
        params=keep(new.params, state.params),
        opt_state=keep(new.opt_state, state.opt_state),
        batch_stats=keep(new.batch_stats, state.batch_stats),
        ema=keep(new.ema, state.ema),
    )


def make(settings: Settings) -> tuple[Any, State, Any]:
    """Return (step, state, facts)."""
    model = make_model(settings)
    params, stats = init(model, settings)
    kernels = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    scale = None
    if settings.precision == "fp16":  # counts finite steps, but never that many
        scale = DynamicScale(growth_interval=2**30, fin_steps=0, scale=SCALE)
    state = State.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.chain(
            optax.add_decayed_weights(WEIGHT_DECAY, kernels),
            optax.sgd(settings.learning_rate, MOMENTUM, nesterov=True),
        ),
        batch_stats=stats,
        ema=jax.tree.map(jnp.copy, params) if settings.ema else None,
        dynamic_scale=scale,
        key=jax.random.key(settings.seed),
    )
    parameters = count(params)

    def facts(state: State) -> dict[str, Any]:
        scale = state.dynamic_scale
        return {
            "parameters": parameters,
            "scale": 1.0 if scale is None else float(scale.scale),
        }

    return train_step, jax.tree.map(jnp.asarray, state), facts
