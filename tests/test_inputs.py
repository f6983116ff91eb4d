"""Bad input ends in one sentence that names what is wrong."""

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rjax as typed

rjax: Any = typed  # every call here is wrong on purpose
NAN, INF = float("nan"), float("inf")
PARAMS = {"dense": {"bias": np.ones(2, np.float32), "kernel": np.ones((3, 2), "f4")}}
STATS = {"bn": {"mean": np.zeros(2, np.float32)}}
CONFIG = rjax.Config()


@contextlib.contextmanager
def refused(match, kind: type[Exception] = ValueError):
    """Expect an error of one line that matches and ends as a sentence does."""
    with pytest.raises(kind, match=match) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", ";")), message
    assert caught.value.__cause__ is None


def _plan(config=CONFIG, params=PARAMS, **options):
    return rjax.make_plan(params, config, **options)


def _with(leaf):
    return {"dense": {**PARAMS["dense"], "kernel": leaf}}


@pytest.mark.parametrize("empty", [{}, None, [], {"a": {}, "b": None}])
def test_empty_trees(empty):
    with refused("`params` has no leaves"):
        _plan(params=empty)


NOT_FLOATING = {
    "int32": np.ones((3, 2), np.int32),
    "uint8": np.ones((3, 2), np.uint8),
    "bool": np.ones((3, 2), bool),
    "complex64": np.ones((3, 2), np.complex64),
    "key<fry>": jax.random.split(jax.random.key(0), (3, 2)),
    "int64": 3,
}


@pytest.mark.parametrize("dtype", NOT_FLOATING)
def test_leaves_that_are_not_floating(dtype):
    message = f"Parameter 'dense/kernel' must be floating, got {dtype};"
    with refused(message):
        _plan(params=_with(NOT_FLOATING[dtype]))
    plan = _plan()
    state = rjax.init_state(plan, PARAMS)
    with refused(message):
        rjax.init_state(plan, _with(NOT_FLOATING[dtype]))
    with refused(message):
        rjax.replace_params(plan, state, _with(NOT_FLOATING[dtype]))


@pytest.mark.parametrize(
    "leaf", ["weights", None, object()], ids=["text", "none", "object"]
)
def test_leaves_that_are_no_arrays(leaf):
    plan = _plan()
    with refused("'dense/kernel'"):
        rjax.init_state(plan, _with(leaf))


WRONG_TREES = {
    r"'dense/kernel' must have shape \[3, 2\], got \[2, 3\]": _with(np.ones((2, 3))),
    r"'dense/kernel' must have shape \[3, 2\], got \[6\]": _with(np.ones(6)),
    r"'dense/kernel' must have shape \[3, 2\], got \[\]": _with(1.0),
    "lacks 'dense/bias'": {"dense": {"kernel": np.ones((3, 2))}},
    "has 'dense/gain' too much": {"dense": {**PARAMS["dense"], "gain": np.ones(2)}},
    "has 'head' too much": {**PARAMS, "head": np.ones(2)},
    "lacks 'dense/bias'|lacks 'dense/kernel'": {},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_TREES)
def test_trees_that_are_not_the_plans(message):
    plan = _plan()
    state = rjax.init_state(plan, PARAMS)
    with refused(message):
        rjax.init_state(plan, WRONG_TREES[message])
    with refused(message):
        rjax.replace_params(plan, state, WRONG_TREES[message])


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e300])
def test_weights_that_are_not_finite(value):
    plan = _plan(rjax.Config(precision="bf16"))
    state = rjax.init_state(plan, PARAMS)
    kernel = np.ones((3, 2), np.float64)
    kernel[1, 1] = value
    message = "`params` leaf 'dense/kernel' has values that are not finite in float32"
    with refused(message):
        rjax.init_state(plan, _with(kernel))
    with refused(message):
        rjax.replace_params(plan, state, _with(kernel))


def test_frozen_weights_that_are_not_finite():
    def rule(path, leaf):
        return rjax.Param(trainable="kernel" not in path)

    plan = _plan(rule=rule)
    with refused("'dense/kernel' has values that are not finite in float16"):
        rjax.init_state(plan, _with(np.full((3, 2), 1e6, np.float32)))
    with refused("`params` lacks the frozen parameter 'dense/kernel'"):
        rjax.init_state(plan, _with(None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"`batch_stats` must hold 'bn/mean' of shape \[2\]"),
        ({}, r"`batch_stats` must hold 'bn/mean' of shape \[2\]"),
        ({"bn": {"mean": np.zeros(3)}}, r"`batch_stats` must hold 'bn/mean'"),
        ({"bn": {"var": np.zeros(2)}}, r"`batch_stats` must hold 'bn/mean'"),
        ({**STATS, "extra": np.zeros(2)}, "`batch_stats` has 'extra' too much"),
    ],
)
def test_statistics_that_are_not_the_plans(given, message):
    plan = _plan(batch_stats=STATS)
    with refused(message):
        rjax.init_state(plan, PARAMS, batch_stats=given)


