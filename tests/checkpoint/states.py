"""States with something of their own in every field, and what is compared of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import SIX, config, host, make_rig, ones

import rjax
from rjax.trees import flatten

STATS = (("bn1/mean", (5,), 0.5), ("bn1/var", (5,), 1.0))


def loss_fn(params: Any, stats: Any, batch: Any, key: Any) -> Any:
    """Return a loss with the batch as gradient, and statistics that move with it."""
    pulls = [
        jnp.sum(leaf.astype(jnp.float32) * batch[path])
        for path, leaf in flatten(params)[0]
    ]
    noise = jax.random.uniform(key)
    loss = sum(pulls, start=jnp.zeros((), jnp.float32))
    return loss, (jax.tree.map(lambda x: 0.9 * x + noise, stats), {"noise": noise})


def _freeze(path: str, leaf: Any) -> rjax.Param:
    del leaf
    return rjax.Param(trainable=path != "fc/kernel")


def _inner() -> Any:
    """Return a chain with a state of every kind that Optax has."""
    mask = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    chain = optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), mask),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
        optax.ema(0.9),
    )
    return optax.MultiSteps(chain, every_k_schedule=2)


CONFIGS = {
    "adamw": config(
        optimizer=rjax.optim.adamw(weight_decay=0.1),
        scaling=rjax.scaling.dynamic(init=1024.0, interval=2),
        ema=rjax.Ema(0.9),
    ),
    "fp32": config(
        precision="fp32",
        optimizer=rjax.optim.nesterov(),
        learning_rate=optax.linear_schedule(0.1, 0.05, 4),
    ),
    "bf16": config(precision="bf16", optimizer=rjax.optim.lars(), ema=rjax.Ema(0.5)),
    "sgd": config(clip=rjax.Clip(norm=1.0)),
    "optax": config(
        optimizer=rjax.optim.from_optax(_inner()), learning_rate=None
    ),
}  # fmt: skip


def rig(name: str) -> Any:
    """Return a rig with a frozen parameter and statistics."""
    return make_rig(SIX, CONFIGS[name], loss_fn, _freeze, STATS)


def batch(i: int) -> Any:
    """Return a batch; the one of step 1 makes its step a skip."""
    g = np.nan if i == 1 else 0.01 * (i + 1)
    return ones(SIX, g)


def trained(made: Any, steps: int = 4, state: Any = None) -> Any:
    """Return a state so many steps further; what is given is given away."""
    state = made.state() if state is None else state
    start = int(state.step)
    for i in range(start, start + steps):
        state, _ = made.jitted(state, batch(i))
    return state


def kinds(state: Any) -> list[tuple[str, Any, Any, Any]]:
    """Return what a jitted function tells apart in its arguments."""
    return [
        (name, x.shape, str(x.dtype), getattr(x, "weak_type", None))
        for name, x in flatten(state)[0]
    ]


def assert_same(found: Any, right: Any) -> None:
    """Both have the same structure, kinds of arrays and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(right)
    assert kinds(found) == kinds(right)
    for (name, a), (_, b) in zip(flatten(found)[0], flatten(right)[0], strict=True):
        assert host(a).tobytes() == host(b).tobytes(), name


def copied(state: Any) -> Any:
    """Return a copy that no step takes over."""
    return jax.tree.map(jnp.copy, state)
