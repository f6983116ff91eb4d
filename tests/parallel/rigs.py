"""Models over several devices, and what is compared of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import Shapes, config, host, nested
from jax.sharding import AxisType

import rjax
from rjax.parallel import data_parallel
from rjax.trees import flatten

# Divisible by 8 devices and by 3.
ROWS = 24

# A slot with weight decay and one without, of the first convolution and of others; the
# ranges of 8 devices begin within slots, those of 3 need padding.
FOUR: Shapes = (
    ("bn/scale", (121,)),
    ("fc/kernel", (2, 130)),
    ("conv1/kernel", (2, 2, 1, 3)),
    ("conv2/kernel", (1, 1, 5, 20)),
)

# Configurations that share their compiled steps over all tests.
SGD = config(optimizer=rjax.optim.sgd(weight_decay=0.1), clip=rjax.Clip(value=0.5))
NESTEROV = config(
    optimizer=rjax.optim.nesterov(weight_decay=0.1, decay="coupled"),
    precision="bf16",
    accumulation_steps=3,
    ema=rjax.Ema(0.9),
)
ADAMW = config(
    optimizer=rjax.optim.adamw(weight_decay=0.1),
    precision="fp32",
    learning_rate=optax.linear_schedule(0.1, 0.05, 4),
)
LARS = config(
    optimizer=rjax.optim.lars(weight_decay=0.1, trust_coefficient=0.5),
    clip=rjax.Clip(norm=1.0),
    ema=rjax.Ema(0.5),
)
OPTIMIZERS = {"sgd": SGD, "nesterov": NESTEROV, "adamw": ADAMW, "lars": LARS}


@dataclasses.dataclass(frozen=True)
class Over:
    """Where a step runs: `devices` of 0 is `rjax.make_train_step`."""

    devices: int = 8
    sharded: bool = False
    explicit: bool = False

    def mesh(self) -> jax.sharding.Mesh:
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        devices = jax.devices()[: self.devices]
        return jax.make_mesh((len(devices),), ("data",), (kind,), devices=devices)


ONE = Over(0)
EIGHT = Over(8)
SHARDED = Over(8, sharded=True)
THREE = Over(3, sharded=True)


# One program, and no look at the values.
_init_state = jax.jit(rjax.init_state, static_argnums=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Rig:
    """A model with its plan and its step, jitted with donation."""

    plan: rjax.Plan
    params: Any
    batch_stats: Any
    step: Any
    jitted: Callable[[Any, Any], Any]

    def state(self, **changes: Any) -> Any:
        """Return a fresh state, on the devices of the step."""
        state = _init_state(self.plan, self.params, self.batch_stats)
        state = state.replace(**changes)
        return self.step.place(state) if hasattr(self.step, "place") else state

    def run(self, *batches: Any, **changes: Any) -> tuple[Any, list[rjax.Report]]:
        """Take one step a batch from a fresh state."""
        state, reports = self.state(**changes), []
        for batch in batches:
            state, report = self.jitted(state, batch)
            reports.append(report)
        return state, reports


@functools.cache
def pull(over: Over, config: rjax.Config, shapes: Shapes = FOUR) -> Rig:
    """Return the rig of :func:`pulled_rows`; the same arguments, the same program."""
    params = nested({path: np.ones(shape, np.float32) for path, shape in shapes})
    plan = rjax.make_plan(params, config)
    loss_fn = rjax.stateless_loss(pulled_rows)
    return _rig(over, plan, params, None, loss_fn, digest_grads=True)


def pulled_rows(params: Any, batch: Any) -> jax.Array:
    """Return `mean(sum(view * g))` over rows `g`: its gradient is the mean row."""
    pulls = [
        jnp.sum(leaf.astype(jnp.float32) * jnp.mean(batch[path], axis=0))
        for path, leaf in flatten(params)[0]
    ]
    return sum(pulls, start=jnp.zeros((), jnp.float32))


def rows(seed: int, shapes: Shapes = FOUR, n: int = ROWS) -> dict[str, np.ndarray]:
    """Return random gradients by path, one a row; none is near zero."""
    draw = np.random.default_rng(seed)
    return {
        path: (0.2 + draw.random((n, *shape))).astype(np.float32)
        for path, shape in shapes
    }


@functools.cache
def network(over: Over, config: rjax.Config, axis: str | None = "data") -> Rig:
    """Return the rig of a network with a parameter in every region."""
    draw = np.random.default_rng(0)

    def kernel(*shape: int) -> np.ndarray:
        return 0.5 * draw.standard_normal(shape, np.float32)

    ones, zeros = np.ones(5, np.float32), np.zeros(5, np.float32)

    params = {
        "stem": {"kernel": kernel(2, 2, 1, 5)},
        "bn": {"scale": ones, "bias": zeros},
        "deep": {"kernel": kernel(1, 1, 5, 24)},
        "head": {"kernel": kernel(24, 3), "bias": zeros[:3]},
    }
    stats = {"bn": {"mean": zeros, "var": ones}}
    plan = rjax.make_plan(params, config, batch_stats=stats)
    loss_fn = functools.partial(_network, axis if over.devices else None)
    return _rig(over, plan, params, stats, loss_fn)


def _network(axis: str | None, params: Any, stats: Any, batch: Any, key: Any) -> Any:
    x, poison = batch
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    kernel = params["stem"]["kernel"]
    bn = params["bn"]
    x = convolve(x.astype(kernel.dtype), kernel)
    x, mean, var = rjax.ops.batch_norm(
        x, bn["scale"], bn["bias"], relu=True, axis_name=axis
    )
    x = convolve(x, params["deep"]["kernel"]).mean((1, 2))
    head = params["head"]
    y = rjax.ops.dense(x, head["kernel"], head["bias"]).astype(jnp.float32)
    loss = jnp.mean(jnp.square(y - 1.0)) + jnp.mean(poison) * jnp.sum(bn["bias"])
    old = stats["bn"]
    new = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var}
    return loss, ({"bn": new}, {"largest": jnp.max(y)})


def images(seed: int, poison: dict[int, float] | None = None) -> Any:
    """Return a batch of :func:`network`; `poison` gives examples a gradient."""
    x = np.random.default_rng(seed).standard_normal((ROWS, 4, 4, 1), np.float32)
    pulls = np.zeros(ROWS, np.float32)
    for i, value in (poison or {}).items():
        pulls[i] = value
    return x, pulls


@functools.cache
def noted(over: Over, accumulation_steps: int = 1) -> Rig:
    """Return the rig of a loss that keeps a statistic and says what it was given."""

    def loss_fn(params: Any, stats: Any, batch: Any, key: Any) -> Any:
        metrics = {
            "mean": jnp.mean(batch),
            "half": jnp.mean(batch).astype(jnp.float16),
            "examples": jnp.int32(len(batch)),
            "above": batch[0] > 0.5,
            "draw": jax.random.uniform(key),
        }
        if accumulation_steps == 1:
            metrics["key"] = key
        new = {"last": batch[-1], "seen": stats["seen"] + len(batch)}
        return jnp.sum(params["w"]) + jnp.mean(batch) * 0.0, (new, metrics)

    params = {"w": np.ones(3, np.float32)}
    stats = {"last": np.zeros((), np.float32), "seen": np.zeros((), np.int32)}
    chosen = config(ema=rjax.Ema(0.9), accumulation_steps=accumulation_steps)
    plan = rjax.make_plan(params, chosen, batch_stats=stats)
    return _rig(over, plan, params, stats, loss_fn)


def _rig(
    over: Over, plan: Any, params: Any, stats: Any, loss_fn: Any, **options: Any
) -> Rig:
    if over.devices:
        options |= {"shard_optimizer": over.sharded}
        step = data_parallel(loss_fn, plan, over.mesh(), **options)
    else:
        step = rjax.make_train_step(loss_fn, plan, **options)
    return Rig(plan, params, stats, step, jax.jit(step, donate_argnums=0))


def weights(rig: Rig, state: Any, which: str = "master") -> np.ndarray:
    """Return all parameters of an arena end to end, cut from it on the host."""
    if getattr(state, which) is None:
        which = which.replace("ema_compute", "ema").replace("compute", "master")
    arena = np.asarray(getattr(state, which)).astype(np.float32)
    halves = which.endswith("compute")
    start = rig.plan.bias_like if halves else 0
    slots = [slot for slot in rig.plan.slots if slot.half or not halves]
    return np.concatenate(
        [arena[s.offset - start : s.offset - start + s.size] for s in slots]
    )


def assert_near(found: Any, right: Any, terms: float) -> None:
    """Allow for the rounding of float32 sums of so many terms, of the largest value."""
    found, right = np.asarray(found, np.float64), np.asarray(right, np.float64)
    bound = terms * 2.0**-24 * np.abs(right).max(initial=0.0)
    np.testing.assert_allclose(found, right, rtol=0, atol=bound)


def assert_replicated(tree: Any) -> None:
    """Every device has the same bits of every array that is whole on each."""
    checked = 0
    for path, leaf in flatten(tree)[0]:
        if not leaf.sharding.is_fully_replicated:
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        first, *others = [
            host(shard.data).tobytes() for shard in leaf.addressable_shards
        ]
        assert others and all(other == first for other in others), path
        checked += 1
    assert checked
