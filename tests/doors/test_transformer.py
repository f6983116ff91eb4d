"""A transformer in half precision: its layers, its tied weights, its masked loss."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rjax
from rjax.nn.transformer import causal_attention
from rjax.trees import flatten

KEY = jax.random.key(0)
ZEN = rjax.data.load_text(length=12)
TOKENS, TARGETS = (x[:16] for x in ZEN.train)
MODEL = rjax.nn.Transformer(ZEN.num_classes, 16, layers=1, heads=2, max_length=12)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(KEY, TOKENS)["params"]


def _half(params):
    return rjax.compute_view(params)


def _drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_layer_norm_follows_float64_far_from_zero():
    x = (1000.0 + _drawn(3, 5, 64)).astype(np.float16)
    scale, bias = _drawn(64, seed=1), _drawn(64, seed=2)
    variables = {"params": {"scale": scale, "bias": bias}}
    found: Any = rjax.nn.LayerNorm().apply(variables, x)
    wide = x.astype(np.float64)
    mean, var = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    wanted = (wide - mean) / np.sqrt(var + 1e-5) * scale + bias
    assert found.dtype == np.float16
    error = abs(np.asarray(found, np.float64) - wanted)
    assert (error <= 2.0**-11 * abs(wanted) + 1e-4).all()


def test_layer_norm_of_squares_that_half_precision_cannot_hold():
    x = np.array([[-60000.0, 60000.0, 0.0, 0.0]], np.float16)
    found, _ = rjax.nn.LayerNorm().init_with_output(KEY, x)
    np.testing.assert_allclose(found, [[-(2**0.5), 2**0.5, 0, 0]], rtol=1e-3)


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_follows_float64(heads):
    length, size = 5, 4
    mixed = _drawn(2, length, 3 * heads * size)
    parts = mixed.astype(np.float64).reshape(2, length, 3, heads, size)
    scores = np.einsum("bqhd,bkhd->bhqk", parts[:, :, 0], parts[:, :, 1]) / size**0.5
    scores[..., ~np.tril(np.ones((length, length), bool))] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    wanted = np.einsum("bhqk,bkhd->bqhd", shares, parts[:, :, 2])
    found = causal_attention(jnp.asarray(mixed), heads)
    np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=0, atol=1e-6)
    half = causal_attention(jnp.float16(mixed), heads)
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half, wanted.reshape(found.shape), rtol=0, atol=2e-2)


def test_softmax_and_gelu_are_float32_in_the_graph(params):
    def run(view):
        return MODEL.apply({"params": view}, TOKENS)

    text = str(jax.make_jaxpr(run)(_half(params)))
    for primitive in ("exp", "tanh", "rsqrt"):
        kinds = set(re.findall(rf":(\w+)\[[^\]]*\] = {primitive} ", text))
        assert kinds == {"f32"}, primitive
    assert set(re.findall(r":(\w+)\[[^\]]*\] = dot_general", text)) == {"f16", "f32"}


def test_large_scores_do_not_overflow_the_softmax():
    mixed = jnp.full((1, 3, 48), 40.0, jnp.float16)  # scores of 6400
    assert (causal_attention(mixed, 1) == 40.0).all()


def test_a_position_sees_nothing_that_comes_later(params):
    @jax.jit
    def logits(tokens):
        return MODEL.apply({"params": _half(params)}, tokens)

    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % ZEN.num_classes
    before, after = logits(TOKENS), logits(changed)
    assert before.dtype == jnp.float16 and before.shape == (16, 12, ZEN.num_classes)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(axis=(0, 2)).all()
    np.testing.assert_allclose(logits(TOKENS[:, :5]), before[:, :5], atol=1e-3)


def test_every_gradient_in_half_precision_is_that_of_float32(params):
    loss_fn = rjax.linen_loss(MODEL, rjax.nn.masked_cross_entropy)

    def gradients(view):
        run = rjax.scaled_value_and_grad(loss_fn, rjax.LossScale.init(), has_aux=True)
        return run(view, {}, (TOKENS, TARGETS), KEY)[1]

    half, wide = jax.jit(gradients)(_half(params)), jax.jit(gradients)(params)
    for (path, a), (_, b) in zip(flatten(half)[0], flatten(wide)[0], strict=True):
        assert jnp.linalg.norm(a - b) <= 4e-3 * jnp.linalg.norm(b), path


def test_gradients_of_a_frequent_token_add_up_in_float32():
    # The row of token 0 has 4096 gradients of the same size: in half precision a sum
    # stops growing when a term is less than half its last place.
    model = rjax.nn.Transformer(3, 4, layers=0, heads=1, max_length=4096)
    tokens = jnp.zeros((1, 4096), jnp.int32)
    params = jax.jit(model.init)(KEY, tokens[:, :1])["params"]
    params["position"] = jnp.zeros((4096, 4))

    @jax.jit
    def gradient(params):
        def total(params):
            logits: Any = model.apply({"params": params}, tokens)
            return logits[..., 1].astype(jnp.float32).sum()

        return jax.grad(total)(params)["embedding"][0]

    np.testing.assert_allclose(
        gradient(_half(params)), gradient(params), rtol=1e-2, atol=1.0
    )
    assert abs(gradient(params)).max() > 1000.0


def test_the_masked_loss_is_the_mean_of_what_counts():
    logits, labels = _drawn(3, 4, 7), np.random.default_rng(1).integers(0, 7, (3, 4))
    logits, labels = jnp.asarray(logits), jnp.asarray(labels, jnp.int32)
    masked = jnp.where(jnp.tril(jnp.ones((3, 4), bool)), labels, -1)
    each = rjax.ops.softmax_cross_entropy(logits, labels, 0.1)
    found = rjax.nn.masked_cross_entropy(logits, masked, 0.1)
    np.testing.assert_allclose(found, each[masked >= 0].mean(), rtol=1e-6)
    differentiate = jax.jit(jax.value_and_grad(rjax.nn.masked_cross_entropy))
    _, gradient = differentiate(logits, masked)
    assert ((gradient == 0).all(-1) == (masked < 0)).all()
    nothing = jnp.full_like(labels, -100)
    value, gradient = differentiate(logits, nothing)
    assert float(value) == 0.0 and (gradient == 0).all()


@pytest.mark.parametrize(
    ("model", "tokens", "match"),
    [
        (MODEL, np.zeros((1, 13), np.int32), "at most max_length=12 positions, got 13"),
        (MODEL, np.zeros((1, 4), np.float32), "must be integers"),
        (MODEL, np.zeros(4, np.int32), r"\[batch, length\], got int32\[4\]"),
        (MODEL.copy(heads=3), TOKENS, "`heads` must divide the 16 features, got 3"),
    ],
)
def test_what_the_model_cannot_take_is_told(model, tokens, match):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(model.init, KEY, tokens)


def test_dropout_needs_training_and_a_key(params):
    block = rjax.nn.TransformerBlock(heads=2, dropout=0.5)
    x, rngs = _drawn(1, 3, 8), {"dropout": KEY}
    variables = jax.jit(block.init)(KEY, x)
    dropped = jax.jit(lambda v: block.apply(v, x, True, rngs=rngs))(variables)
    assert (dropped != jax.jit(block.apply)(variables, x)).any()

    model = MODEL.copy(dropout=0.5)
    loss_fn = jax.jit(rjax.linen_loss(model, rjax.nn.masked_cross_entropy))
    one, two, again = (
        loss_fn(params, {}, (TOKENS, TARGETS), jax.random.key(i))[0] for i in (1, 2, 1)
    )
    assert one == again != two
    still, plain = (
        jax.jit(m.apply)({"params": params}, TOKENS) for m in (model, MODEL)
    )
    np.testing.assert_array_equal(still, plain)


# LoRA: the base frozen by the path rule, in one copy of half precision.


def _lora(path, leaf):
    return rjax.Param(trainable="lora" in path)


@pytest.fixture(scope="module")
def tuned(params):
    """The model with adapters, on the weights of the one without."""
    model = MODEL.copy(lora_rank=2)
    with_adapters = jax.jit(model.init)(jax.random.key(1), TOKENS)["params"]
    base = dict(flatten(params)[0])
    found, treedef = flatten(with_adapters)
    return model, treedef.unflatten([base.get(path, x) for path, x in found])


def test_fresh_adapters_change_nothing(params, tuned):
    model, with_adapters = tuned
    np.testing.assert_array_equal(
        jax.jit(model.apply)({"params": _half(with_adapters)}, TOKENS),
        jax.jit(MODEL.apply)({"params": _half(params)}, TOKENS),
    )


def test_adapters_learn_while_the_base_keeps_its_bits(tuned):
    model, params = tuned
    config = rjax.Config(
        optimizer=rjax.optim.adamw(weight_decay=0.1), learning_rate=3e-2
    )
    plan = rjax.make_plan(params, config, rule=_lora)
    state = rjax.init_state(plan, params)
    before = {path: np.asarray(x).tobytes() for path, x in state.frozen.items()}
    loss_fn = rjax.linen_loss(model, rjax.nn.masked_cross_entropy)
    step = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
    losses = []
    for _ in range(30):
        state, report = step(state, (TOKENS, TARGETS))
        losses.append(float(report.loss))
    assert losses[-1] < 0.97 * losses[0]
    after = {path: np.asarray(x).tobytes() for path, x in state.frozen.items()}
    assert after == before and not any("lora" in path for path in after)

    # One copy: two bytes an element of a kernel, four of a bias, and nowhere else.
    frozen = {p: x for p, x in flatten(params)[0] if "lora" not in p}
    sizes = {p: np.size(x) * (2 if np.ndim(x) > 1 else 4) for p, x in frozen.items()}
    assert {p: x.nbytes for p, x in state.frozen.items()} == sizes
    assert all("lora" in slot.path for slot in plan.slots)
    biggest = max(np.size(x) for x in frozen.values())
    rest = [x for f, x in flatten(state)[0] if not f.startswith("frozen")]
    trained = 20 * plan.n  # master, moments and the half copy
    assert sum(x.nbytes for x in rest if x.dtype != KEY.dtype) <= trained
    assert biggest in {np.size(x) for x in state.frozen.values()}
