"""A train step over one device or over all, on a batch that stays there."""

import gc
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from throughput import on_jax
from throughput.settings import EMA as DECAY
from throughput.settings import MOMENTUM, WEIGHT_DECAY, make_batch

import rjax
from rjax.parallel import bytes_per_device, data_parallel
from scaling.settings import Settings

_FEW = (
    "weak scaling is that of two devices or more, and there is {}: on a CPU, set "
    "XLA_FLAGS=--xla_force_host_platform_device_count=2"
)


def count_devices() -> int:
    """Return how many devices there are.

    Raises:
        ValueError: for one alone.
    """
    n = jax.device_count()
    if n < 2:
        raise ValueError(_FEW.format(n))
    return n


class Rig:
    """One part: its compiled step, its state, its batch, on its devices."""

    def __init__(self, part: str, settings: Settings) -> None:
        self.part, self.settings = part, settings
        self.devices = 1 if part == "one" else count_devices()
        self.before = in_use()
        model = on_jax.make_model(settings)
        params, stats = on_jax.init(model, settings)
        config = rjax.Config(
            precision=settings.precision,
            optimizer=rjax.optim.nesterov(MOMENTUM, WEIGHT_DECAY),
            learning_rate=settings.learning_rate,
            ema=rjax.Ema(DECAY) if settings.ema else None,
        )
        self.plan = rjax.make_plan(params, config, batch_stats=stats)
        state = rjax.init_state(self.plan, params, stats, seed=settings.seed)
        self._make_step(rjax.linen_loss(model, on_jax.criterion), state)
        del params, stats, state
        gc.collect()
        self.held = [b - a for a, b in zip(self.before, in_use(), strict=True)]
        self._put_batch()
        self.program: Any = None
        self.losses: list[Any] = []

    def _make_step(self, loss: Any, state: Any) -> None:
        if self.part == "one":
            self.step: Any = rjax.make_train_step(loss, self.plan)
            self.state = state
            return
        mesh = jax.make_mesh((self.devices,), ("data",), (AxisType.Auto,))
        self.step = data_parallel(
            loss,
            self.plan,
            mesh,
            shard_optimizer=self.part == "sharded",
            batch_statistics="device" if self.part == "local" else "global",
        )
        self.state = self.step.place(state)

    def _put_batch(self) -> None:
        images, labels = batch_of(self.settings, self.devices)
        images = images.astype(on_jax.DTYPES[self.settings.precision])
        put = jax.device_put if self.part == "one" else self.step.shard_batch
        self.batch = put((images, labels))

    def compile(self) -> None:
        """Compile the step."""
        jitted = jax.jit(self.step, donate_argnums=0)
        self.program = jitted.lower(self.state, self.batch).compile()

    def run(self, steps: int) -> None:
        """Take so many steps, and wait for the last."""
        for _ in range(steps):
            self.state, report = self.program(self.state, self.batch)
            self.losses.append(report.loss)
        jax.block_until_ready(self.state)

    def facts(self) -> dict[str, Any]:
        """Return what is known of the part beside its times."""
        memory = self.program.memory_analysis()
        n, shard = self.devices, self.part == "sharded"
        predicted = bytes_per_device(self.plan, self.state, n, shard_optimizer=shard)
        return {
            "devices": n,
            "masters": self.state.master.addressable_data(0).size,
            "batch_statistics": getattr(self.step, "batch_statistics", None),
            "parameters": sum(slot.size for slot in self.plan.slots),
            "state_bytes": sum(predicted.values()),
            "held_bytes": self.held[:n],
            "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
            "first_loss": float(self.losses[0]),
            "last_loss": float(self.losses[-1]),
            "skipped": int(self.state.skipped),
        }


def batch_of(settings: Settings, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the batch of so many devices, the first of it that of one."""
    images, labels = make_batch(settings)
    return (
        np.concatenate([images] * devices),
        np.concatenate([labels] * devices),
    )


def in_use() -> list[int]:
    """Return the bytes in use on every device, 0 where it does not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return [found.get("bytes_in_use", 0) for found in stats]