def test_a_plan_made_without_statistics_takes_any():
    state = rjax.init_state(_plan(), PARAMS, batch_stats=STATS)
    np.testing.assert_array_equal(state.batch_stats["bn"]["mean"], STATS["bn"]["mean"])


@pytest.mark.parametrize("precision", ["fp8", "float16", "FP16", "", None, 16])
def test_unknown_precision(precision):
    message = f"`precision` must be one of 'fp16', 'bf16', 'fp32'.* got {precision!r}"
    with refused(message):
        rjax.Config(precision=precision)
    with refused(message):
        rjax.Policy(precision)


RULES = {
    "init": lambda x: rjax.scaling.halving(init=x),
    "scale": rjax.scaling.static,
    "init ": lambda x: rjax.scaling.dynamic(init=x),
    "floor": lambda x: rjax.scaling.halving(floor=x),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0, -1.0])
def test_scales_that_are_no_scales(name, value):
    with refused(f"`{name.strip()}` must be a finite number > 0, got {value}"):
        RULES[name](value)


@pytest.mark.parametrize("name", ["init", "scale", "init "])
def test_scales_below_the_floor(name):
    with refused(f"`{name.strip()}` must not be below the floor 1.0, got 0.3"):
        RULES[name](0.3)


@pytest.mark.parametrize("name", RULES)
def test_scales_that_are_no_power_of_two_warn(name):
    with pytest.warns(UserWarning, match=f"`{name.strip()}`=3000.0 is not a power"):
        with contextlib.suppress(ValueError):  # a floor above the first scale
            RULES[name](3000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RULES[name](4096.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rjax.scaling.halving(factor=1.0), "`factor` must lie strictly"),
        (lambda: rjax.scaling.halving(factor=0.0), "`factor` must lie strictly"),
        (lambda: rjax.scaling.halving(factor=NAN), "`factor` must lie strictly"),
        (lambda: rjax.scaling.dynamic(growth=1.0), "`growth` must lie strictly"),
        (lambda: rjax.scaling.dynamic(growth=INF), "`growth` must lie strictly"),
        (lambda: rjax.scaling.dynamic(backoff=2.0), "`backoff` must lie strictly"),
        (lambda: rjax.scaling.dynamic(interval=0), "`interval` must be at least 1"),
        (lambda: rjax.scaling.dynamic(ceiling=2.0), "`ceiling` must not be below"),
        (lambda: rjax.Config(scaling="dynamic"), "`scaling` must be a rule such as"),
        (lambda: rjax.Config(scaling=8192.0), "`scaling` must be a rule such as"),
    ],
)
def test_rules_that_are_no_rules(make, message):
    with refused(message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of `value` and `norm`, got value=None, norm=None"),
        ({"value": 1.0, "norm": 1.0}, "exactly one of `value` and `norm`"),
        ({"value": 0.0}, "`value` must be a finite number > 0, got 0.0"),
        ({"norm": 0}, "`norm` must be a finite number > 0, got 0"),
        ({"value": -1.0}, "`value` must be a finite number > 0, got -1.0"),
        ({"norm": -1.0}, "`norm` must be a finite number > 0, got -1.0"),
        ({"value": NAN}, "`value` must be a finite number > 0, got nan"),
        ({"norm": NAN}, "`norm` must be a finite number > 0, got nan"),
        ({"norm": INF}, "`norm` must be a finite number > 0, got inf"),
        ({"value": "1"}, "`value` must be a finite number > 0, got 1"),
        ({"value": True}, "`value` must be a finite number > 0, got True"),
        ({"norm": 1.0, "on_inf": "clamp"}, "'clamp' works with a `value` bound only"),
        ({"value": 1.0, "on_inf": "ignore"}, "`on_inf` must be .* got 'ignore'"),
    ],
)
def test_clips_that_are_no_clips(options, message):
    with refused(message):
        rjax.Clip(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"decay": d}, r"`decay` must lie in \[0, 1\]")
            for d in (-0.1, 1.1, NAN, "x")
        ),
        ({"decay": True}, r"`decay` must lie in \[0, 1\], got True"),
        ({"batch_stats": "skip"}, "`batch_stats` must be 'average' or 'copy', got 'sk"),
    ],
)
def test_averages_that_are_no_averages(options, message):
    with refused(message):
        rjax.Ema(**options)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None, True])
