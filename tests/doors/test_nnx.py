"""NNX modules: taken apart, trained by the train step, and put together again."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doors.models import NnxResNet
from flax import nnx

import rjax
from rjax.trees import flatten

pytestmark = pytest.mark.standard_promotion  # stock Flax
KEY = jax.random.key(0)
IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
BATCH = IMAGES, np.arange(8, dtype=np.int32)
CROSS_ENTROPY: Any = rjax.ops.softmax_cross_entropy


def _step(model, precision="fp16", criterion=CROSS_ENTROPY, **options):
    params, stats = rjax.nnx_variables(model)
    config = rjax.Config(precision=precision, optimizer=rjax.optim.sgd(), **options)
    plan = rjax.make_plan(params, config, stats)
    step = jax.jit(rjax.make_train_step(rjax.nnx_loss(model, criterion), plan))
    return plan, rjax.init_state(plan, params, stats), step


def _bits(model):
    return [
        np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(model, nnx.Param))
    ]


def test_variables_and_update_are_inverse():
    model, other = NnxResNet(), NnxResNet()
    params, stats = rjax.nnx_variables(model)
    paths = {path for path, _ in flatten(params)[0]}
    assert "blocks/0/conv1/kernel" in paths and "head/bias" in paths
    assert {path for path, _ in flatten(stats)[0]} == {
        f"blocks/0/norm{i}/{name}" for i in (1, 2) for name in ("mean", "var")
    }
    moved = jax.tree.map(lambda x: x + 1.0, (params, stats))
    rjax.nnx_update(other, *moved)
    for found, wanted in zip(rjax.nnx_variables(other), moved, strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    rjax.nnx_update(other, params)
    assert _bits(other) == _bits(model)
    jax.tree.map(np.testing.assert_array_equal, rjax.nnx_variables(other)[1], moved[1])


def test_more_than_ten_of_a_list_keep_their_places():
    model = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(i)) for i in range(12)])
    holder = nnx.Sequential(*model)
    params, _ = rjax.nnx_variables(holder)
    numbered = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full_like(x, int(path[1].key)), params
    )
    rjax.nnx_update(holder, numbered)
    assert [float(layer.kernel[0, 0]) for layer in holder.layers] == list(range(12))


class Tied(nnx.Module):
    """An embedding that is its own head."""

    def __init__(self):
        self.embed = nnx.Embed(5, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))
        self.head = self.embed

    def __call__(self, tokens):
        return self.head.attend(self.embed(tokens))


def test_a_tied_weight_is_one_parameter_with_the_sum_of_its_gradients():
    model, tokens = Tied(), np.array([[0, 1, 1], [4, 4, 4]], np.int32)
    plan, state, step = _step(model, learning_rate=1.0)
    assert [slot.path for slot in plan.slots] == ["embed/embedding"]
    wanted = nnx.grad(lambda m: CROSS_ENTROPY(m(tokens), tokens).mean())(model)
    after, report = step(state, (tokens, tokens))
    moved = state.master - after.master
    assert report.applied
    np.testing.assert_allclose(
        plan.unpack(moved)["embed"]["embedding"],
        jax.tree.leaves(wanted)[0],
        rtol=2**-8,
        atol=2**-10 * float(jnp.abs(moved).max()),
    )


def test_a_step_in_fp32_is_that_of_nnx():
    model = NnxResNet(jnp.float32, dropout=0.0)
    plan, state, step = _step(model, "fp32", learning_rate=1.0)
    before = _bits(model)
    after, report = step(state, BATCH)
    assert report.applied and _bits(model) == before, "the module is not touched"

    def loss(model):
        return CROSS_ENTROPY(model(IMAGES), BATCH[1]).mean()

    value, grads = jax.jit(nnx.value_and_grad(loss))(model)
    np.testing.assert_allclose(report.loss, value, rtol=1e-6)
    loss(model)  # moves the statistics of the module itself
    _, stats = rjax.nnx_variables(model)
    rjax.nnx_update(model, rjax.get_params(plan, after))
    found = rjax.get_params(plan, after)
    moved = jax.tree.map(jnp.subtract, rjax.get_params(plan, state), found)
    wanted = [np.asarray(x) for x in jax.tree.leaves(nnx.to_pure_dict(grads))]
    # A difference of weights has the rounding of the weights.
    for got, want in zip(jax.tree.leaves(moved), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)
    for got, want in zip(
        jax.tree.leaves(rjax.get_batch_stats(plan, after)),
        jax.tree.leaves(stats),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_a_skip_keeps_statistics_and_other_variables():
    plan, state, step = _step(Counting())
    state, _ = step(state, (IMAGES, BATCH[1]))
    after, report = step(state, (IMAGES * np.float32(np.nan), BATCH[1]))
    assert not report.applied
    jax.tree.map(np.testing.assert_array_equal, after.batch_stats, state.batch_stats)
    assert int(state.batch_stats["calls"]) == 1


class Counting(nnx.Module):
    """Counts its calls, sows, takes a stream and is told that it is trained."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(64, dtype=jnp.float16, rngs=rngs)
        self.head = nnx.Linear(64, 10, dtype=jnp.float16, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs, train=False):
        assert train
        self.calls[...] = self.calls[...] + 1
        x = self.norm(x.reshape(8, 64))
        self.seen = nnx.Intermediate(x)
        return self.head(self.dropout(x, rngs=rngs))


