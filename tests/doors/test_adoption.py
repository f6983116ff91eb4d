"""Loss scaling, finite check and gated apply in a loop of one's own."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import fresh_process

import rjax

KEY = jax.random.key(3)
RATE = 0.125  # a power of two: contracted or not, the update has the same bits
BAD = 4  # the step whose batch is infinite
DIGITS = rjax.data.load_digits().train
BATCHES = list(rjax.data.train_batches(DIGITS, 16, stop=10))
BATCHES[BAD] = (np.full_like(BATCHES[BAD][0], np.inf), BATCHES[BAD][1])
CROSS_ENTROPY = rjax.ops.softmax_cross_entropy


def _bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _by_halves(loss_fn, precision, update):
    """Return one step of a loop of one's own: (mine, scaling), i, batch."""

    def step(carry, inputs):
        (params, moments, stats), scaling = carry
        i, batch = inputs
        key = jax.random.fold_in(jax.random.fold_in(KEY, i), 0)
        view = rjax.compute_view(params, precision)
        run = rjax.scaled_value_and_grad(loss_fn, scaling, has_aux=True)
        (loss, (new_stats, _)), grads = run(view, stats, batch, key)

        def moved(grads, mine):
            params, moments, _ = mine
            return *update(grads, params, moments), new_stats

        mine, scaling, applied = rjax.apply_gated(
            moved, scaling, grads, (params, moments, stats), check=new_stats
        )
        return (mine, scaling), (loss, applied, scaling.scale)

    return step


def _sgd(grads, params, moments):
    return jax.tree.map(lambda w, g: w - RATE * g, params, grads), moments


def _both_ways(
    model, precision, optimizer, update, moments=(), rate: float | None = RATE
):
    """Train by the train step and by halves; return what each ends with."""
    variables = jax.jit(model.init)(jax.random.key(0), DIGITS[0][:1])
    params, stats = variables["params"], variables.get("batch_stats", {})
    loss_fn = rjax.linen_loss(model, CROSS_ENTROPY)
    config = rjax.Config(precision=precision, optimizer=optimizer, learning_rate=rate)
    plan = rjax.make_plan(params, config, stats)
    state = rjax.init_state(plan, params, stats, KEY)
    step = jax.jit(rjax.make_train_step(loss_fn, plan))
    half: Any = jax.jit(_by_halves(loss_fn, precision, update))
    carry = (params, moments, stats), rjax.LossScale.init(config.scale_rule)
    for i, batch in enumerate(BATCHES):
        state, report = step(state, batch)
        carry, (loss, applied, scale) = half(carry, (jnp.int32(i), batch))
        assert bool(applied) == bool(report.applied) == (i != BAD)
        assert float(scale) == float(state.scale)
        same = np.asarray(loss) == np.asarray(report.loss)
        yield (plan, state), carry, bool(same | np.isnan(loss))
    assert half._cache_size() == 1
    _, scaling = carry
    assert int(scaling.skipped) == int(state.skipped) == 1
    assert int(scaling.consecutive_skips) == 0


@pytest.mark.parametrize(
    ("model", "precision"),
    [(rjax.nn.CNN(10, width=2), "fp16"), (rjax.nn.MLP((24,), 10, dropout=0.2), "bf16")],
    ids=["cnn-fp16", "mlp-bf16"],
)
def test_the_bits_of_the_train_step(model, precision):
    for (plan, state), ((params, _, stats), _), same in _both_ways(
        model, precision, rjax.optim.sgd(), _sgd
    ):
        assert same, "the losses differ"
        assert _bits(params) == _bits(rjax.get_params(plan, state))
        assert _bits(stats) == _bits(state.batch_stats)


