"""Any Optax transformation under the gate: per-layer, stateful, masked, asking."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rjax
from rjax.trees import flatten

pytestmark = pytest.mark.standard_promotion  # stock Optax

STEPS, LR, WD = 20, 1 / 8, 1 / 32
RNG = np.random.default_rng(0)


def _drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {
    "norm": {"bias": _drawn(5), "scale": _drawn(5)},
    "conv": {"kernel": _drawn(3, 3, 2, 4)},
    "dense": {"bias": _drawn(20), "kernel": _drawn(7, 20)},
}
# Of half precision already, so that what a kernel's gradient passes through is exact.
GRADIENTS = jax.tree.map(
    lambda w: _drawn(STEPS, *w.shape).astype(np.float16).astype(np.float32), PARAMS
)


def _kernels(tree):
    return jax.tree.map(lambda w: np.ndim(w) >= 2, tree)


def _labels(tree):
    return jax.tree.map(lambda w: "wide" if np.ndim(w) >= 2 else "flat", tree)


def _gradient(t):
    return jax.tree.map(lambda g: g[t], GRADIENTS)


def _linear(params, batch):
    terms = jax.tree.map(lambda w, g: jnp.sum(w.astype(g.dtype) * g), params, batch)
    return sum(jax.tree.leaves(terms))


def _plan(optimizer, precision="fp16", rule=None, rate: Any = None, **options):
    config = rjax.Config(
        precision=precision, optimizer=optimizer, learning_rate=rate, **options
    )
    return rjax.make_plan(PARAMS, config, rule=rule)


def _trained(plan, steps=STEPS, bad=()):
    """Return the state after all steps, those in `bad` with an infinite gradient."""
    step: Any = jax.jit(rjax.make_train_step(rjax.stateless_loss(_linear), plan))
    state = rjax.init_state(plan, PARAMS)
    for t in range(steps):
        if t in bad:
            infinite = jax.tree.map(lambda g: g * np.float32(np.inf), _gradient(t))
            state, _ = step(state, infinite)
        before = state
        state, report = step(state, _gradient(t))
        assert report.applied, before
    assert step._cache_size() == 1
    return state


def _alone(tx):
    """Train by Optax alone, on the tree."""

    @jax.jit
    def step(params, state, gradient):
        moves, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, moves), state

    params: Any = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for t in range(STEPS):
        params, state = step(params, state, _gradient(t))
    return params


# Each step rounds a dozen intermediates of a weight's size or less, each program in its
# own way.
BOUND = 12 * STEPS * 2.0**-24


def _assert_near(found, wanted, bound=BOUND):
    for (path, a), (_, b) in zip(flatten(found)[0], flatten(wanted)[0], strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        largest = max(1.0, abs(b).max())
        assert abs(a - b).max() <= bound * largest, (path, abs(a - b).max())


TRANSFORMATIONS = {
    "lamb": lambda: optax.lamb(LR, weight_decay=WD),
    "lars": lambda: optax.lars(LR, weight_decay=WD, trust_coefficient=0.1),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(LR), 3),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(WD), _kernels),
        optax.masked(optax.trace(0.9), _kernels(PARAMS)),
        optax.scale(-LR),
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"wide": optax.lamb(LR), "flat": optax.sgd(LR, 0.9)}, _labels
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(LR, 0.0, STEPS)
    ),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.5), optax.sgd(LR)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_equals_optax_alone_and_a_skip_leaves_no_trace(name):
    tx = TRANSFORMATIONS[name]()
    plan = _plan(rjax.optim.from_optax(tx))
    state = _trained(plan, bad=(0, 7))
    assert int(state.skipped) == 2 and float(state.scale) == 2048.0
    _assert_near(rjax.get_params(plan, state), _alone(tx))


def test_the_bound_tells_transformations_apart():
    ends = {
        name: _alone(TRANSFORMATIONS[name]()) for name in ("lamb", "lars", "masked")
    }
    for one, other in (("lamb", "lars"), ("lars", "masked")):
        with pytest.raises(AssertionError):
            _assert_near(ends[one], ends[other], 100 * BOUND)


def _decayed(tx):
    return optax.chain(optax.add_decayed_weights(WD, mask=_kernels), tx)


ELEMENTWISE = {
    "sgd": (rjax.optim.sgd(WD, "coupled"), _decayed(optax.sgd(LR))),
    "momentum": (
        rjax.optim.momentum(0.9, WD, "coupled"),
        _decayed(optax.sgd(LR, 0.9)),
    ),
    "nesterov": (
        rjax.optim.nesterov(0.9, WD, "coupled"),
        _decayed(optax.sgd(LR, 0.9, nesterov=True)),
    ),
    "adam": (rjax.optim.adam(weight_decay=WD), _decayed(optax.adam(LR))),
    "adamw": (
        rjax.optim.adamw(weight_decay=WD),
        optax.adamw(LR, weight_decay=WD, mask=_kernels),
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_native_optimizer_and_optax_agree_to_rounding(name):
    native, tx = ELEMENTWISE[name]
    own, other = _plan(native, rate=LR), _plan(rjax.optim.from_optax(tx))
    # Optax's bias correction 1 - b^t cancels: up to 1e-3 / 2^-24 roundings more at t=1.
    bound = BOUND if "adam" not in name else BOUND + 2e-4
    _assert_near(
        rjax.get_params(own, _trained(own)),
        rjax.get_params(other, _trained(other)),
        bound,
    )


def test_an_optax_schedule_is_a_learning_rate_of_applied_steps():
    schedule = optax.warmup_cosine_decay_schedule(0.0, LR, 5, STEPS)
    own = _plan(rjax.optim.sgd(), rate=schedule)
    other = _plan(rjax.optim.from_optax(optax.sgd(schedule)))
    found = rjax.get_params(own, _trained(own, bad=(2, 9)))
    _assert_near(found, rjax.get_params(other, _trained(other, bad=(3,))))
    _assert_near(found, _alone(optax.sgd(schedule)))


def _frozen(path, leaf):
    return rjax.Param(trainable=path != "dense/kernel" and path != "norm/scale")


@pytest.mark.parametrize(
    "optimizer",
    [
        rjax.optim.sgd(0.5),
        rjax.optim.momentum(0.9, 0.5),
        rjax.optim.nesterov(0.9, 0.5, "coupled"),
        rjax.optim.adam(weight_decay=0.5),
        rjax.optim.adamw(weight_decay=0.5),
        rjax.optim.lars(weight_decay=0.5),
        rjax.optim.from_optax(optax.adamw(LR, weight_decay=0.5)),
        rjax.optim.from_optax(optax.lamb(LR, weight_decay=0.5)),
        rjax.optim.from_optax(
            optax.multi_transform(
                {"wide": optax.adamw(LR), "flat": optax.sgd(LR)}, _labels
            )
        ),
    ],
    ids=lambda o: type(o).__name__,
)
def test_frozen_weights_keep_their_bits_and_are_kept_once(optimizer):
    native = not isinstance(optimizer, rjax.optim.OptaxOptimizer)
    plan = _plan(optimizer, rule=_frozen, rate=LR if native else None)
    before = rjax.init_state(plan, PARAMS).frozen
    state = _trained(plan, steps=3)
    assert sorted(state.frozen) == ["dense/kernel", "norm/scale"]
    kernel = state.frozen["dense/kernel"]
    assert kernel.dtype == jnp.float16 and kernel.shape == (7, 20)
    for path, leaf in state.frozen.items():
        assert np.asarray(leaf).tobytes() == np.asarray(before[path]).tobytes()
    # Nothing else of the state has their sizes, or a slot for them.
    assert {slot.path for slot in plan.slots}.isdisjoint(state.frozen)
    others = [x for f, x in flatten(state)[0] if not f.startswith("frozen")]
    assert all(np.shape(x) != (7, 20) for x in others)
    assert all(np.size(x) <= plan.n for x in others)


@pytest.mark.parametrize("whole", [False, True])
def test_labels_of_the_tree_may_count_the_frozen_ones(whole):
    labels: Any = _labels(PARAMS) if whole else _labels
    transforms: Any = {"wide": optax.sgd(LR), "flat": optax.set_to_zero()}
    tx = optax.multi_transform(transforms, labels)
    plan = _plan(rjax.optim.from_optax(tx), rule=_frozen)
    found = rjax.get_params(plan, _trained(plan, 1))
    moved = PARAMS["conv"]["kernel"] - LR * GRADIENTS["conv"]["kernel"][0]
    np.testing.assert_allclose(found["conv"]["kernel"], moved, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found["dense"]["bias"], PARAMS["dense"]["bias"])


@pytest.mark.parametrize("labels", [{"norm": "wide"}, lambda tree: "steep"])
def test_labels_that_do_not_fit_are_told_in_one_sentence(labels):
    tx = optax.multi_transform({"wide": optax.sgd(LR)}, labels)
    plan = _plan(rjax.optim.from_optax(tx))
    with pytest.raises(ValueError, match="`init` does not work on the trainable"):
        rjax.init_state(plan, PARAMS)


def test_what_asks_for_the_loss_and_the_gradient_gets_them():
    seen = {}

    def update(updates, state, params=None, *, value, grad, **extra):
        seen.update(value=value.dtype, extra=set(extra))
        scaled = jax.tree.map(lambda u, g: (u - g) + value, updates, grad)
        return scaled, state

    asks: Any = update
    tx = optax.GradientTransformationExtraArgs(lambda params: (), asks)
    chained = optax.chain(optax.identity(), tx)
    for each in (chained, optax.MultiSteps(chained, 1)):
        plan = _plan(rjax.optim.from_optax(each))
        step = jax.jit(rjax.make_train_step(rjax.stateless_loss(_linear), plan))
        state = rjax.init_state(plan, PARAMS)
        after, report = step(state, _gradient(0))
        assert seen == {"value": jnp.float32, "extra": set()}
        moved = rjax.get_params(plan, after)["dense"]["bias"] - PARAMS["dense"]["bias"]
        np.testing.assert_allclose(moved, report.loss, rtol=1e-5)


def test_a_rate_that_follows_the_loss():
    tx = optax.chain(
        optax.sgd(LR),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.0, atol=1e9),
    )
    plan = _plan(rjax.optim.from_optax(tx))
    scale = [x for f, x in flatten(_trained(plan, 4).opt_state)[0] if "scale" in f]
    assert float(scale[0]) < 1.0


def test_a_line_search_is_refused_in_one_sentence():
    plan = _plan(rjax.optim.from_optax(optax.lbfgs()))
    step = rjax.make_train_step(rjax.stateless_loss(_linear), plan)
    with pytest.raises(NotImplementedError, match="value_fn.*it gives `value`"):
        jax.eval_shape(step, rjax.init_state(plan, PARAMS), _gradient(0))


def _stateful(start, move):
    """Return a transformation with a state of its own and the updates of SGD."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: -LR * u, updates), move(state)

    return optax.GradientTransformation(lambda params: start, update)


