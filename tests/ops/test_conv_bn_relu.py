"""Convolutions between norms: float64 references, chains, statistics, errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rjax.ops import batch_norm
from rjax.ops.conv_bn_relu import (
    Norm,
    conv_bn_relu,
    conv_bn_relu_inference,
    norm_of,
    normalize,
)

# x, kernel, strides, padding, groups: one pixel, odd sizes, strides that leave pixels
# out, uneven padding, groups, an image's three channels.
CASES = {
    "1x1": ((2, 5, 3, 7), (1, 1, 7, 6), 1, "SAME", 1),
    "1x1/2": ((2, 5, 5, 4), (1, 1, 4, 8), 2, "VALID", 1),
    "3x3": ((3, 6, 5, 4), (3, 3, 4, 5), 1, "SAME", 1),
    "3x3/2": ((2, 7, 7, 4), (3, 3, 4, 6), (2, 2), ((1, 1), (1, 1)), 1),
    "uneven": ((2, 4, 6, 3), (2, 3, 3, 4), (1, 2), ((0, 1), (2, 0)), 1),
    "groups": ((2, 4, 4, 8), (3, 3, 2, 4), 1, "SAME", 4),
    "7x7/2": ((2, 9, 9, 3), (7, 7, 3, 4), 2, ((3, 3), (3, 3)), 1),
}


def arrays(name: str, dtype: Any, seed: int = 0, mean: float = 0.5) -> Any:
    """Return x, kernel, a norm of x, cotangents of the results, and the options."""
    x_shape, k_shape, strides, padding, groups = CASES[name]
    how = {"strides": strides, "padding": padding, "groups": groups}
    rng = np.random.default_rng(seed)
    c = x_shape[-1]
    x = jnp.asarray(rng.normal(mean, 1.0, x_shape), dtype)
    kernel = jnp.asarray(rng.normal(0.0, 0.3, k_shape), dtype)
    norm = Norm(
        jnp.asarray(rng.normal(mean, 0.2, c), jnp.float32),
        jnp.asarray(rng.uniform(0.5, 1.5, c) * rng.choice([1, -1], c), jnp.float32),
        jnp.asarray(rng.normal(0.2, 0.5, c), jnp.float32),
    )
    shapes = jax.eval_shape(functools.partial(conv_bn_relu, **how), x, kernel, norm)
    cts = tuple(jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes)
    return x, kernel, norm, cts, how


def float64(tree: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), tree)


def reference(x: Any, kernel: Any, norm: Norm | None, how: Any, dtype: Any) -> Any:
    """Return z, mean and var; what is stored is rounded as the op rounds it."""
    if norm is not None:
        mean, factor, bias = (v.reshape(1, 1, 1, -1) for v in norm)
        x = rounded(jnp.maximum((x - mean) * factor + bias, 0.0), dtype)
    strides = how["strides"]
    z = lax.conv_general_dilated(
        x, kernel, (strides,) * 2 if isinstance(strides, int) else strides,
        how["padding"], dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=how["groups"], precision="highest",
    )  # fmt: skip
    z = rounded(z, dtype)
    return z, z.mean((0, 1, 2)), z.var((0, 1, 2))


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round, and let gradients through."""
    return x + lax.stop_gradient(x.astype(dtype).astype(x.dtype) - x)


