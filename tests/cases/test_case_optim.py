"""Optimizers: their formulas, what counts as a step, zero gradients, rates."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    BOTH,
    MODES,
    PRECISIONS,
    SIX,
    both,
    config,
    make_rig,
    nested,
    unmoved,
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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_adam_after_a_first_step_that_was_skipped(precision):
    rig = make_rig(BOTH, config(optimizer=optim.adam(), precision=precision))
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


class ByHand:
    """The formulas in float64, one slot at a time."""

    def __init__(self, rule, w, decays, bias_like):
        self.rule, self.w, self.t = rule, w.astype(np.float64), 0
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.wd = rule.weight_decay if decays else 0.0
        self.bias_like = bias_like

    def step(self, u, lr):
        kind = type(self.rule).__name__
        getattr(self, kind)(np.asarray(u, np.float64), lr)

    def SgdRule(self, u, lr):
        coupled = self.rule.decay == "coupled"
        u = u + self.wd * self.w if coupled else u
        keep = 1.0 if coupled else 1.0 - lr * self.wd
        if self.rule.momentum is not None:
            self.m = self.rule.momentum * self.m + u
            u = self.rule.momentum * self.m + u if self.rule.nesterov else self.m
        self.w = keep * self.w - lr * u

    def AdamRule(self, u, lr):
        b1, b2, self.t = self.rule.b1, self.rule.b2, self.t + 1
        if self.rule.decay == "coupled":
            u = u + self.wd * self.w
        else:
            self.w = self.w * (1.0 - lr * self.wd)
        self.m = b1 * self.m + (1 - b1) * u
        self.v = b2 * self.v + (1 - b2) * u * u
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        self.w = self.w - lr * m / (np.sqrt(v) + self.rule.eps)

    def LarsRule(self, u, lr):
        rule, beta = self.rule, self.rule.momentum
        q = u + self.wd * self.w
        pull = lr * self.trust(u) * q if not self.bias_like else q
        self.m = beta * self.m + pull
        step = pull + beta * self.m if rule.nesterov else self.m
        self.w = self.w - (lr * step if self.bias_like else step)

    def trust(self, u):
        w_norm, u_norm = np.linalg.norm(self.w), np.linalg.norm(u)
        if min(w_norm, u_norm) < 1e-12:
            return 1.0
        below = u_norm + self.wd * w_norm + self.rule.eps
        return min(self.rule.trust_coefficient * w_norm / below, 100.0)


RULES = {
    "sgd": optim.sgd(weight_decay=0.1),
    "sgd-coupled": optim.sgd(weight_decay=0.1, decay="coupled"),
    "momentum": optim.momentum(0.8, weight_decay=0.1),
    "momentum-coupled": optim.momentum(0.8, weight_decay=0.1, decay="coupled"),
    "nesterov": optim.nesterov(0.8, weight_decay=0.1),
    "nesterov-coupled": optim.nesterov(0.8, weight_decay=0.1, decay="coupled"),
    "adam": optim.adam(0.8, 0.9, 1e-3, weight_decay=0.1),
    "adamw": optim.adamw(0.8, 0.9, 1e-3, weight_decay=0.1),
    "lars": optim.lars(0.8, weight_decay=0.1, trust_coefficient=0.5),
    "lars-nesterov": optim.lars(
        0.8, weight_decay=0.1, trust_coefficient=0.5, nesterov=True
    ),
}


def decay_by_path(path, leaf):
    """One bias-like parameter decays and one kernel does not."""
    del leaf
    return {
        "fc/bias": rjax.Param(decay=True),
        "conv2/kernel": rjax.Param(decay=False),
        "conv10/kernel": rjax.Param(precision="float32"),
    }.get(path)


@pytest.mark.parametrize("name", RULES)
def test_formulas_over_every_region_with_skips_between(name):
    rule, lr = RULES[name], 0.25
    rig = make_rig(SIX, config(optimizer=rule), rule=decay_by_path)
    rng = np.random.default_rng(0)
    params = {p: rng.normal(size=shape).astype("f4") for p, shape in SIX}
    # Every gradient times the scale is an exact fp16 number.
    pulls = [
        {p: rng.integers(-64, 64, shape).astype("f4") / 32 for p, shape in SIX}
        for _ in range(3)
    ]
    bad = {**pulls[0], "gain": np.float32(np.nan)}
    slots = {slot.path: slot for slot in rig.plan.slots}
    want = {
        path: ByHand(rule, w, slots[path].decay, slots[path].role.bias_like)
        for path, w in params.items()
    }
    state = rig.state(learning_rate=lr)
    state = rjax.replace_params(rig.plan, state, nested(params))
    state, _ = rig.run(state, [pulls[0], bad, pulls[1], bad, pulls[2]])
    for path, slot in want.items():
        for g in pulls:
            slot.step(g[path], lr)
        got = rig.get(state, path)
        np.testing.assert_allclose(got, slot.w.reshape(-1), rtol=2e-5, atol=2e-6)
    assert slots["fc/bias"].decay and not slots["bn1/scale"].decay
    assert slots["fc/kernel"].decay and not slots["conv2/kernel"].decay


@STOCK
@pytest.mark.parametrize(
    ("tx", "rule"),
    [
        (optax.sgd(0.1, momentum=0.9, nesterov=True), optim.nesterov()),
        (optax.adam(0.1), optim.adam()),
        (optax.sgd(0.1, momentum=0.9), optim.momentum()),
    ],
)
def test_optax_agrees_with_the_native_rule(tx, rule):
    native = make_rig(BOTH, config(optimizer=rule))
    stock = make_rig(BOTH, config(**by_optax(tx)))
    batches = [both(x, 1.0, -x) for x in (1.0, 0.5, np.nan, 2.0)]
    a, _ = native.run(native.state(), batches)
    b, reports = stock.run(stock.state(), batches)
    np.testing.assert_allclose(native.both(a), stock.both(b), rtol=1e-5)
    assert [bool(r.applied) for r in reports] == [True, True, False, True]


def test_a_rate_beside_optax_is_refused():
    with pytest.raises(ValueError, match="`learning_rate` must be None"):
        rjax.Config(optimizer=optim.from_optax(optax.sgd(0.1)), learning_rate=0.1)
    with pytest.raises(ValueError, match="works with from_optax"):
        rjax.Config(learning_rate=None)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_frozen_parameter_never_moves_whatever_the_decay(precision):
    def rule(path, leaf):
        return rjax.Param(trainable=path != "kernel", decay=True)

    options = config(optimizer=optim.adamw(weight_decay=0.5), precision=precision)
    rig = make_rig(BOTH, options, rule=rule)
    state = rig.state()
    before = unmoved(state)["frozen/kernel"]
    state, _ = rig.run(state, [both(1.0)] * 3)
    assert unmoved(state)["frozen/kernel"] == before
    assert (rig.get(state, "kernel") == 1.0).all()
    assert (rig.get(state, "bias") < 0.8).all()
    assert [slot.path for slot in rig.plan.slots] == ["bias"]


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