class Dropped(nnx.Module):
    """Two layers of dropout of one stream, on a row of ones."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one, self.two = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
        self.eval_mode = nnx.Dropout(0.5, rngs=rngs)
        self.kernel = nnx.Param(jnp.ones((1, 1)))

    def __call__(self, x):
        return jnp.stack([self.one(x), self.two(x), self.one(x)])


def test_dropout_is_a_function_of_the_key_and_of_the_layer():
    model = Dropped()
    model.eval()  # the loss trains all the same
    params, stats = rjax.nnx_variables(model)
    assert stats == {}
    loss_fn = rjax.nnx_loss(model, lambda y, t: (y.mean(), {"y": y}))

    def drawn(key):
        ones = np.ones(64, np.float32)
        return np.asarray(loss_fn(params, stats, (ones, 0), key)[1][1]["y"])

    first = drawn(jax.random.key(1))
    assert set(np.unique(first)) == {0.0, 2.0}
    assert (first[0] != first[1]).any() and (first[0] != first[2]).any()
    assert (first == drawn(jax.random.key(1))).all()
    assert (first != drawn(jax.random.key(2))).any()


def test_streams_given_to_the_call_follow_the_key():
    model = Counting()
    params, stats = rjax.nnx_variables(model)
    loss_fn = jax.jit(rjax.nnx_loss(model, CROSS_ENTROPY))
    one, two, again = (
        float(loss_fn(params, stats, BATCH, jax.random.key(i))[0]) for i in (1, 2, 1)
    )
    assert one == again != two


def test_accumulation_carries_the_statistics_through():
    plan, state, step = _step(NnxResNet(dropout=0.5), accumulation_steps=2)
    state, report = step(state, BATCH)
    assert report.applied


def test_the_trained_module_evaluates():
    model = NnxResNet()
    plan, state, step = _step(model, learning_rate=0.1, ema=rjax.Ema(0.9))
    for _ in range(3):
        state, report = step(state, BATCH)
    which = (
        rjax.get_params(plan, state, "ema"),
        rjax.get_batch_stats(plan, state, "ema"),
    )
    rjax.nnx_update(model, *which)
    model.eval()
    assert np.isfinite(np.asarray(model(IMAGES))).all()
    jax.tree.map(np.testing.assert_array_equal, rjax.nnx_variables(model)[0], which[0])


def test_a_layer_that_computes_in_float32_is_named():
    model = nnx.Sequential(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        nnx.Linear(4, 10, dtype=jnp.float16, rngs=nnx.Rngs(1)),
    )
    plan, state, step = _step(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(state, (np.ones((2, 4), np.float32), np.zeros(2, np.int32)))
    (message,) = (str(w.message) for w in caught)
    assert "'layers/0/kernel' run in float32" in message and "param_dtype" in message


@pytest.mark.parametrize("model", [rjax.nn.MLP((), 3), {"w": 1.0}, None, NnxResNet])
def test_what_is_no_nnx_module_is_refused(model):
    for call in (rjax.nnx_variables, lambda m: rjax.nnx_loss(m, CROSS_ENTROPY)):
        with pytest.raises(ValueError, match=r"`model` must be a flax.nnx.Module"):
            call(model)


def test_trees_of_another_structure_are_refused_by_path():
    model = NnxResNet()
    params, stats = rjax.nnx_variables(model)
    lacking = {k: v for k, v in params.items() if k != "head"}
    with pytest.raises(ValueError, match="`params` must .* lacks 'head/bias'"):
        rjax.nnx_update(model, lacking)
    with pytest.raises(ValueError, match="`params` must .* has 'x' too much"):
        rjax.nnx_update(model, {**params, "x": jnp.ones(1)})
    loss_fn = rjax.nnx_loss(model, CROSS_ENTROPY)
    with pytest.raises(ValueError, match="`batch_stats` must have the structure"):
        loss_fn(params, {}, BATCH, KEY)
    with pytest.raises(ValueError, match="pair"):
        loss_fn(params, stats, IMAGES, KEY)
