"""Optimizers: their formulas, what counts as a step, zero gradients, rates."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    BOTH,
    MODES,
    both,
    config,
    make_rig,
)

import rjax
from rjax import optim

STOCK = pytest.mark.standard_promotion


def by_optax(tx):
    return {"optimizer": optim.from_optax(tx), "learning_rate": None}


ADAMS = {
    "adam": {"optimizer": optim.adam()},
    "adamw": {"optimizer": optim.adamw(weight_decay=0.0)},
    "optax": by_optax(optax.adam(0.1)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["adam", "adamw", pytest.param("optax", marks=STOCK)])
def test_adam_counts_applied_steps_only(mode, name):
    # Counting the skipped step as well gives 0.81415.
    rig = make_rig(BOTH, config(**ADAMS[name]))
    state, _ = rig.run(rig.state(), map(both, (1.0, np.nan, 1.0)), mode)
    assert (state.applied_steps, state.step) == (2, 3)
    np.testing.assert_allclose(rig.both(state), 0.8, rtol=1e-5)
    state, _ = rig.run(rig.state(), map(both, (1.0, 1.0, 1.0)), mode)
    np.testing.assert_allclose(rig.both(state), 0.7, rtol=1e-5)


def test_adam_after_first_steps_that_were_skipped():
    rig = make_rig(BOTH, config(optimizer=optim.adam()))
    state, _ = rig.run(rig.state(), map(both, (np.inf, np.nan, 1.0)))
    np.testing.assert_allclose(rig.both(state), 0.9, rtol=1e-5)


def climbing(count):
    return 0.1 * (count.astype(jnp.float32) + 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_counts_applied_steps(mode):
    rig = make_rig(BOTH, config(learning_rate=climbing))
    state, reports = rig.run(
        rig.state({"kernel": 0.0, "bias": 0.0}), map(both, (1.0, np.nan, 1.0)), mode
    )
    np.testing.assert_allclose(rig.both(state), -0.3, rtol=1e-6)
    rates = [float(r.learning_rate) for r in reports]
    assert rates == pytest.approx([0.1, 0.2, 0.2], rel=1e-6)
    skipped = [int(r.step) for r in reports if not r.applied]
    assert skipped == [1]


@STOCK
def test_optax_schedules_count_applied_steps():
    inside = config(**by_optax(optax.sgd(lambda count: 0.1 * (count + 1))))
    outside = config(learning_rate=optax.linear_schedule(0.1, 0.5, 4))
    for options in (inside, outside):
        rig = make_rig(BOTH, options)
        state, _ = rig.run(rig.state(), map(both, (1.0, np.nan, 1.0)))
        np.testing.assert_allclose(rig.both(state), 0.7, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_replaced_rate_counts_from_the_next_step(mode):
    rig = make_rig(BOTH, config())
    state, _ = rig.run(rig.state(), [both(1.0)] * 2, mode)
    compiled = rig.jitted._cache_size()
    state, [report] = rig.run(state.replace(learning_rate=0.01), [both(1.0)], mode)
    np.testing.assert_allclose(rig.both(state), 0.79, rtol=1e-6)
    assert report.learning_rate == np.float32(0.01)
    assert rig.jitted._cache_size() == compiled


ZERO = {
    "sgd": {"optimizer": optim.sgd()},
    "nesterov": {"optimizer": optim.nesterov()},
    "adam": {"optimizer": optim.adam()},
    "lars": {"optimizer": optim.lars()},
    "lars-no-eps": {"optimizer": optim.lars(eps=0.0)},
    "norm": {"optimizer": optim.adam(), "clip": rjax.Clip(norm=1.0)},
    "rmsprop": by_optax(optax.rmsprop(0.1)),
}
ZERO_NAMES = [pytest.param(n, marks=[STOCK] * (n == "rmsprop")) for n in ZERO]


@pytest.mark.parametrize("name", ZERO_NAMES)
def test_a_zero_gradient_moves_nothing(name):
    rig = make_rig(BOTH, config(**ZERO[name]))
    state = rig.state({"kernel": 0.3, "bias": -0.7})
    want = rig.both(state)
    state, reports = rig.run(state, [both(0.0)] * 3)
    np.testing.assert_array_equal(rig.both(state), want)
    assert all(r.applied and r.grad_norm == 0.0 for r in reports)
    assert state.scale == 8192.0


@pytest.mark.parametrize("name", ZERO_NAMES)
def test_an_unused_parameter_beside_a_used_one_keeps_its_bits(name):
    rig = make_rig(BOTH, config(**ZERO[name]))
    for used, unused in (("kernel", "bias"), ("bias", "kernel")):
        state = rig.state({"kernel": 0.3, "bias": 0.3})
        want = rig.get(state, unused)
        batch = both(1.0, kernel=used == "kernel", bias=used == "bias")
        state, _ = rig.run(state, [batch] * 2)
        np.testing.assert_array_equal(rig.get(state, unused), want)
        moved = rig.get(state, used)
        assert np.isfinite(moved).all() and (moved != want).all()


@pytest.mark.parametrize("name", ["lars", "lars-no-eps"])
def test_lars_with_a_zero_norm_has_a_trust_ratio_of_one(name):
    rig = make_rig(BOTH, config(**ZERO[name]))
    state, _ = rig.run(rig.state({"kernel": 0.0, "bias": 0.0}), [both(1.0)])
    np.testing.assert_allclose(rig.both(state), -0.1, rtol=1e-6)
    # A gradient so small that its square underflows still counts as zero.
    state, _ = rig.run(rig.state(), [both(1e-13, kernel=False)])
    assert np.isfinite(rig.both(state)).all()


def test_lars_norms_whose_squares_overflow():
    # eta = tc |w| / |u| = 1e-3, so q moves w by lr * eta * q = 1e-4 * 1e25.
    config_ = config(optimizer=optim.lars(), precision="fp32")
    rig = make_rig(BOTH, config_)
    state = rig.state({"kernel": 1e25}, scale=1.0)
    state, [report] = rig.run(state, [both(1e25, bias=False)])
    assert report.applied
    np.testing.assert_allclose(rig.get(state, "kernel"), 1e25 * (1 - 1e-4), rtol=1e-6)


def test_a_rate_beside_optax_is_refused():
    with pytest.raises(ValueError, match="`learning_rate` must be None"):
        rjax.Config(optimizer=optim.from_optax(optax.sgd(0.1)), learning_rate=0.1)
    with pytest.raises(ValueError, match="works with from_optax"):
        rjax.Config(learning_rate=None)


EDGES = tuple((f"layer{n}/kernel", (n, 1)) for n in (1, 120, 121, 391))


@pytest.mark.parametrize("name", ["adam", "lars"])
def test_an_update_touches_its_own_slot_only(name):
    rule = {"adam": optim.adam(), "lars": optim.lars()}[name]
    rig = make_rig(EDGES, config(optimizer=rule))
    for path, shape in EDGES:
        batch = {p: np.full(s, 1.0 if p == path else 0.0, "f4") for p, s in EDGES}
        state = rig.state({p: 123.0 for p, _ in EDGES})
        before = np.asarray(state.master).copy()
        state, _ = rig.run(state, [batch])
        moved = np.flatnonzero(np.asarray(state.master) != before)
        [slot] = [s for s in rig.plan.slots if s.path == path]
        assert moved.tolist() == list(range(slot.offset, slot.offset + slot.size))
        assert shape[0] == slot.size