def test_accumulation_steps(steps):
    with refused(f"`accumulation_steps` must be a whole number >= 1, got {steps!r}"):
        rjax.Config(accumulation_steps=steps)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (NAN, "`learning_rate` must be finite, got nan"),
        (INF, "`learning_rate` must be finite, got inf"),
        ("x", "`learning_rate` must be a number or a schedule, got 'x'"),
        ([0.1], "`learning_rate` must be a number or a schedule"),
        (None, r"`learning_rate`=None works with from_optax\(tx\) only"),
    ],
)
def test_learning_rates_that_are_none(rate, message):
    with refused(message):
        rjax.Config(learning_rate=rate)


@pytest.mark.parametrize("rate", [NAN, INF])
def test_schedules_that_start_at_no_number(rate):
    config = rjax.Config(learning_rate=lambda count: jnp.float32(rate))
    with refused("schedule must give a finite number at step 0, got"):
        _plan(config)


def test_schedules_that_give_no_scalar():
    config = rjax.Config(learning_rate=lambda count: jnp.ones(2))
    with refused("schedule must give a finite number at step 0"):
        _plan(config)


@pytest.mark.parametrize("rate", [0.1, lambda count: 0.1])
def test_optax_carries_its_own_rate(rate):
    optimizer = rjax.optim.from_optax(optax.sgd(0.1))
    with refused(r"`learning_rate` must be None with from_optax\(tx\)"):
        rjax.Config(optimizer=optimizer, learning_rate=rate)
    with refused(r"`learning_rate` must be None with from_optax\(tx\)"):
        rjax.Config(optimizer=optimizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rjax.optim.from_optax(0.1), "takes an optax.GradientTransformation"),
        (lambda: rjax.optim.momentum(1.0), r"`momentum` must be a number in \[0"),
        (lambda: rjax.optim.nesterov(-0.1), r"`momentum` must be a number in \[0"),
        (lambda: rjax.optim.momentum(NAN), r"`momentum` must be a number in \[0"),
        (lambda: rjax.optim.sgd(-1.0), "`weight_decay` must be a number in"),
        (lambda: rjax.optim.sgd(INF), "`weight_decay` must be a number in"),
        (lambda: rjax.optim.sgd(decay="l2"), "`decay` must be .* got 'l2'"),
        (lambda: rjax.optim.adam(b1=1.0), "`b1` must be a number in"),
        (lambda: rjax.optim.adamw(b2=-0.5), "`b2` must be a number in"),
        (lambda: rjax.optim.adam(eps=0.0), "`eps` must be a number in"),
        (lambda: rjax.optim.adam(weight_decay="x"), "`weight_decay` must be a number"),
        (lambda: rjax.optim.lars(trust_coefficient=0.0), "`trust_coefficient` must"),
        (lambda: rjax.optim.lars(eps=-1.0), "`eps` must be a number in"),
    ],
)
def test_optimizers_with_numbers_out_of_range(make, message):
    with refused(message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "`optimizer` must be an rjax Optimizer, got str"),
        ({"optimizer": optax.sgd(0.1)}, "`optimizer` must be an rjax Optimizer"),
        ({"optimizer": None}, "`optimizer` must be an rjax Optimizer, got NoneType"),
        ({"clip": 1.0}, "`clip` must be an rjax Clip, got float"),
        ({"ema": 0.999}, "`ema` must be an rjax Ema, got float"),
    ],
)
def test_configs_of_the_wrong_kinds(options, message):
    with refused(message):
        rjax.Config(**options)


def test_a_plan_needs_a_config():
    with refused("`config` must be an rjax.Config, got 'fp16'"):
        rjax.make_plan(PARAMS, "fp16")


@pytest.mark.parametrize("junk", ["deep_conv", 3, {"decay": False}, True], ids=repr)
def test_rules_that_return_junk(junk):
    with refused("`rule` must return an rjax.Param or None, got .* for 'dense/bias'"):
        _plan(rule=lambda path, leaf: junk)


def test_rules_that_freeze_everything():
    with refused("`rule` leaves no trainable parameter"):
        _plan(rule=lambda path, leaf: rjax.Param(trainable=False))


def _trace(loss_fn, config=CONFIG, batch=None, stats=None, **options):
    plan = _plan(config, batch_stats=stats)
    state = rjax.init_state(plan, PARAMS, batch_stats=stats)
    batch = np.ones((4, 3), np.float32) if batch is None else batch
    jax.eval_shape(rjax.make_train_step(loss_fn, plan, **options), state, batch)