def close(got: Any, want: Any, dtype: Any, length: int, roundings: int = 2) -> None:
    """Compare: roundings to the dtype, and a float32 sum of so many addends."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = np.abs(want).max()
    eps = float(jnp.finfo(dtype).eps)
    bound = roundings * eps + 8 * length**0.5 * float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * size)


@pytest.mark.parametrize(
    ("name", "normed", "dtype"),
    [
        *((name, True, jnp.float16) for name in CASES),
        *((name, True, jnp.float32) for name in ("1x1/2", "uneven", "groups")),
        *((name, False, jnp.float16) for name in ("3x3", "7x7/2")),
        ("3x3/2", True, jnp.bfloat16),
    ],
)
def test_values_and_gradients(name: str, normed: bool, dtype: Any) -> None:
    x, kernel, norm, cts, how = arrays(name, dtype)
    norm = norm if normed else None
    with jax.enable_x64():
        exact = functools.partial(reference, how=how, dtype=dtype)
        args = jax.tree.map(jnp.asarray, float64((x, kernel, norm)))
        want, pull = jax.vjp(exact, *args)
        wanted = float64(pull(jax.tree.map(jnp.asarray, float64(cts))))
        want = float64(want)
    got, pull = jax.vjp(functools.partial(conv_bn_relu, **how), x, kernel, norm)
    gradients = pull(cts)
    depth = int(np.prod(kernel.shape[:3]))
    assert [a.dtype for a in got] == [dtype, jnp.float32, jnp.float32]
    for a, b in zip(got, want, strict=True):
        close(a, b, dtype, depth)
    # Of dz, da, dx and the kernel's: each is stored once, sums add up to one more.
    for a, b, like in zip(
        jax.tree.leaves(gradients),
        jax.tree.leaves(wanted),
        jax.tree.leaves((x, kernel, norm)),
        strict=True,
    ):
        assert a.dtype == like.dtype and a.shape == like.shape
        close(a, b, dtype, x.size, roundings=6)


def test_statistics_are_those_of_what_is_stored() -> None:
    x, kernel, norm, _, how = arrays("3x3", jnp.float16)
    z, mean, var = conv_bn_relu(x, kernel, norm, **how)
    exact = float64(z)
    np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(var, exact.var((0, 1, 2)), rtol=1e-5)


def test_a_mean_far_above_the_spread() -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(0, 1, (4, 8, 8, 2)), jnp.float32)
    z, mean, var = conv_bn_relu(x + 1e4, jnp.eye(2).reshape(1, 1, 2, 2))
    np.testing.assert_allclose(var, float64(z).var((0, 1, 2)), rtol=1e-3)
    norm = norm_of(mean, var, jnp.ones(2), jnp.zeros(2))
    _, far, spread = conv_bn_relu(z, jnp.eye(2).reshape(1, 1, 2, 2), norm)
    a = np.maximum((float64(z) - float64(mean)) * float64(norm.factor), 0)
    np.testing.assert_allclose(far, a.mean((0, 1, 2)), rtol=1e-3)
    np.testing.assert_allclose(spread, a.var((0, 1, 2)), rtol=1e-3)


def chain(params: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
    """Return two convolutions with norms, and a residual added to the last."""
    z, mean, var = conv_bn_relu(x, params["k1"])
    first = norm_of(mean, var, params["s1"], params["b1"])
    z, mean, var = conv_bn_relu(z, params["k2"], first, strides=2)
    last = norm_of(mean, var, params["s2"], params["b2"])
    return normalize(z, last, residual=residual)


def plain(params: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
    """Return the same by a convolution and a batch norm at a time."""
    for i, strides, extra in ((1, (1, 1), None), (2, (2, 2), residual)):
        x = lax.conv_general_dilated(
            x, params[f"k{i}"], strides, "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        x, *_ = batch_norm(
            x, params[f"s{i}"], params[f"b{i}"], relu=True, residual=extra
        )
    return x


def network(dtype: Any) -> Any:
    rng = np.random.default_rng(7)
    params = {
        "k1": jnp.asarray(rng.normal(0, 0.3, (3, 3, 4, 6)), dtype),
        "k2": jnp.asarray(rng.normal(0, 0.3, (3, 3, 6, 8)), dtype),
        **{f"s{i}": jnp.asarray(rng.uniform(0.5, 1.5, c), jnp.float32)
           for i, c in ((1, 6), (2, 8))},
        **{f"b{i}": jnp.asarray(rng.normal(0, 0.3, c), jnp.float32)
           for i, c in ((1, 6), (2, 8))},
    }  # fmt: skip
    x = jnp.asarray(rng.normal(0, 1, (4, 8, 8, 4)), dtype)
    return params, x, jnp.asarray(rng.normal(0, 1, (4, 4, 4, 8)), dtype)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("float16", 2e-2)])
def test_a_chain_is_a_network_of_batch_norms(dtype: str, bound: float) -> None:
    params, x, residual = network(dtype)
    wanted, pull = jax.vjp(plain, params, x, residual)
    ct = jnp.asarray(np.random.default_rng(8).normal(size=wanted.shape), dtype)
    want = pull(ct)
    got, pull = jax.vjp(jax.jit(chain), params, x, residual)
    for a, b in zip(
        jax.tree.leaves((got, pull(ct))), jax.tree.leaves((wanted, want)), strict=True
    ):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * np.abs(b).max())


def test_devices_share_their_statistics() -> None:
    """Each of two parts of a batch sees, and differentiates, the statistics of both."""
    params, x, residual = network(jnp.float32)

    def shared(params: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
        z, mean, var = conv_bn_relu(x, params["k1"], axis_name="data")
        first = norm_of(mean, var, params["s1"], params["b1"])
        how: Any = {"strides": 2, "axis_name": "data"}
        z, mean, var = conv_bn_relu(z, params["k2"], first, **how)
        last = norm_of(mean, var, params["s2"], params["b2"])
        return normalize(z, last, residual=residual)

    def total(run: Any, params: Any, x: Any, residual: Any, ct: Any) -> jax.Array:
        return jnp.sum(run(params, x, residual) * ct)

    ct = jnp.asarray(np.random.default_rng(8).normal(size=residual.shape), jnp.float32)
    want = jax.grad(functools.partial(total, chain), (0, 1))(params, x, residual, ct)
    halves = [a.reshape(2, 2, *a.shape[1:]) for a in (x, residual, ct)]
    each = jax.vmap(
        jax.grad(functools.partial(total, shared), (0, 1)), (None, 0, 0, 0),
        axis_name="data",
    )(params, *halves)  # fmt: skip
    got = jax.tree.map(lambda a: a.sum(0), each[0]), each[1].reshape(x.shape)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))


def test_only_images_and_vectors_are_kept() -> None:
    """Of a convolution x and z, not the normed input between them."""
    x, kernel, norm, _, how = arrays("3x3", jnp.float16)
    _, pull = jax.vjp(functools.partial(conv_bn_relu, **how), x, kernel, norm)
    kept = [a for a in jax.tree.leaves(pull) if getattr(a, "ndim", 0) == 4]
    z = jax.eval_shape(functools.partial(conv_bn_relu, **how), x, kernel, norm)[0]
    assert sorted(a.shape for a in kept) == sorted([x.shape, kernel.shape, z.shape])


def test_bits_repeat() -> None:
    x, kernel, norm, cts, how = arrays("3x3/2", jnp.float16)

    @jax.jit
    def run(x: Any, kernel: Any, norm: Any, cts: Any) -> Any:
        out, pull = jax.vjp(functools.partial(conv_bn_relu, **how), x, kernel, norm)
        return out, pull(cts)

    first, second = (run(x, kernel, norm, cts) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_normalize(relu: bool, added: bool) -> None:
    rng = np.random.default_rng(3)
    x, residual, ct = (
        jnp.asarray(rng.normal(1, 2, (6, 5)), jnp.float32) for _ in range(3)
    )
    vectors = jnp.asarray(rng.normal(1, 1, (3, 5)), jnp.float32)
    norm = Norm(vectors[0], vectors[1], vectors[2])

    def exact(x: Any, norm: Norm, residual: Any) -> Any:
        mean, factor, bias = (v.reshape(1, -1) for v in norm)
        y = (x - mean) * factor + bias
        y = y if residual is None else y + residual
        return jnp.maximum(y, 0) if relu else y

    def ours(x: Any, norm: Norm, residual: Any) -> Any:
        return normalize(x, norm, relu=relu, residual=residual)

    args = x, norm, residual if added else None
    want, pull = jax.vjp(exact, *args)
    got, pull_ours = jax.vjp(ours, *args)
    for a, b in zip(
        jax.tree.leaves((got, pull_ours(ct))),
        jax.tree.leaves((want, pull(ct))),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("1x1/2", "float16"), ("3x3", "bfloat16"), ("groups", "float32")],
)
def test_inference_folds(name: str, dtype: Any) -> None:
    x, kernel, _, cts, how = arrays(name, dtype)
    rng = np.random.default_rng(5)
    features = kernel.shape[-1]
    eq_scale = jnp.asarray(rng.uniform(0.5, 2.0, features), jnp.float32)
    eq_bias = jnp.asarray(rng.normal(size=features), jnp.float32)
    got = conv_bn_relu_inference(x, kernel, eq_scale, eq_bias, **how)
    with jax.enable_x64():
        exact = [jnp.asarray(float64(a)) for a in (x, kernel)]
        z = reference(exact[0], exact[1], None, how, jnp.float64)
        scale, shift = (v.reshape(1, 1, 1, -1) for v in float64((eq_scale, eq_bias)))
        want = np.maximum(float64(z[0]) * scale + shift, 0)
    assert got.dtype == dtype and (got >= 0).all()
    close(got, want, dtype, int(np.prod(kernel.shape[:3])), roundings=3)
    signed = conv_bn_relu_inference(x, kernel, eq_scale, eq_bias, relu=False, **how)
    assert (signed < 0).any()


X, K = jnp.ones((2, 4, 4, 2), jnp.float16), jnp.ones((1, 1, 2, 3), jnp.float16)
ONE = jnp.ones(2)
GOOD = Norm(ONE, ONE, ONE)


@pytest.mark.parametrize(
    ("args", "options", "sentence"),
    [
        ((X.astype(jnp.int32), K), {}, "`x` must be floating, got int32"),
        ((X[0], K), {}, "`x` must be images .*got shapes \\(4, 4, 2\\) and"),
        ((X, K.astype(jnp.float32)), {}, "`kernel` must have the dtype of `x`, "),
        ((X, K[:, :, :1]), {}, "must be the 2 channels of `x`.*got 1 times 1"),
        ((X, K), {"groups": 2}, "must be the 2 channels of `x`.*got 2 times 2"),
        ((X, K), {"strides": 0}, "`strides` must be a whole number above 0"),
        ((X, K), {"padding": "FULL"}, "`padding` must be 'SAME', 'VALID' or pairs"),
        ((X, K), {"padding": ((1, 1),)}, "`padding` must have a \\(low, high\\) pair"),
        ((X[:1, :1, :1], K), {}, "must have at least 2 values per channel, got 1"),
        ((X, K, tuple(GOOD)), {}, "`norm` must be a Norm, as `norm_of` makes it"),
        ((X, K, GOOD._replace(bias=jnp.ones(3))), {}, "`norm.bias` must have one"),
        ((X, K, GOOD._replace(mean=jnp.ones(2, "float16"))), {},
         "`norm.mean` must be float32, got float16"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(args: Any, options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        conv_bn_relu(*args, **options)


def test_wrong_arguments_of_the_others_are_refused() -> None:
    with pytest.raises(ValueError, match="`eps` must be above 0, got 0"):
        norm_of(ONE, ONE, ONE, ONE, eps=0.0)
    with pytest.raises(ValueError, match="`residual` must be like `x`, float16"):
        normalize(X, GOOD, residual=X[:1])
    with pytest.raises(ValueError, match="`x` must have a batch and a channel axis"):
        normalize(jnp.ones(2), GOOD)
    with pytest.raises(ValueError, match="`eq_bias` must have one value per channel"):
        conv_bn_relu_inference(X, K, jnp.ones(3), ONE)
