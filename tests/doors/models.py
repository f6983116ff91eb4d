"""Small networks of three libraries, the data they learn from, and how they are run."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rjax

STEPS, LAST, BATCH = 80, 20, 32


class LinenBlock(nn.Module):
    """Two convolutions with norms, added to their input."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(
            nn.Conv, self.width, (3, 3), use_bias=False, dtype=self.dtype
        )
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        y = nn.relu(norm(name="norm1")(conv(name="conv1")(x)))
        return nn.relu(x + norm(name="norm2")(conv(name="conv2")(y)))


class LinenResNet(nn.Module):
    """A stem, one block and a head, of stock layers."""

    dtype: Any = jnp.float16
    width: int = 8

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Conv(self.width, (3, 3), strides=2, dtype=self.dtype, name="stem")(x)
        x = LinenBlock(self.width, self.dtype, name="block")(nn.relu(x), train)
        return nn.Dense(10, dtype=self.dtype, name="head")(x.mean((1, 2)))


class NnxBlock(nnx.Module):
    """Two convolutions with norms, added to their input."""

    def __init__(self, width, dtype, rngs):
        conv = functools.partial(
            nnx.Conv, width, width, (3, 3), use_bias=False, dtype=dtype, rngs=rngs
        )
        self.conv1, self.conv2 = conv(), conv()
        norm = functools.partial(
            nnx.BatchNorm, width, momentum=0.9, dtype=dtype, rngs=rngs
        )
        self.norm1, self.norm2 = norm(), norm()

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(x + self.norm2(self.conv2(y)))


class NnxResNet(nnx.Module):
    """A stem, one block, dropout and a head."""

    def __init__(self, dtype=jnp.float16, width=8, dropout=0.1):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(1, width, (3, 3), strides=2, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, dtype, rngs)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(width, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


OPTIMIZERS = {
    "sgd": (rjax.optim.sgd(), {"transformer": 0.1}),
    "adamw": (rjax.optim.adamw(weight_decay=1e-2), 3e-3),
    "optax": (
        rjax.optim.from_optax(
            optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2))
        ),
        None,
    ),
}


def door(name, precision):
    """Return parameters, statistics, loss function and training examples."""
    dtype = rjax.Policy(precision).compute_dtype
    criterion = rjax.ops.softmax_cross_entropy
    if name == "transformer":
        zen = rjax.data.load_text(length=24)
        model = rjax.nn.Transformer(
            zen.num_classes, features=32, layers=1, heads=4, max_length=24
        )
        params = jax.jit(model.init)(jax.random.key(0), zen.train[0][:1])["params"]
        loss_fn = rjax.linen_loss(model, rjax.nn.masked_cross_entropy)
        return params, {}, loss_fn, zen.train
    digits = rjax.data.load_digits().train
    if name == "nnx":
        model = NnxResNet(dtype)
        params, stats = rjax.nnx_variables(model)
        return params, stats, rjax.nnx_loss(model, criterion), digits
    model = LinenResNet(dtype)
    variables = jax.jit(model.init)(jax.random.key(0), digits[0][:1])
    loss_fn = rjax.linen_loss(model, criterion)
    return variables["params"], variables["batch_stats"], loss_fn, digits


def losses(name, optimizer, precision, steps=STEPS):
    """Train and return the losses, and how many steps were skipped."""
    params, stats, loss_fn, examples = door(name, precision)
    tx, rate = OPTIMIZERS[optimizer]
    if isinstance(rate, dict):
        rate = rate.get(name, 0.1)
    config = rjax.Config(precision=precision, optimizer=tx, learning_rate=rate)
    plan = rjax.make_plan(params, config, stats)
    state = rjax.init_state(plan, params, stats)
    step: Any = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
    reports = []
    for batch in rjax.data.train_batches(examples, BATCH, stop=steps):
        state, report = step(state, batch)
        reports.append(report)
    assert step._cache_size() == 1
    return np.array([report.loss for report in reports]), int(state.skipped)