@pytest.mark.parametrize("start", [0, 0.0, np.float32(0), True])
def test_numbers_in_a_state_become_arrays_that_a_skip_keeps(start):
    move: Any = (lambda s: {"n": s["n"] + 1}) if start is not True else dict
    tx = _stateful({"n": start}, move)
    plan = _plan(rjax.optim.from_optax(tx))
    state = _trained(plan, 3, bad=(1,))
    assert float(state.opt_state["n"]) == (1 if start is True else 3)
    assert not state.opt_state["n"].weak_type


@pytest.mark.parametrize(
    ("start", "move", "match"),
    [
        ({"n": 0}, lambda s: {"n": s["n"] + 0.5}, "'n' was .*int32.* became .*float32"),
        ({"n": np.zeros(2)}, lambda s: {"n": np.zeros(3)}, r"'n' was \(\(2,\)"),
        ({"n": 0}, lambda s: {"m": s["n"]}, "keep its structure"),
        ({"n": "fast"}, dict, "'n' is a str"),
    ],
)
def test_a_state_that_cannot_be_carried_is_refused_by_path(start, move, match):
    plan = _plan(rjax.optim.from_optax(_stateful(start, move)))
    step = rjax.make_train_step(rjax.stateless_loss(_linear), plan)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(step, rjax.init_state(plan, PARAMS), _gradient(0))