@pytest.mark.standard_promotion  # stock Optax
def test_the_numbers_of_the_train_step_with_optax():
    tx, model = optax.adamw(1e-2), rjax.nn.MLP((24,), 10)

    def update(grads, params, opt_state):
        steps, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, steps), opt_state

    params = jax.jit(model.init)(jax.random.key(0), DIGITS[0][:1])["params"]
    moments = tx.init(params)
    optimizer = rjax.optim.from_optax(tx)
    for (plan, state), ((params, _, _), _), _ in _both_ways(
        model, "fp16", optimizer, update, moments, None
    ):
        pairs = zip(
            jax.tree.leaves(params),
            jax.tree.leaves(rjax.get_params(plan, state)),
            strict=True,
        )
        # Each of ten steps of at most 1e-2 differs by roundings of the two programs.
        assert all(np.allclose(a, b, rtol=0, atol=1e-5) for a, b in pairs)


def _linear(view, gradient):
    """A loss of a known gradient."""
    terms = jax.tree.map(
        lambda w, g: jnp.sum(w.astype(jnp.float32) * g), view, gradient
    )
    return sum(jax.tree.leaves(terms), start=jnp.zeros((), jnp.float32))


def _w(*values, dtype=jnp.float32):
    return jnp.asarray(values, dtype)


def _step(gradient, w, scaling, **options):
    loss, grads = rjax.scaled_value_and_grad(_linear, scaling)(w, gradient)
    return rjax.apply_gated(lambda g, w: w - 0.5 * g, scaling, grads, w, **options)


def test_scale_and_counters_follow_the_rule_over_a_scan():
    gradients = jnp.stack([_w(g) for g in (1.0, np.nan, np.inf, 1.0, -np.inf)])

    @jax.jit
    def run(w, scaling):
        def body(carry, gradient):
            w, scaling, applied = _step(gradient, *carry)
            told = scaling.scale, scaling.skipped, scaling.consecutive_skips, applied
            return (w, scaling), told

        return jax.lax.scan(body, (w, scaling), gradients)

    (w, scaling), told = run(_w(4.0), rjax.LossScale.init())
    scale, skipped, consecutive, applied = (x.tolist() for x in told)
    assert scale == [8192, 4096, 2048, 2048, 1024]
    assert skipped == [0, 1, 2, 2, 3] and consecutive == [0, 1, 2, 0, 1]
    assert applied == [True, False, False, True, False]
    assert float(w[0]) == 3.0


def test_a_growing_rule_counts_within_the_state():
    scaling = rjax.LossScale.init(rjax.scaling.dynamic(init=4.0, interval=2))
    w = _w(1.0)
    scales = []
    for _ in range(4):
        w, scaling, _ = _step(_w(1.0), w, scaling)
        scales.append(float(scaling.scale))
    assert scales == [4, 8, 8, 16]
    copy = jax.tree.map(lambda x: x, scaling)
    assert copy == scaling and copy.rule is scaling.rule


def test_the_scale_reaches_the_backward_pass_before_its_first_half_value():
    # 1e-9 is flushed in half precision, 8192e-9 is 137 * 2^-24.
    def loss(w):
        return (jnp.float32(1e-9) * w.astype(jnp.float32)).sum()

    value, grads = rjax.scaled_value_and_grad(loss, rjax.LossScale.init())(
        jnp.zeros((1, 1), jnp.float16)
    )
    assert float(grads[0, 0]) == 137 * 2.0**-24 / 8192 and grads.dtype == jnp.float32
    assert float(value) == 0.0


def test_a_half_loss_is_scaled_in_float32_and_told_unscaled():
    value, grads = rjax.scaled_value_and_grad(jnp.sum, rjax.LossScale.init())(
        _w(8.0, dtype=jnp.float16)
    )
    assert float(value) == 8.0 and value.dtype == jnp.float32
    assert float(grads[0]) == 1.0


