"""One device and many train alike, whole and sharded."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from helpers import BOTH, bits, config
from parallel.rigs import (
    EIGHT,
    ONE,
    OPTIMIZERS,
    ROWS,
    SGD,
    SHARDED,
    THREE,
    Over,
    assert_near,
    assert_replicated,
    images,
    network,
    pull,
    rows,
    weights,
)

import rjax
from rjax.parallel import data_parallel, gather

NET = rjax.Config(
    precision="fp32",
    learning_rate=0.05,
    ema=rjax.Ema(0.9),
    clip=rjax.Clip(norm=2.0),
    optimizer=rjax.optim.nesterov(weight_decay=1e-2),
)
HALF = rjax.Config(
    precision="fp16",
    learning_rate=0.05,
    scaling=rjax.scaling.static(128.0),
    optimizer=rjax.optim.nesterov(weight_decay=1e-2),
)
BATCHES = [images(0, {3: 1.0}), images(1), images(2, {17: -2.0})]
# Terms of the longest sums, over examples and positions, and the steps that add up.
TERMS = ROWS * 9 * len(BATCHES)


def test_a_network_in_float32():
    right, reports = network(ONE, NET).run(*BATCHES)
    rig = network(EIGHT, NET)
    state, found = rig.run(*BATCHES)
    assert_replicated((state, found))
    for which in ("master", "ema"):
        assert_near(weights(rig, state, which), weights(rig, right, which), TERMS)
    for a, b in zip(found, reports, strict=True):
        assert_near(a.loss, b.loss, TERMS)
        assert_near(a.grad_norm, b.grad_norm, TERMS)
        assert bool(a.applied) and int(a.offender) == -1
    for which in ("mean", "var"):
        a, b = (s.ema_batch_stats["bn"][which] for s in (state, right))
        assert_near(a, b, TERMS)
    assert int(state.results.count) == int(state.applied_steps) == len(BATCHES)
    assert_near(state.results.loss_sum, right.results.loss_sum, TERMS)


def test_a_network_in_float16():
    right, reports = network(ONE, HALF).run(*BATCHES)
    rig = network(Over(2), HALF)
    state, found = rig.run(*BATCHES)
    assert_replicated((state, found))
    # Every gradient is rounded on every device, and what it is made of before: 2^-11
    # each, a few times, of at most the norm.
    moved = sum(0.05 * 1.9 * float(r.grad_norm) for r in reports)
    bound = 8 * 2.0**-11 * moved
    for which in ("master", "compute"):
        apart = np.abs(weights(rig, state, which) - weights(rig, right, which)).max()
        assert apart < (bound if which == "master" else bound + 2.0**-10)
    assert int(state.skipped) == 0


PLACES = [(name, SHARDED) for name in ("sgd", "adamw", "lars")]
PLACES += [("nesterov", Over(4)), ("lars", EIGHT), ("lars", THREE)]
# What half precision adds to the rounding of a gradient, in units of float32.
UNITS = {"fp16": 2.0**13, "bf16": 2.0**16, "fp32": 0.0}


@pytest.mark.parametrize(("name", "over"), PLACES, ids=str)
def test_every_optimizer(name: str, over: Over):
    chosen = OPTIMIZERS[name]
    batches = [rows(i) for i in range(3)]
    one, rig = pull(ONE, chosen), pull(over, chosen)
    right, reports = one.run(*batches)
    state, said = rig.run(*batches)
    assert_replicated((state, said))
    units = UNITS[str(chosen.precision)]
    terms = 3 * (ROWS + units)
    for which in ("master", "compute", "ema", "ema_compute"):
        if which.startswith("ema") and chosen.ema is None:
            continue
        more = units if which.endswith("compute") else 0.0
        found, wanted = (weights(r, s, which) for r, s in ((rig, state), (one, right)))
        assert_near(found, wanted, terms + more)
    moments = [s for s in ("mu", "nu") if getattr(right, s) is not None]
    whole = gather(rig.plan, state)
    for field in moments:
        assert_near(getattr(whole, field), getattr(right, field), terms)
    for a, b in zip(said, reports, strict=True):
        assert_near(a.loss, b.loss, terms)
        assert_near(a.grad_norm, b.grad_norm, terms)
        assert float(a.learning_rate) == float(b.learning_rate)


@pytest.mark.standard_promotion
def test_optax_on_every_device():
    tx = rjax.optim.from_optax(optax.sgd(0.25))
    rig = pull(Over(2), config(optimizer=tx, learning_rate=None), BOTH)
    batch = {path: np.zeros((2, *shape), np.float32) for path, shape in BOTH}
    batch["kernel"][1, 2], batch["bias"][0, 1] = 4.0, 2.0
    state, _ = rig.run(batch)
    assert weights(rig, state).tolist() == [1.0, 0.75, 1.0, 1.0, 1.0, 0.5]
    assert_replicated(state)


def test_axes_of_a_mesh_together_are_as_one():
    grid = jax.make_mesh((2, 4), ("x", "y"))
    rig = pull(SHARDED, SGD)
    step = data_parallel(
        rig.step.loss_fn, rig.plan, grid, ("x", "y"), shard_optimizer=True
    )
    batch = step.shard_batch(rows(0))
    state, report = jax.jit(step)(step.place(rig.state()), batch)
    right, [one] = rig.run(rows(0))
    one = dataclasses.replace(one, grad_digests=None)
    assert bits((state, report)) == bits((right, one))
