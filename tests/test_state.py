import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rjax

STATS = {"bn": {"mean": np.full(4, 0.5, np.float32), "var": np.ones(4, np.float32)}}
WHICH = ["master", "compute", "ema", "ema_compute"]


def _values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {
    "bn": {"bias": _values(4), "scale": _values(4, seed=1)},
    "conv": {"kernel": _values(3, 3, 2, 4, seed=2)},
    "dense": {"bias": _values(3, seed=3), "kernel": _values(4, 3, seed=4)},
}


def _keeps_statistics(params, batch_stats, batch, key):
    """A loss with gradient batch[0] for every weight; the statistics count steps."""
    loss = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))
    moved = jax.tree.map(lambda x: x + 1, batch_stats)
    return loss * batch[0], (moved, {})


def _config(**options):
    options = {"optimizer": rjax.optim.adamw(), "ema": rjax.Ema(0.5), **options}
    return rjax.Config(**options)


def _make(config=None, rule=None, params=PARAMS, **options) -> Any:
    config = _config() if config is None else config
    plan = rjax.make_plan(params, config, batch_stats=STATS, rule=rule)
    return plan, rjax.init_state(plan, params, batch_stats=STATS, **options)


@functools.cache
def _freeze(*paths):
    return lambda path, leaf: rjax.Param(trainable=path not in paths)


FROZEN = ("dense/bias", "dense/kernel")


def _buffers(state):
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]


def _assert_nothing_shared(*trees):
    found = [pointer for tree in trees for pointer in _buffers(tree)]
    assert len(set(found)) == len(found)


def _host(leaf):
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _assert_trees_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(_host(a), _host(b))


@functools.cache
def _donated(plan) -> Any:
    return jax.jit(rjax.make_train_step(_keeps_statistics, plan), donate_argnums=0)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_init_state_fills_every_field(precision):
    plan, state = _make(_config(precision=precision, learning_rate=0.25))
    b, half = plan.bias_like, plan.half_dtype
    for name in ("master", "mu", "nu", "ema"):
        arena = getattr(state, name)
        assert arena.shape == (plan.n,) and arena.dtype == jnp.float32
    np.testing.assert_array_equal(state.master, plan.pack(PARAMS))
    np.testing.assert_array_equal(state.ema, state.master)
    assert not state.mu.any() and not state.nu.any()
    for name in ("compute", "ema_compute"):
        copy = getattr(state, name)
        if half is None:
            assert copy is None
        else:
            np.testing.assert_array_equal(copy, state.master[b:].astype(half))
            assert copy.dtype == half
    _assert_trees_equal(state.batch_stats, STATS)
    _assert_trees_equal(state.ema_batch_stats, STATS)
    assert state.scale == (8192.0 if precision == "fp16" else 1.0)
    assert state.scale.dtype == jnp.float32
    assert state.learning_rate == 0.25 and state.learning_rate.dtype == jnp.float32
    for name in ("step", "applied_steps", "skipped", "consecutive_skips"):
        count = getattr(state, name)
        assert (int(count), count.shape, count.dtype) == (0, (), jnp.int32)
    results = state.results
    assert (float(results.loss_sum), int(results.count)) == (0.0, 0)
    assert state.key == jax.random.key(0)


def test_series_that_are_gated_off_are_none():
    config = rjax.Config(precision="fp32", optimizer=rjax.optim.sgd())
    _, state = _make(config)
    gone = ["compute", "mu", "nu", "ema", "ema_compute", "ema_batch_stats", "opt_state"]
    assert [getattr(state, name) for name in gone] == [None] * len(gone)
    assert state.frozen == {}


CONFIGS = {
    "fp16": _config(),
    "fp32": _config(
        precision="fp32", optimizer=rjax.optim.lars(), ema=rjax.Ema(0.0, "copy")
    ),
    "schedule": _config(
        scaling=rjax.scaling.dynamic(init=1024.0),
        learning_rate=lambda count: jnp.float32(0.1),
    ),
    "optax": _config(
        optimizer=rjax.optim.from_optax(optax.sgd(0.1, 0.9)), learning_rate=None
    ),
}