def test_a_gradient_beyond_half_precision_skips():
    def loss(w):
        return (w.astype(jnp.float32) * 9.0).sum()

    w, scaling = jnp.ones((1, 1), jnp.float16), rjax.LossScale.init()
    for wanted in (np.inf, 9.0):  # 73728, then 36864
        _, grads = rjax.scaled_value_and_grad(loss, scaling)(w)
        assert float(grads[0, 0]) == wanted
        _, scaling, applied = rjax.apply_gated(lambda g, w: w, scaling, grads, w)
        assert bool(applied) == np.isfinite(wanted)


def test_arguments_and_returns_are_those_of_value_and_grad():
    def loss(a, x, b, *, power):
        return ((a["w"] * x).sum() * b).sum() ** power, {"x": x}

    arguments = {"w": _w(2.0, 3.0)}, _w(1.0, 2.0), _w(0.5)
    for argnums in (0, (2, 0), -1, [0]):
        options = {"argnums": argnums, "has_aux": True}
        run = rjax.scaled_value_and_grad(loss, rjax.LossScale.init(), **options)
        wanted = jax.value_and_grad(
            loss, tuple(argnums) if isinstance(argnums, list) else argnums, True
        )(*arguments, power=2)
        found = run(*arguments, power=2)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)


def test_dense_gives_its_unrounded_weight_gradient():
    # 2049 is no float16; each term is.
    x = jnp.ones((2049, 1), jnp.float16)
    kernel = jnp.ones((1, 1), jnp.float16)
    scaling = rjax.LossScale.init(rjax.scaling.off())

    def loss(kernel, x):
        return rjax.ops.dense(x, kernel).astype(jnp.float32).sum()

    _, grads = rjax.scaled_value_and_grad(loss, scaling)(kernel, x)
    assert float(grads[0, 0]) == 2049.0
    _, grads = rjax.scaled_value_and_grad(
        lambda k, x: (x @ k).astype(jnp.float32).sum(), scaling
    )(kernel, x)
    assert float(grads[0, 0]) == 2048.0


def test_several_losses_have_one_flag():
    scaling, state = rjax.LossScale.init(), {"g": _w(1.0), "d": _w(1.0)}
    good, bad = {"g": _w(1.0)}, {"d": _w(np.nan)}

    def update(grads, state):
        generator, discriminator = grads
        return {"g": state["g"] - generator["g"], "d": state["d"] - discriminator["d"]}

    after, halved, applied = rjax.apply_gated(update, scaling, (good, bad), state)
    assert not applied and _bits(after) == _bits(state)
    assert float(halved.scale) == 4096.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["statistics", "rate", "half", "last"])
def test_whatever_is_bad_skips_and_keeps_every_bit(value, kind):
    grads = {"a": jnp.ones(129), "n": jnp.ones((), jnp.int32), "none": None}
    check = ()
    if kind == "last":
        grads["a"] = grads["a"].at[-1].set(value)
    elif kind == "half":
        grads["b"] = _w(value, dtype=jnp.bfloat16)
    else:
        check = {"statistics": {"mean": _w(0.0, value)}, "rate": np.float32(value)}[
            kind
        ]
    state = {"w": _w(-0.0, 1.0), "count": 3, "key": KEY}
    moved, scaling, applied = jax.jit(
        lambda state: rjax.apply_gated(
            lambda g, s: {**s, "w": s["w"] * np.float32(np.nan), "count": 4},
            rjax.LossScale.init(),
            grads,
            state,
            check=check,
        )
    )(state)
    assert not applied and float(scaling.scale) == 4096.0
    assert np.asarray(moved["w"]).tobytes() == np.asarray(state["w"]).tobytes()
    assert int(moved["count"]) == 3 and moved["key"] == KEY


def test_zero_gradients_are_a_good_step():
    w, scaling, applied = _step(_w(0.0), _w(1.0), rjax.LossScale.init())
    assert applied and float(w[0]) == 1.0 and float(scaling.scale) == 8192.0


