import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.nn import CNN, MLP
from rjax.ops.softmax_cross_entropy import softmax_cross_entropy

KEY = jax.random.key(0)
MODELS: list[Any] = [MLP((16, 8), 10), CNN(10, width=4)]


@functools.cache
def _variables(model):
    """Draw like `init`, on the host: compiling a random number per leaf is slow."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, KEY, jnp.ones((2, 8, 8, 1)))

    def draw(path, leaf):
        name, values = path[-1].key, np.zeros(leaf.shape)
        if name == "kernel":
            fan_in = np.prod(leaf.shape[:-1])
            values = rng.normal(size=leaf.shape) * np.sqrt(2 / fan_in)
        elif name in ("scale", "var"):
            values += 1.0
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _half(variables, dtype):
    params = jax.tree.map(
        lambda p: p.astype(dtype) if p.ndim > 1 else p, variables["params"]
    )
    return {**variables, "params": params}


def _batch(n=6):
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.uniform(size=(n, 8, 8, 1)), jnp.float32)
    return images, jnp.asarray(rng.integers(0, 10, n), jnp.int32)


@functools.cache
def _float32_logits(model):
    return jax.jit(model.apply)(_variables(model), _batch()[0])


@pytest.mark.parametrize("model", MODELS, ids=["mlp", "cnn"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_follow_the_kernels(model, dtype):
    variables, (x, _) = _variables(model), _batch()
    want = _float32_logits(model)
    got = jax.jit(model.apply)(_half(variables, dtype), x)
    assert got.shape == (6, 10) and got.dtype == dtype and want.dtype == jnp.float32
    # Four layers, each rounding its inputs, kernels and output.
    bound = 12 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(got.astype(jnp.float32), want, 0, bound)


@pytest.mark.parametrize("model", MODELS, ids=["mlp", "cnn"])
def test_parameters_start_in_float32(model):
    shapes = jax.eval_shape(model.init, KEY, jnp.ones((2, 8, 8, 1)))
    leaves = jax.tree.leaves(shapes)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


def test_parameter_names():
    assert set(_variables(MODELS[0])["params"]) == {"hidden1", "hidden2", "head"}
    assert set(_variables(MODELS[0])) == {"params"}
    variables = _variables(MODELS[1])
    blocks = {"block1", "block2", "block3"}
    assert set(variables["params"]) == blocks | {"head"}
    assert set(variables["batch_stats"]) == blocks


@pytest.mark.parametrize("model", MODELS, ids=["mlp", "cnn"])
def test_a_few_steps_lower_the_loss(model):
    variables, (x, labels) = _half(_variables(model), jnp.float16), _batch()

    @jax.jit
    def step(params):
        def loss(params):
            logits, _ = model.apply(
                {**variables, "params": params}, x, True, mutable=["batch_stats"]
            )
            return softmax_cross_entropy(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        new = jax.tree.map(
            lambda p, g: p - jnp.asarray(0.1, p.dtype) * g, params, gradients
        )
        return new, value

    params, losses = variables["params"], []
    for _ in range(12):
        params, value = step(params)
        losses.append(float(value))
    assert np.isfinite(losses).all() and losses[-1] < 0.7 * losses[0]


def test_training_moves_statistics_and_evaluation_does_not():
    model, (x, _) = MODELS[1], _batch()
    variables = _variables(model)
    apply = jax.jit(functools.partial(model.apply, mutable=["batch_stats"]),
                    static_argnames="train")  # fmt: skip
    _, kept = apply(variables, x, train=False)
    _, moved = apply(variables, x, train=True)
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()), variables["batch_stats"], kept["batch_stats"]
    )
    assert all(jax.tree.leaves(same))
    old = variables["batch_stats"]["block1"]["bn"]["mean"]
    assert (moved["batch_stats"]["block1"]["bn"]["mean"] != old).any()


def test_dropout_only_in_training():
    model: Any = MLP((64,), 10, dropout=0.5)
    variables, (x, _) = _variables(model), _batch()

    @jax.jit
    def train(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply(variables, x, train=True, rngs=rngs)

    assert (train(1) != train(2)).any()
    want = MLP((64,), 10).apply(variables, x)
    np.testing.assert_array_equal(model.apply(variables, x), want)


def test_dropout_out_of_range():
    with pytest.raises(ValueError, match="`dropout` must be in .0, 1., got 1.0"):
        MLP((4,), 3, dropout=1.0).init(KEY, jnp.ones((1, 2)))


@pytest.mark.parametrize("shape", [(3, 28, 28, 1), (3, 32, 32, 3), (3, 7, 5, 2)])
def test_cnn_takes_other_images(shape):
    shapes = jax.eval_shape(
        lambda x: CNN(5, width=2).init_with_output(KEY, x)[0], jnp.ones(shape)
    )
    assert shapes.shape == (3, 5)


def test_mlp_without_hidden_layers_is_linear():
    model: Any = MLP((), 10)
    variables, (x, _) = _variables(model), _batch()
    want = x.reshape(6, 64) @ variables["params"]["head"]["kernel"]
    np.testing.assert_allclose(model.apply(variables, x), want, rtol=1e-5, atol=1e-5)