@pytest.mark.standard_promotion  # Optax is one of them
@pytest.mark.parametrize("name", CONFIGS)
def test_no_two_fields_share_a_buffer_and_the_state_can_be_donated(name):
    mine = jax.tree.map(jnp.asarray, PARAMS)
    stats = jax.tree.map(jnp.asarray, STATS)
    plan = rjax.make_plan(mine, CONFIGS[name], batch_stats=stats, rule=_freeze(*FROZEN))
    state = rjax.init_state(plan, mine, batch_stats=stats, seed=jax.random.key(3))
    _assert_nothing_shared(state, mine, stats)
    step = _donated(plan)
    for gradient in (1.0, jnp.inf, 1.0):
        before, (state, report) = state, step(state, jnp.array([gradient]))
        assert report.applied == np.isfinite(gradient)
        assert before.master.is_deleted()
        _assert_nothing_shared(state, mine, stats)
    _assert_trees_equal(mine, PARAMS)
    _assert_trees_equal(stats, STATS)
    assert step._cache_size() == 1, "the later steps compiled"


def test_the_seed_may_be_a_number_or_a_key():
    plan, state = _make(seed=7)
    assert state.key == jax.random.key(7)
    key = jax.random.key(8)
    state = rjax.init_state(plan, PARAMS, batch_stats=STATS, seed=key)
    _donated(plan)(state, jnp.ones(1))
    assert not key.is_deleted() and key == jax.random.key(8)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_get_params_gives_the_tree_back(which, precision):
    rule = _freeze(*FROZEN)
    plan, state = _make(_config(precision=precision), rule=rule)
    state, _ = _donated(plan)(state, jnp.ones(1))
    found = rjax.get_params(plan, state, which=which)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    half = jnp.float16 if "compute" in which and precision == "fp16" else jnp.float32
    arena = plan.unpack(state.ema if "ema" in which else state.master)
    for module, leaf in (("bn", "bias"), ("bn", "scale"), ("conv", "kernel")):
        dtype = half if leaf == "kernel" else jnp.float32
        assert found[module][leaf].dtype == dtype
        np.testing.assert_array_equal(
            found[module][leaf], arena[module][leaf].astype(dtype)
        )
    kept = PARAMS["dense"]["kernel"]
    if precision == "fp16":
        kept = kept.astype(np.float16)
    assert found["dense"]["kernel"].dtype == half
    np.testing.assert_array_equal(found["dense"]["kernel"], kept.astype(half))
    np.testing.assert_array_equal(found["dense"]["bias"], PARAMS["dense"]["bias"])


def test_average_and_masters_differ_after_a_step():
    plan, state = _make()
    state, _ = _donated(plan)(state, jnp.ones(1))
    assert (state.ema != state.master).any()
    current = rjax.get_batch_stats(plan, state)
    average = rjax.get_batch_stats(plan, state, which="ema")
    np.testing.assert_array_equal(current["bn"]["mean"], STATS["bn"]["mean"] + 1)
    np.testing.assert_array_equal(average["bn"]["mean"], STATS["bn"]["mean"] + 0.5)


def test_batch_statistics_may_be_copied_instead():
    plan, state = _make(CONFIGS["fp32"], rule=_freeze(*FROZEN))
    state, _ = _donated(plan)(state, jnp.ones(1))
    average = rjax.get_batch_stats(plan, state, which="ema")
    _assert_trees_equal(average, rjax.get_batch_stats(plan, state))


def _doubled(tree):
    return jax.tree.map(lambda x: 2 * jnp.asarray(x), tree)