@pytest.mark.parametrize("tx", [optax.adam, 0.1, None, functools.partial(optax.sgd)])
def test_what_is_no_transformation_is_refused(tx):
    with pytest.raises(ValueError, match=r"takes an optax\.GradientTransformation"):
        rjax.optim.from_optax(tx)


def test_a_rate_given_twice_is_refused():
    with pytest.raises(ValueError, match="`learning_rate` must be None"):
        rjax.Config(optimizer=rjax.optim.from_optax(optax.sgd(LR)), learning_rate=LR)


def test_the_state_is_recorded():
    plan = _plan(rjax.optim.from_optax(optax.MultiSteps(optax.adam(LR), 2)))
    state = _trained(plan, 2)
    names = [tensor.name for tensor in rjax.repro.tensors(plan, state)]
    assert any("opt_state" in n and "mini_step" in n for n in names)
    digest = jax.jit(rjax.repro.digest, static_argnums=0)
    before, after = (digest(plan, s) for s in (rjax.init_state(plan, PARAMS), state))
    moved = {
        name
        for name, a, b in zip(names, before.tolist(), after.tolist(), strict=True)
        if a != b
    }
    assert any("opt_state" in n and "dense/kernel" in n for n in moved)


def test_a_transformation_as_it_is_gets_the_remedy():
    tx: Any = optax.adam(LR)
    with pytest.raises(ValueError, match=r"Optimizer, got .*; wrap it in rjax.optim"):
        rjax.Config(optimizer=tx)
