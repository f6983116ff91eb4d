"""Every optimizer against float64, with a bound that float32 arithmetic explains."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float64_reference import (
    B1,
    B2,
    BETA,
    CASES,
    EPS,
    LR,
    OPTIM,
    ROUNDINGS,
    STEPS,
    TC,
    UNIT,
    WD,
    Rounded,
    Slot,
    exact,
    one_minus_power_cancelling,
)

import rjax
from rjax.ops.check_finite import check_finite
from rjax.ops.slots import SlotTable
from rjax.ops.update import update
from rjax.regions import BIAS_LIKE


def _random(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _parameters(seed, *leading):
    return {
        "bn": {
            "bias": _random(*leading, 5, seed=seed),
            "scale": _random(*leading, 5, seed=seed + 1),
        },
        "conv": {"kernel": _random(*leading, 3, 3, 2, 4, seed=seed + 2)},
        "dense": {
            "bias": _random(*leading, 20, seed=seed + 3),
            "kernel": _random(*leading, 7, 20, seed=seed + 4),
        },
    }


PARAMS = _parameters(0)
GRADIENTS = _parameters(10, STEPS)
UNUSUAL = {"conv/kernel": rjax.Param(decay=False), "dense/bias": rjax.Param(decay=True)}


def _rule(path, leaf):
    return UNUSUAL.get(path)


def _plan(optimizer, learning_rate: Any = LR, rule=_rule, precision="fp32", **options):
    config = rjax.Config(
        precision=precision,
        optimizer=optimizer,
        learning_rate=learning_rate,
        **options,
    )
    return rjax.make_plan(PARAMS, config, rule=rule)


def _linear(params, batch):
    """A loss whose gradient is the batch, exactly."""
    terms = jax.tree.map(lambda w, g: jnp.sum(w.astype(g.dtype) * g), params, batch)
    return sum(jax.tree.leaves(terms))


def _step(plan) -> Any:
    return jax.jit(rjax.make_train_step(rjax.stateless_loss(_linear), plan))


def _gradient(t):
    return jax.tree.map(lambda g: g[t - 1], GRADIENTS)


@functools.cache
def _reference(name, step=None):
    """Return {path: Slot} after all steps, in float64."""
    plan = _plan(CASES[name][0])
    step = CASES[name][1] if step is None else step
    weights, found = jax.tree.leaves(PARAMS), {}
    gradients = jax.tree.leaves(GRADIENTS)
    for s in plan.slots:
        w, zero = exact(weights[s.leaf]), exact(np.zeros(s.shape))
        slot = Slot(w, zero, zero, WD if s.decay else 0.0, s.role in BIAS_LIKE)
        for t in range(1, STEPS + 1):
            slot = step(slot, exact(gradients[s.leaf][t - 1]), Rounded.of(LR), t)
        found[s.path] = slot
    return found


def _assert_within(got, rounded, factor=1.0):
    error = abs(np.asarray(got, np.float64) - rounded.value)
    assert (error <= factor * rounded.bound).all(), (error / rounded.bound).max()


def _assert_follows(plan, name, master, mu, nu):
    for arena, field in ((master, "w"), (mu, "m"), (nu, "v")):
        if arena is None:
            continue
        leaves = jax.tree.leaves(plan.unpack(arena))
        for slot in plan.slots:
            wanted = getattr(_reference(name)[slot.path], field)
            _assert_within(leaves[slot.leaf], wanted)


def _padding(plan):
    free = np.ones(plan.n, bool)
    for slot in plan.slots:
        free[slot.offset : slot.offset + slot.size] = False
    return free


def _assert_padding_is_zero(plan, state):
    free = _padding(plan)
    for name in ("master", "mu", "nu", "ema", "compute", "ema_compute"):
        arena = getattr(state, name)
        if arena is not None:
            where = free[-arena.size :]
            kind = np.uint32 if arena.dtype == np.float32 else np.uint16
            assert where.any() and not np.asarray(arena)[where].view(kind).any(), name


def test_the_slots_are_of_every_kind():
    plan = _plan(CASES["sgd"][0])
    kinds = {(slot.role in BIAS_LIKE, slot.decay) for slot in plan.slots}
    assert kinds == set(itertools.product([True, False], repeat=2))
    assert any(slot.capacity > 128 for slot in plan.slots)


def test_the_bound_tells_the_optimizers_apart():
    # Without momentum, decay before or after is one formula.
    names = [name for name in CASES if name != "sgd coupled"]
    for pair in itertools.combinations(names, 2):
        one, other = (_reference(name) for name in pair)
        ratios = [
            abs(one[p].w.value - other[p].w.value) / (one[p].w.bound + other[p].w.bound)
            for p in one
        ]
        assert max(ratio.max() for ratio in ratios) > 100, pair


@pytest.mark.parametrize("name", CASES)
def test_the_train_step_follows_float64(name):
    plan = _plan(CASES[name][0])
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    for t in range(1, STEPS + 1):
        state, report = step(state, _gradient(t))
        assert report.applied
    _assert_follows(plan, name, state.master, state.mu, state.nu)
    _assert_padding_is_zero(plan, state)
    assert step._cache_size() == 1


@pytest.mark.parametrize("name", CASES)
def test_the_op_follows_float64_and_leaves_padding_zero(name):
    rule = CASES[name][0]
    plan = _plan(rule)

    @jax.jit
    def run(arenas, gradients):
        def body(arenas, inputs):
            t, u = inputs
            master, mu, nu = arenas
            rate = jnp.float32(LR)
            arenas = update(
                rule, master, u, mu, nu,
                learning_rate=rate, count=t, table=plan.slot_table,
            )  # fmt: skip
            return tuple(arenas), None

        counts = jnp.arange(1, STEPS + 1, dtype=jnp.int32)
        return jax.lax.scan(body, arenas, (counts, gradients))[0]

    zeros = jnp.zeros(plan.n)
    arenas = (plan.pack(PARAMS), *(zeros if has else None for has in _moments(rule)))
    gradients = jnp.stack([plan.pack(_gradient(t)) for t in range(1, STEPS + 1)])
    arenas = run(arenas, gradients)
    _assert_follows(plan, name, *arenas)
    for _ in range(4):
        arenas = run(arenas, gradients)
    free = _padding(plan)
    for arena in arenas:
        assert arena is None or not np.asarray(arena).view(np.uint32)[free].any()


def _moments(rule):
    return rule.has_mu, rule.has_nu


@pytest.mark.parametrize("name", ["nesterov coupled", "adamw", "lars nesterov"])
def test_padding_stays_zero_in_every_arena_for_a_hundred_steps(name):
    plan = _plan(CASES[name][0], precision="fp16", ema=rjax.Ema(0.9))
    step = rjax.make_train_step(rjax.stateless_loss(_linear), plan)

    @jax.jit
    def run(state, key):
        def body(state, key):
            def draw(w):
                return jax.random.normal(key, w.shape, jnp.float32)

            return step(state, jax.tree.map(draw, PARAMS))

        return jax.lax.scan(body, state, jax.random.split(key, 100))

    state, report = run(rjax.init_state(plan, PARAMS), jax.random.key(0))
    assert report.applied.all()
    _assert_padding_is_zero(plan, state)


def _optax_decay(plan):
    decay = {slot.leaf: slot.decay for slot in plan.slots}
    mask = jax.tree.unflatten(plan.treedef, [decay[i] for i in range(len(decay))])
    return functools.partial(optax.add_decayed_weights, WD, mask=mask), mask


def _optax_twin(name, plan):
    add_decay, mask = _optax_decay(plan)
    if name == "adamw":
        return optax.adamw(LR, B1, B2, EPS, weight_decay=WD, mask=mask)
    tx = {
        "sgd coupled": lambda: optax.sgd(LR),
        "momentum coupled": lambda: optax.sgd(LR, BETA),
        "nesterov coupled": lambda: optax.sgd(LR, BETA, nesterov=True),
        "adam": lambda: optax.adam(LR, B1, B2, EPS),
    }[name]()
    return optax.chain(add_decay(), tx)


def _run_optax(tx, params=PARAMS):
    """Train with Optax alone and return the weights."""

    @jax.jit
    def run(params, gradients):
        def body(carry, g):
            params, state = carry
            steps, state = tx.update(g, state, params)
            return (optax.apply_updates(params, steps), state), None

        return jax.lax.scan(body, (params, tx.init(params)), gradients)[0][0]

    return run(jax.tree.map(jnp.asarray, params), GRADIENTS)


TWINS = ["sgd coupled", "momentum coupled", "nesterov coupled", "adam", "adamw"]


@pytest.mark.standard_promotion  # stock Optax
@pytest.mark.parametrize("name", TWINS)
def test_optax_follows_the_same_reference(name):
    plan = _plan(CASES[name][0])
    step = CASES[name][1]
    if "adam" in name:
        step = functools.partial(step, one_minus_power=one_minus_power_cancelling)
    reference = _reference(name, step)
    leaves = jax.tree.leaves(_run_optax(_optax_twin(name, plan)))
    for slot in plan.slots:
        _assert_within(leaves[slot.leaf], reference[slot.path].w)


# Two programs of the same operations: each step, one contraction more or less in the
# update and one in adding it.
CONTRACTIONS = 2 * ROUNDINGS * STEPS


@pytest.mark.standard_promotion  # stock Optax
@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(LR, BETA, nesterov=True),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LR)),
        optax.chain(optax.clip(0.5), optax.trace(BETA), optax.scale(-LR)),
        optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(LR, 0.0, STEPS)),
        optax.MultiSteps(optax.adam(LR), 3),
    ],
    ids=["sgd", "clip adamw", "trace", "injected", "multi"],
)
def test_from_optax_is_optax(tx):
    scaling = rjax.scaling.static(1024.0)  # a power of two: exact
    plan = _plan(OPTIM.from_optax(tx), None, rule=None, scaling=scaling)
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    for t in range(1, STEPS + 1):
        state, report = step(state, _gradient(t))
        assert report.applied
    assert step._cache_size() == 1
    _assert_padding_is_zero(plan, state)
    found, alone = rjax.get_params(plan, state), _run_optax(tx)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        largest = np.maximum(abs(np.asarray(b)), 1.0)
        assert (abs(a - b) <= CONTRACTIONS * UNIT * largest).all()


@pytest.mark.standard_promotion  # stock Optax
def test_a_skip_leaves_no_trace_in_optax():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LR))
    plan = _plan(OPTIM.from_optax(tx), learning_rate=None)
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    state, _ = step(state, _gradient(1))
    bad = jax.tree.map(lambda g: g * np.float32(np.nan), _gradient(2))
    after, report = step(state, bad)
    assert not report.applied
    before = (state.master, state.opt_state)
    for a, b in zip(
        jax.tree.leaves((after.master, after.opt_state)),
        jax.tree.leaves(before),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def _one_slot(rule, w, u, mu=None, rows=1, adaptive=True, decay=True):
    """Apply one update at rate 1 to an arena of one slot."""
    table = SlotTable(rows=(rows,), decay=(decay,), adaptive=(adaptive,))
    full = functools.partial(np.resize, new_shape=rows * 128)
    arenas = [jnp.asarray(full(x), jnp.float32) for x in (w, u)]
    mu = jnp.zeros(rows * 128) if mu is None else mu
    return jax.jit(
        lambda w, u, mu: update(
            rule, w, u, mu, None,
            learning_rate=jnp.float32(1.0), count=jnp.int32(1), table=table,
        )
    )(*arenas, mu)  # fmt: skip


# A sum of 128 squares, a root, a quotient and a product: one rounding for each.
LARS_RTOL = ROUNDINGS * (128 + 5) * UNIT


@pytest.mark.parametrize(
    ("w_size", "u_size"),
    [(1.0, 1e25), (1.0, 3e36), (1e-8, 1e25), (1e25, 1e25), (1e25, 1.0), (1e-8, 1e-8)],
)
def test_lars_norms_neither_overflow_nor_underflow(w_size, u_size):
    signs = np.resize([1.0, -1.0, 0.5], 128)
    w, u = np.float32(w_size * signs), np.float32(u_size * signs[::-1])
    # Float64 of the float32 numbers; the ratio stops at 100.
    norm_w, norm_u = (np.linalg.norm(np.float64(x)) for x in (w, u))
    eta = min(TC * norm_w / (norm_u + 1e-8), 100.0)
    new = _one_slot(OPTIM.lars(BETA, trust_coefficient=TC), w, u)
    np.testing.assert_allclose(new.mu, eta * np.float64(u), LARS_RTOL)
    slack = LARS_RTOL * np.abs(eta * np.float64(u)) + ROUNDINGS * UNIT * np.abs(w)
    error = np.abs(np.asarray(new.master, np.float64) - (w - eta * np.float64(u)))
    assert (error <= slack).all()


@pytest.mark.parametrize(("w", "u"), [(0.0, 0.5), (1e-14, 0.5), (0.5, 0.0), (0.0, 0.0)])
def test_lars_ratio_is_one_where_a_norm_vanishes(w, u):
    new = _one_slot(OPTIM.lars(BETA, weight_decay=0.25), w, u)
    np.testing.assert_allclose(new.mu, u + 0.25 * w, ROUNDINGS * UNIT)


def test_lars_ratio_stops_at_a_hundred_in_each_slot():
    rule = OPTIM.lars(BETA, trust_coefficient=1.0, eps=0.0)
    table = SlotTable(rows=(1, 1, 1), decay=(False,) * 3, adaptive=(True, True, False))
    w = jnp.ones(3 * 128)
    u = jnp.repeat(jnp.array([2.0**-10, 2.0**-3, 2.0**-10]), 128)
    new = update(
        rule, w, u, jnp.zeros_like(w), None,
        learning_rate=jnp.float32(1.0), count=jnp.int32(1), table=table,
    )  # fmt: skip
    wanted = [100 * 2.0**-10, 8 * 2.0**-3, 2.0**-10]
    np.testing.assert_allclose(np.asarray(new.mu)[::128], wanted, LARS_RTOL)


def test_a_number_as_rate_is_replaced_without_compiling():
    plan = _plan(OPTIM.sgd())
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    for rate in (LR, 0.5, 0.25):
        before = state.replace(learning_rate=rate)
        state, report = step(before, _gradient(1))
        assert report.learning_rate == np.float32(rate)
        wanted = before.master - np.float32(rate) * plan.pack(_gradient(1))
        np.testing.assert_allclose(state.master, wanted, 0, 4 * ROUNDINGS * UNIT)
    assert step._cache_size() == 1


def test_a_schedule_counts_applied_steps():
    rates = jnp.array([1.0, 0.5, 0.25, 0.125], jnp.float32)
    plan = _plan(OPTIM.sgd(), learning_rate=lambda count: rates[count])
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    good, seen = _gradient(1), []
    bad = jax.tree.map(lambda g: g * np.float32(np.inf), good)
    for batch in (good, bad, bad, good, good):
        before = state
        state, report = step(state, batch)
        seen.append(float(report.learning_rate))
        if report.applied:
            wanted = before.master - seen[-1] * plan.pack(good)
            np.testing.assert_allclose(state.master, wanted, 0, 4 * ROUNDINGS * UNIT)
    assert seen == [1.0, 0.5, 0.5, 0.5, 0.25]
    assert (int(state.step), int(state.applied_steps)) == (5, 3)


@pytest.mark.standard_promotion  # stock Optax
def test_an_optax_schedule_drops_in():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 3, 10)
    plan = _plan(OPTIM.sgd(), learning_rate=schedule)
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    for t in range(4):
        state, report = step(state, _gradient(1))
        np.testing.assert_allclose(report.learning_rate, schedule(t), 1e-6)


def test_a_rate_that_turns_bad_skips():
    plan = _plan(
        OPTIM.sgd(),
        learning_rate=lambda count: jnp.where(count < 1, jnp.float32(1.0), jnp.nan),
    )
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    state, report = step(state, _gradient(1))
    assert report.applied
    after, report = step(state, _gradient(2))
    assert not report.applied and not report.bad_slots.any()
    np.testing.assert_array_equal(after.master, state.master)


ZEROS = jax.tree.map(np.zeros_like, PARAMS)
ELEMENTS = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
# A sum of squares over the arena, a root, two quotients and a product.
CLIP_RTOL = ROUNDINGS * (ELEMENTS + 5) * UNIT


@pytest.fixture(scope="module", params=[1.0, 2.0**13], ids=["unscaled", "scaled"])
def clipping(request):
    """A step at rate 1 from zero weights: minus the clipped gradient remains."""
    plan = _plan(
        OPTIM.sgd(),
        learning_rate=1.0,
        clip=rjax.Clip(norm=0.5),
        scaling=rjax.scaling.static(request.param),
    )
    return plan, _step(plan)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 1.0, 1e30, 1e33])
def test_the_norm_clip_is_safe_at_any_size(clipping, size):
    plan, step = clipping
    u = jax.tree.map(lambda g: np.float32(size) * g, _gradient(1))
    state, report = step(rjax.init_state(plan, ZEROS), u)
    flat = np.float64(plan.pack(u))
    norm = np.linalg.norm(flat)
    assert report.applied
    np.testing.assert_allclose(np.float64(report.grad_norm), norm, CLIP_RTOL)
    wanted = flat * (min(1.0, 0.5 / norm) if norm else 1.0)
    np.testing.assert_allclose(np.float64(-state.master), wanted, CLIP_RTOL)


def test_the_clip_comes_before_decay_and_momentum():
    rule = OPTIM.momentum(BETA, WD, "coupled")
    plan = _plan(rule, learning_rate=1.0, clip=rjax.Clip(value=0.25))
    step, state = _step(plan), rjax.init_state(plan, PARAMS)
    state, _ = step(state, _gradient(1))
    for slot in plan.slots:
        w, u = (
            np.float64(jax.tree.leaves(tree)[slot.leaf])
            for tree in (PARAMS, _gradient(1))
        )
        wanted = np.clip(u, -0.25, 0.25) + (WD * w if slot.decay else 0.0)
        mu = jax.tree.leaves(plan.unpack(state.mu))[slot.leaf]
        np.testing.assert_allclose(mu, wanted, 0, 4 * ROUNDINGS * UNIT)


# Beyond 2^24 a float32 that counts by ones stands still. Sums by rows of 128 round
# once a row at most and XLA sums in blocks; a few dozen roundings are generous.
LARGE = 2**24 + 3 * 2**20
LARGE_RTOL = 64 * UNIT


def test_the_norm_of_a_large_arena_does_not_saturate():
    found = jax.jit(check_finite)(jnp.ones(LARGE, jnp.float32), jnp.float32(1.0))
    assert not found.flag
    np.testing.assert_allclose(found.norm, np.sqrt(LARGE), LARGE_RTOL)


def test_lars_norms_of_a_large_slot_do_not_saturate():
    u = np.zeros(LARGE, np.float32)
    u[0] = 1.0
    rule = OPTIM.lars(0.0, trust_coefficient=2.0**-10, eps=0.0)
    new = _one_slot(rule, np.float32(1.0), u, rows=LARGE // 128)
    wanted = np.sqrt(LARGE) * 2.0**-10
    np.testing.assert_allclose(new.mu[0], wanted, LARGE_RTOL)