@pytest.mark.parametrize("ema", ["keep", "copy"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_replace_params(ema, precision):
    plan, state = _make(_config(precision=precision), rule=_freeze(*FROZEN))
    state, _ = _donated(plan)(state, jnp.ones(1))
    mine = _doubled(PARAMS)
    new = rjax.replace_params(plan, state, mine, ema=ema)
    _assert_nothing_shared(
        dataclasses.replace(new, batch_stats=None, ema_batch_stats=None), mine
    )
    wanted = _doubled(PARAMS)
    if precision == "fp16":
        half = wanted["dense"]["kernel"].astype(jnp.float16)
        wanted["dense"]["kernel"] = half.astype(jnp.float32)
    _assert_trees_equal(rjax.get_params(plan, new), wanted)
    kernel = rjax.get_params(plan, new, "compute")["conv"]["kernel"]
    half = np.float16 if precision == "fp16" else np.float32
    np.testing.assert_array_equal(kernel, (2 * PARAMS["conv"]["kernel"]).astype(half))
    if ema == "copy":
        np.testing.assert_array_equal(new.ema, new.master)
    else:
        np.testing.assert_array_equal(new.ema, state.ema)
    moved = {"master", "compute", "frozen"}
    moved |= {"ema", "ema_compute"} if ema == "copy" else set()
    for field in dataclasses.fields(state):
        if field.name not in moved:
            _assert_trees_equal(getattr(new, field.name), getattr(state, field.name))
    new, _ = _donated(plan)(new, jnp.ones(1))
    _assert_trees_equal(mine, _doubled(PARAMS))


def test_replaced_params_compile_nothing_new():
    plan, state = _make()
    step = _donated(plan)
    state, _ = step(state, jnp.ones(1))
    step(rjax.replace_params(plan, state, PARAMS, ema="copy"), jnp.ones(1))
    assert step._cache_size() == 1


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_adopt_ema_copies_the_average_and_shares_nothing(precision):
    plan, state = _make(_config(precision=precision))
    step = _donated(plan)
    state, _ = step(state, jnp.ones(1))
    average, stats = np.asarray(state.ema), jax.tree.map(np.copy, state.ema_batch_stats)
    mu = np.asarray(state.mu)
    adopted = rjax.adopt_ema(plan, state)
    _assert_nothing_shared(adopted)
    np.testing.assert_array_equal(adopted.master, average)
    np.testing.assert_array_equal(adopted.ema, average)
    np.testing.assert_array_equal(adopted.mu, mu)
    if precision == "fp16":
        half = average[plan.bias_like :].astype(np.float16)
        np.testing.assert_array_equal(adopted.compute, half)
        np.testing.assert_array_equal(adopted.ema_compute, half)
    _assert_trees_equal(adopted.batch_stats, stats)
    after, report = step(adopted, jnp.ones(1))
    assert report.applied and adopted.master.is_deleted()
    _assert_nothing_shared(after)
    assert step._cache_size() == 1


def test_adopt_ema_under_jit_shares_nothing():
    plan, state = _make()
    adopted = jax.jit(rjax.adopt_ema, static_argnums=0)(plan, state)
    _assert_nothing_shared(adopted)


OPTIMIZERS = {
    "sgd": rjax.optim.sgd(weight_decay=0.5),
    "momentum": rjax.optim.momentum(weight_decay=0.5, decay="coupled"),
    "nesterov": rjax.optim.nesterov(weight_decay=0.5),
    "adam": rjax.optim.adam(weight_decay=0.5),
    "adamw": rjax.optim.adamw(weight_decay=0.5),
    "lars": rjax.optim.lars(weight_decay=0.5),
    "optax": rjax.optim.from_optax(optax.adamw(0.1, weight_decay=0.5)),
}


@pytest.mark.standard_promotion  # Optax is one of them
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_never_move(name):
    rate = None if name == "optax" else 0.1
    config = rjax.Config(optimizer=OPTIMIZERS[name], learning_rate=rate)
    plan = rjax.make_plan(PARAMS, config, rule=_freeze(*FROZEN))
    state = rjax.init_state(plan, PARAMS)
    half = PARAMS["dense"]["kernel"].astype(np.float16)
    first = {"dense/bias": PARAMS["dense"]["bias"], "dense/kernel": half}
    _assert_trees_equal(state.frozen, first)
    step = _donated(plan)
    for _ in range(3):
        state, report = step(state, jnp.ones(1))
        assert report.applied
    _assert_trees_equal(state.frozen, first)
    assert not {slot.path for slot in plan.slots} & set(FROZEN)
    wide = rjax.get_params(plan, state)
    kept = half.astype(np.float32)
    np.testing.assert_array_equal(wide["dense"]["kernel"], kept)
    assert (wide["conv"]["kernel"] != PARAMS["conv"]["kernel"]).all()


def test_the_loss_sees_frozen_parameters_in_compute_precision():
    seen = {}

    def loss_fn(params, batch_stats, batch, key):
        seen.update(jax.tree.map(lambda x: x.dtype.name, params))
        return _keeps_statistics(params, batch_stats, batch, key)

    plan, state = _make(rule=_freeze(*FROZEN))
    jax.eval_shape(rjax.make_train_step(loss_fn, plan), state, jnp.ones(1))
    assert seen == {
        "bn": {"bias": "float32", "scale": "float32"},
        "conv": {"kernel": "float16"},
        "dense": {"bias": "float32", "kernel": "float16"},
    }


def test_replace_keeps_dtypes_and_compiles_nothing():
    plan, state = _make()
    step = _donated(plan)
    state, _ = step(state, jnp.ones(1))
    state = state.replace(learning_rate=1, scale=np.float64(4.0), step=5)
    assert state.learning_rate.dtype == state.scale.dtype == jnp.float32
    assert state.step.dtype == jnp.int32
    state, report = step(state, jnp.ones(1))
    assert (report.learning_rate, report.scale, report.step) == (1.0, 4.0, 5)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    "rate", [0.5, np.array(0.5), np.float64(0.5), jnp.bfloat16(0.5)]
)
def test_replace_gives_scalars_the_dtype_of_the_field(rate):
    _, state = _make()
    new = state.replace(learning_rate=rate).learning_rate
    assert new.dtype == jnp.float32 and new == 0.5


def test_replace_refuses_a_number_for_an_arena():
    _, state = _make()
    with pytest.raises(ValueError, match="`master` must be an array like the old one"):
        state.replace(master=0.5)


def test_replace_takes_arrays_and_leaves_the_rest():
    _, state = _make()
    new = state.replace(mu=state.mu + 1)
    np.testing.assert_array_equal(new.mu, 1.0)
    assert new.master is state.master
    assert not state.mu.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.1}, "has no field 'lr'"),
        ({"scale": float("nan")}, "`scale` must be a finite number > 0, got nan"),
        ({"scale": float("inf")}, "`scale` must be a finite number > 0, got inf"),
        ({"scale": 0.0}, "`scale` must be a finite number > 0, got 0"),
        ({"scale": -2.0}, "`scale` must be a finite number > 0, got -2"),
        ({"learning_rate": float("inf")}, "`learning_rate` must be finite, got inf"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be finite, got nan"),
    ],
)
def test_replace_refuses_what_no_step_could_use(changes, message):
    _, state = _make()
    with pytest.raises(ValueError, match=message) as caught:
        state.replace(**changes)
    assert "\n" not in str(caught.value)