def _good(params, batch_stats, batch, key):
    return jnp.sum(params["dense"]["bias"]), (batch_stats, {})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.ones((4, 3)), "leaf 'array' must .* accumulation_steps=3, got 4"),
        ({"x": np.ones((6, 3)), "y": np.ones(4)}, "leaf 'y' must .* got 4"),
        ((np.ones(6), np.float32(1.0)), "leaf '1' must .* got no leading axis"),
    ],
)
def test_batches_that_do_not_divide(batch, message):
    config = rjax.Config(accumulation_steps=3)
    with refused(message):
        _trace(_good, config, batch)


def _returns(value):
    return lambda params, batch_stats, batch, key: value(params["dense"]["bias"])


SIGNATURE = r"`loss_fn\(params, batch_stats, batch, key\)` must return \(loss, "
SCALAR = "The loss must be a floating scalar, the mean over the batch, got "


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.sum, SIGNATURE),
        (lambda b: b, SIGNATURE),
        (lambda b: None, SIGNATURE),
        (lambda b: (jnp.sum(b), {}), SIGNATURE),
        (lambda b: (jnp.sum(b), {}, {}), SIGNATURE),
        (lambda b: (b, ({}, {})), SCALAR + r"float32\[2\]"),
        (lambda b: (b[:1], ({}, {})), SCALAR + r"float32\[1\]"),
        (lambda b: (jnp.int32(1), ({}, {})), SCALAR + r"int32\[\]"),
        (lambda b: (1, ({}, {})), SCALAR + r"int64\[\]"),
        (lambda b: (jnp.sum(b) > 0, ({}, {})), SCALAR + r"bool\[\]"),
    ],
)
def test_loss_functions_of_the_wrong_kind(value, message):
    with refused(message):
        _trace(_returns(value))


def test_loss_functions_that_take_too_few_arguments():
    with pytest.raises(TypeError, match="positional argument"):
        _trace(lambda params, batch: 0.0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, r"'bn/mean' differs: given \(\(2,\), 'float32'\), returned None"),
        (None, r"'bn/mean' differs: given \(\(2,\), 'float32'\), returned None"),
        ({**STATS, "x": jnp.ones(2)}, r"'x' differs: given None, returned \(\(2,\)"),
        ({"bn": {"mean": jnp.ones(3)}}, r"'bn/mean' differs: .* returned \(\(3,\)"),
        ({"bn": {"mean": jnp.ones(2, jnp.float16)}}, "'bn/mean' differs: .* 'float16'"),
    ],
)
def test_loss_functions_that_change_the_statistics(returned, message):
    with refused("`loss_fn` must return batch statistics of the.* " + message):
        _trace(_returns(lambda b: (jnp.sum(b), (returned, {}))), stats=STATS)


def test_unknown_implementations():
    with refused(r"`implementation` must be None or one of \('xla', 'mosaic_gpu'\)"):
        _trace(_good, implementation="cuda")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it may serve")
def test_implementations_that_cannot_serve_here():
    with refused("has no 'mosaic_gpu' implementation", NotImplementedError):
        _trace(_good, implementation="mosaic_gpu")
    _trace(_good, implementation="xla")


EMA = rjax.Config(ema=rjax.Ema())
UNKNOWN = "`which` must be 'master', 'compute', 'ema' or 'ema_compute', got 'best'"


def test_unknown_weights():
    plan = _plan(EMA)
    state = rjax.init_state(plan, PARAMS)
    with refused(UNKNOWN):
        rjax.get_params(plan, state, which="best")
    with refused(UNKNOWN):
        rjax.make_eval_step(lambda *a: {}, plan, which="best")
    with refused("`which` must be 'current' or 'ema', got 'master'"):
        rjax.get_batch_stats(plan, state, which="master")
    with refused("`ema` must be 'keep' or 'copy', got 'reset'"):
        rjax.replace_params(plan, state, PARAMS, ema="reset")


def test_averages_that_are_not_kept():
    plan = _plan()
    state = rjax.init_state(plan, PARAMS)
    for which in ("ema", "ema_compute"):
        with refused("The plan keeps no average"):
            rjax.get_params(plan, state, which=which)
        with refused("The plan keeps no average"):
            rjax.make_eval_step(lambda *a: {}, plan, which=which)
    with refused("The plan keeps no average"):
        rjax.get_batch_stats(plan, state, which="ema")
    with refused("The plan keeps no average"):
        rjax.adopt_ema(plan, state)


def test_a_limit_on_skips_below_one():
    plan = _plan()
    step = rjax.make_train_step(_good, plan)
    report = jax.eval_shape(step, rjax.init_state(plan, PARAMS), {})[1]
    with refused("`max_consecutive_skips` must be >= 1, got 0"):
        rjax.check(report, plan, max_consecutive_skips=0)
