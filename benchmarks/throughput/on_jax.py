"""What the contenders on JAX have in common, and rjax's own."""

import importlib.metadata
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rjax
from throughput import profiling
from throughput.settings import EMA, MOMENTUM, SMOOTHING, WEIGHT_DECAY, Settings
from throughput.settings import make_batch as make_numpy_batch

DTYPES: dict[str, Any] = {
    "fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32
}  # fmt: skip


class JaxRig:
    """A jitted step with donated state.

    Args:
        step: `(state, batch) -> (state, out)`.
        state: the initial state.
        batch: images and labels on the device.
        loss: `out -> f32[]`.
        facts: `state -> ` what the contender knows of itself.
    """

    def __init__(self, step: Any, state: Any, batch: Any, loss: Any, facts: Any):
        self._step: Any = jax.jit(step, donate_argnums=0)
        self._state, self._batch = state, batch
        self._loss, self._facts = loss, facts

    def compile(self) -> None:
        self._step = self._step.lower(self._state, self._batch).compile()

    def step(self) -> jax.Array:
        self._state, out = self._step(self._state, self._batch)
        return self._loss(out)

    def wait(self) -> None:
        jax.block_until_ready(self._state)

    def facts(self) -> dict[str, Any]:
        memory = self._step.memory_analysis()
        stats = jax.local_devices()[0].memory_stats() or {}
        return {
            **self._facts(self._state),
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
            **environment(),
        }

    def profile(self) -> dict[str, Any]:
        """Return the time of a step by category and by kernel."""
        kinds = profiling.kinds_of(self._step.as_text())
        return profiling.profile(lambda: (self.step(), self.wait()), kinds)


def environment() -> dict[str, Any]:
    """Return the kind of device, versions, and flags that change what is compiled."""
    device = jax.local_devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax")
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["rjax"] = rjax.__version__
    platform = getattr(device.client, "platform_version", "")
    versions["backend"] = platform.partition("\n")[0]
    flags = {k: os.environ[k] for k in ("XLA_FLAGS",) if os.environ.get(k)}
    return {"device": device.device_kind, "versions": versions, "flags": flags}


def make_batch(settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Return the batch on the device, in the precision of the step."""
    images, labels = make_numpy_batch(settings)
    return jnp.asarray(images, DTYPES[settings.precision]), jnp.asarray(labels)


def make_model(settings: Settings) -> Any:
    """Return rjax's module."""
    makers = {
        "resnet50": "ResNet50", "vgg16bn": "VGG16BN", "resnet20": "ResNet"
    }  # fmt: skip
    how = {"folded": True} if settings.folded else {}
    return getattr(rjax.nn, makers[settings.model])(settings.classes, **how)


def init(model: Any, settings: Settings) -> tuple[Any, Any]:
    """Return parameters and running statistics, drawn on the device from the seed."""
    x = jnp.zeros((1, settings.image, settings.image, 3), jnp.float32)
    # By the kernel that jaxlib has, on a GPU: XLA would compile every draw by itself.
    before = jax.config.jax_threefry_gpu_kernel_lowering
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    variables = jax.jit(model.init)(jax.random.key(settings.seed), x)
    jax.config.update("jax_threefry_gpu_kernel_lowering", before)
    return variables["params"], variables["batch_stats"]


def count(params: Any) -> int:
    """Return the number of parameters."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(params))


def criterion(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the smoothed cross-entropy of each example."""
    return rjax.ops.softmax_cross_entropy(logits, labels, label_smoothing=SMOOTHING)


def pipeline(settings: Settings, rate: Any, implementation: str | None = None) -> Any:
    """Return (model, plan, step, state) of rjax, the loss scale starting at 8192."""
    model = make_model(settings)
    params, stats = init(model, settings)
    config = rjax.Config(
        precision=settings.precision,
        optimizer=rjax.optim.nesterov(momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        learning_rate=rate,
        ema=rjax.Ema(EMA) if settings.ema else None,
    )
    plan = rjax.make_plan(params, config, batch_stats=stats)
    state = rjax.init_state(plan, params, stats, seed=settings.seed)
    loss = rjax.linen_loss(model, criterion)
    return model, plan, rjax.make_train_step(loss, plan, implementation), state


def make_rjax(settings: Settings, implementation: str | None = None) -> JaxRig:
    """Return rjax as it comes, or with the implementation that is named."""
    _, plan, step, state = pipeline(settings, settings.learning_rate, implementation)
    parameters = sum(slot.size for slot in plan.slots)

    def facts(state: Any) -> dict[str, Any]:
        scale, skipped = float(state.scale), int(state.skipped)
        return {"parameters": parameters, "scale": scale, "skipped": skipped}

    batch = make_batch(settings)
    return JaxRig(step, state, batch, lambda report: report.loss, facts)


def make(name: str, settings: Settings) -> JaxRig:
    """Return the contender of that name: rjax, rjax[...] or flax."""
    if name == "flax":
        from throughput import peers_flax

        step, state, facts = peers_flax.make(settings)
        return JaxRig(step, state, make_batch(settings), lambda loss: loss, facts)
    return make_rjax(settings, name.partition("[")[2].rstrip("]") or None)