def test_under_vmap_each_decides_for_itself():
    run = jax.vmap(_step, in_axes=(0, 0, None))
    gradients = jnp.stack([_w(1.0), _w(np.nan)])
    w, scaling, applied = run(gradients, jnp.ones((2, 1)), rjax.LossScale.init())
    assert applied.tolist() == [True, False]
    assert w.ravel().tolist() == [0.5, 1.0]
    assert scaling.scale.tolist() == [8192.0, 4096.0]


def test_over_devices_all_average_in_float32_and_decide_together():
    flags = os.environ.get("XLA_FLAGS", "")
    count = "--xla_force_host_platform_device_count=2"
    script = "from doors.over_devices import main; main()"
    assert fresh_process(script, XLA_FLAGS=f"{flags} {count}") == "done"


def test_the_view_is_that_of_the_train_step():
    params = {
        "norm": {"scale": jnp.ones(3), "bias": jnp.zeros(3)},
        "conv": {"kernel": jnp.full((1, 1, 1, 3), 65520.0)},
        "dense": {"kernel": jnp.full((3, 2), 1.0004), "bias": _w(1.0004, 2.0)},
        "frozen": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "wide": {"kernel": jnp.ones((2, 2))},
    }

    def rule(path, leaf):
        if "wide" in path:
            return rjax.Param(precision="float32")
        return rjax.Param(trainable=False) if "frozen" in path else None

    found = jax.jit(lambda p: rjax.compute_view(p, "fp16", rule))(params)
    plan = rjax.make_plan(params, rjax.Config(), rule=rule)
    with pytest.warns(UserWarning, match="beyond the range"):
        state = rjax.init_state(plan, params)
    wanted = rjax.get_params(plan, state, "compute")
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and _bits(a) == _bits(b)
    assert jnp.isinf(found["conv"]["kernel"]).all()


def test_what_cannot_be_is_said_in_one_sentence():
    w, rule = _w(1.0), rjax.scaling.halving()
    wrong_calls = [
        (lambda: rjax.LossScale.init(8192.0), "`rule` must be a rule"),  # pyright: ignore[reportArgumentType]
        (lambda: rjax.scaled_value_and_grad(jnp.sum, rule), "rjax.LossScale"),  # pyright: ignore[reportArgumentType]
        (lambda: rjax.apply_gated(max, 2.0, w, w), "got float; make one"),  # pyright: ignore[reportArgumentType]
        (lambda: _differentiate(lambda w: w), r"scalar, got float32\[1\]; take"),
        (lambda: _differentiate(lambda w: (w.sum(), 1)), "scalar, got <class 'tuple'>"),
        (lambda: _differentiate(lambda w: jnp.sum(w > 0)), r"got int32\[\]"),
        (lambda: _differentiate(jnp.sum, has_aux=True), r"\(loss, aux\)"),
        (lambda: _differentiate(jnp.sum, argnums=1), "names argument 1, but 1"),
        (lambda: _differentiate(lambda w: 1.0, {"n": 3}), "'n' must be floating"),
        (lambda: rjax.compute_view({}), "no leaves"),
        (lambda: rjax.compute_view({"w": w}, "fp8"), "`precision` must be"),
    ]
    for call, match in wrong_calls:
        with pytest.raises(ValueError, match=match):
            call()


def _differentiate(loss, w=None, **options):
    w = _w(1.0) if w is None else w
    return rjax.scaled_value_and_grad(loss, rjax.LossScale.init(), **options)(w)


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        ({"w": jnp.ones(2), "x": 1.0}, r"has 'x' too much"),
        ({}, r"lacks 'w'"),
        ({"w": jnp.ones(3)}, r"'w' was float32\[2\] and became float32\[3\]"),
        ({"w": jnp.ones(2, jnp.float16)}, r"became float16\[2\]"),
        (None, r"lacks 'w'"),
    ],
)
def test_an_update_that_returns_another_tree_is_refused_by_path(returned, match):
    state = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=match):
        rjax.apply_gated(lambda g, s: returned, rjax.LossScale.init(), state, state)