def test_states_are_frozen():
    _, state = _make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.scale = 1.0


def test_the_state_survives_a_round_trip_through_the_tree():
    config = _config(scaling=rjax.scaling.dynamic())
    plan, state = _make(config, rule=_freeze(*FROZEN), seed=3)
    leaves, treedef = jax.tree.flatten(state)
    numbered = [
        jax.random.key(99)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.full_like(leaf, i + 1)
        for i, leaf in enumerate(leaves)
    ]
    other = jax.tree.unflatten(treedef, numbered)
    for i, leaf in enumerate(jax.tree.leaves(other)):
        assert leaf is numbered[i]
    fields = [field.name for field in dataclasses.fields(other)]
    of_fields = [
        leaf for name in fields for leaf in jax.tree.leaves(getattr(other, name))
    ]
    assert len(of_fields) == len(leaves), "a field is not part of the tree"
    through = jax.jit(lambda s: s)(other)
    assert jax.tree.structure(through) == treedef
    for a, b in zip(jax.tree.leaves(through), numbered, strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())


def test_a_step_keeps_structure_shapes_and_dtypes():
    plan, state = _make(_config(scaling=rjax.scaling.dynamic()))
    step = rjax.make_train_step(_keeps_statistics, plan)
    new, _ = jax.eval_shape(step, state, jnp.ones(1))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        assert jax.typeof(a) == jax.typeof(b)


def test_init_state_works_under_vmap_over_seeds():
    plan, one = _make(seed=2)
    many = jax.vmap(lambda seed: rjax.init_state(plan, PARAMS, STATS, seed))(
        jnp.arange(3)
    )
    assert many.master.shape == (3, plan.n)
    assert [many.key[i] for i in range(3)] == [jax.random.key(i) for i in range(3)]
    _assert_trees_equal(jax.tree.map(lambda x: x[2], many), one)
    step = jax.jit(jax.vmap(rjax.make_train_step(_keeps_statistics, plan)))
    moved, report = step(many, jnp.ones((3, 1)))
    assert report.applied.tolist() == [True] * 3
    np.testing.assert_array_equal(moved.master[0], moved.master[1])


def test_init_state_works_under_vmap_over_parameters():
    plan, _ = _make()
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    many = jax.vmap(lambda params: rjax.init_state(plan, params, STATS))(stacked)
    np.testing.assert_array_equal(many.master[1], 2 * many.master[0])


def test_init_state_works_under_jit():
    plan, eager = _make()
    traced = jax.jit(lambda params: rjax.init_state(plan, params, STATS))(PARAMS)
    _assert_trees_equal(traced, eager)


def test_weights_beyond_the_half_range_warn_by_path():
    params = {**PARAMS, "conv": {"kernel": np.full((3, 3, 2, 4), 7e4, np.float32)}}
    with pytest.warns(UserWarning, match="'conv/kernel' has values beyond.*fp16"):
        plan, state = _make(params=params)
    assert np.isinf(state.compute).any() and np.isfinite(state.master).all()
    _make(_config(precision="bf16"), params=params)
    _make(params=params, rule=lambda path, leaf: rjax.Param(precision="float32"))
