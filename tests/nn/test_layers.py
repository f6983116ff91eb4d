import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rjax.nn import BatchNorm, Conv, ConvBNReLU, Dense
from rjax.ops.dense import float32_weight_gradients
from rjax.ops.max_pool import Window

KEY = jax.random.key(0)


def _untyped(layer) -> Any:
    """Hide from the type checker what Linen says of `apply`: a value or a pair."""
    return layer


def _half_kernels(params, dtype=jnp.float16):
    """Cast what has two axes or more, as the compute view does."""
    return jax.tree.map(lambda p: p.astype(dtype) if p.ndim > 1 else p, params)


def _x(shape, dtype=jnp.float32):
    values = np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


@pytest.mark.parametrize(
    ("layer", "x", "shapes"),
    [
        (Dense(3), _x((2, 5)), {"kernel": (5, 3), "bias": (3,)}),
        (Dense(3, use_bias=False), _x((5,)), {"kernel": (5, 3)}),
        (Conv(4), _x((1, 6, 5, 3)), {"kernel": (3, 3, 3, 4), "bias": (4,)}),
        (Conv(4, (1, 2), use_bias=False), _x((1, 6, 5, 3)), {"kernel": (1, 2, 3, 4)}),
    ],
)
def test_parameters_and_dtypes(layer, x, shapes):
    params = layer.init(KEY, x)["params"]
    assert jax.tree.map(jnp.shape, params) == shapes
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        view = {"params": _half_kernels(params, dtype)}
        assert jax.eval_shape(layer.apply, view, x).dtype == dtype
        assert jax.eval_shape(layer.apply, view, x.astype(dtype)).dtype == dtype


def test_kernels_start_he_normal():
    kernel = _untyped(Dense(256)).init(KEY, jnp.ones((1, 512)))["params"]["kernel"]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / 512), rtol=0.02)
    kernel = _untyped(Conv(64)).init(KEY, jnp.ones((1, 4, 4, 64)))["params"]["kernel"]
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 64)), rtol=0.02)


@pytest.mark.parametrize("layer", [Dense, Conv, ConvBNReLU])
def test_kernel_init_draws_the_kernel(layer):
    model = _untyped(layer(2, kernel_init=nn.initializers.ones))
    params = model.init(KEY, jnp.ones((1, 2, 2, 3)))["params"]
    assert (params.get("conv", params)["kernel"] == 1).all()


def test_dense_kernel_reaches_the_op_as_it_is():
    layer, x = _untyped(Dense(3)), _x((4, 5))
    params = _half_kernels(layer.init(KEY, x)["params"])

    def loss(params, tap):
        with float32_weight_gradients([params["kernel"]], [tap]) as record:
            y = layer.apply({"params": params}, x)
        assert record.used == {0}
        return y.astype(jnp.float32).sum()

    gradients, tap = jax.grad(loss, (0, 1))(params, jnp.zeros((5, 3)))
    np.testing.assert_array_equal(gradients["kernel"], 0.0)
    want = np.asarray(x.astype(jnp.float16), np.float64).sum(0)[:, None].repeat(3, 1)
    np.testing.assert_allclose(tap, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(gradients["bias"], 4.0)


def test_rematerialised_dense_still_has_its_gradient():
    x = _x((4, 5))
    layer = _untyped(nn.remat(Dense)(3))
    params = _half_kernels(layer.init(KEY, x)["params"])
    gradients = jax.grad(
        lambda p: layer.apply({"params": p}, x).astype(jnp.float32).sum()
    )(params)
    want = np.asarray(x, np.float64).sum(0)[:, None].repeat(3, 1)
    np.testing.assert_allclose(gradients["kernel"], want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("strides", "padding"),
    [(1, "SAME"), (2, "SAME"), ((2, 1), "VALID"), (2, [(1, 0), (2, 1)])],
)
def test_conv_equals_linen(strides, padding):
    x = _x((2, 7, 6, 3))
    ours = _untyped(Conv(4, (3, 2), strides, padding))
    theirs = _untyped(nn.Conv(4, (3, 2), strides, padding))
    params = ours.init(KEY, x)["params"]
    params = {**params, "bias": jnp.arange(4.0)}
    with jax.numpy_rank_promotion("allow"):
        want = theirs.apply({"params": params}, x)
    got = ours.apply({"params": params}, x)
    # 18 products; Linen's and ours may be summed in another order.
    np.testing.assert_allclose(got, want, 0, 180 * float(jnp.finfo(jnp.float32).eps))


def test_conv_runs_in_the_kernels_precision():
    layer, x = _untyped(Conv(2)), _x((1, 4, 4, 1))
    params = _half_kernels(layer.init(KEY, x)["params"])
    text = jax.jit(layer.apply).lower({"params": params}, x).as_text()
    (line,) = [row for row in text.splitlines() if "stablehlo.convolution" in row]
    assert "f32" not in line and "f16" in line


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.zeros((2, 8, 8)), "`x` must be floating images .* got float32 of shape"),
        (jnp.zeros((2, 8, 8, 1), jnp.uint8), "`x` must be floating images .*uint8"),
    ],
)
def test_conv_refuses_what_is_no_image(x, message):
    with pytest.raises(ValueError, match=message):
        Conv(2).init(KEY, x)


def test_batch_norm_equals_linen():
    x = _x((4, 3, 2, 5)) * 3.0 + 1.0
    ours = _untyped(BatchNorm())
    variables = ours.init(KEY, x, use_running_average=False)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {"scale": (5,), "bias": (5,)},
        "batch_stats": {"mean": (5,), "var": (5,)},
    }
    y, new = ours.apply(
        variables, x, use_running_average=False, mutable=["batch_stats"]
    )
    theirs = _untyped(nn.BatchNorm(use_running_average=False, momentum=0.9))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        want, new_theirs = theirs.apply(variables, x, mutable=["batch_stats"])
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    stats, biased = new["batch_stats"], new_theirs["batch_stats"]
    np.testing.assert_allclose(stats["mean"], biased["mean"], rtol=1e-5, atol=1e-6)
    unbiased = 0.9 + (biased["var"] - 0.9) * 24 / 23
    np.testing.assert_allclose(stats["var"], unbiased, rtol=1e-5)


def test_batch_norm_statistics_follow_the_batches():
    layer, x = _untyped(BatchNorm()), jnp.array([[1.0], [3.0]])
    variables = layer.init(KEY, x, use_running_average=False)
    for mean, var in [(0.0, 1.0), (0.2, 1.1), (0.38, 1.19)]:
        stats = variables["batch_stats"]
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-6)
        np.testing.assert_allclose(stats["var"], var, rtol=1e-6)
        _, new = layer.apply(
            variables, x, use_running_average=False, mutable=["batch_stats"]
        )
        variables = {**variables, **new}


def test_batch_norm_uses_its_statistics_in_evaluation():
    layer = _untyped(BatchNorm(relu=True))
    variables = {
        "params": {"scale": jnp.ones(1), "bias": jnp.zeros(1)},
        "batch_stats": {"mean": jnp.full(1, 2.0), "var": jnp.full(1, 4.0)},
    }
    y = layer.apply(variables, jnp.array([[6.0], [0.0]]), use_running_average=True)
    np.testing.assert_allclose(y, [[2.0], [0.0]], rtol=1e-5)


def test_batch_norm_of_one_value_is_an_error_only_in_training():
    layer, x = _untyped(BatchNorm()), jnp.ones((1, 3))
    variables = layer.init(KEY, x, use_running_average=True)
    with pytest.raises(ValueError, match="at least 2 values per channel"):
        layer.apply(variables, x, use_running_average=False, mutable=["batch_stats"])


@pytest.mark.parametrize("average", [False, True])
def test_batch_norm_of_a_convolution_that_is_not_stored(average):
    x, kernel = _x((4, 3, 2, 5)) + 1.0, _x((5, 7))
    layer, residual = _untyped(BatchNorm(relu=True)), _x((4, 3, 2, 7))
    variables = layer.init(KEY, x, False, residual, kernel)
    assert jax.tree.leaves(jax.tree.map(jnp.shape, variables)) == [7] * 4
    how = {"use_running_average": average, "residual": residual}
    run = functools.partial(layer.apply, variables, mutable=["batch_stats"], **how)
    got, wanted = run(x, kernel=kernel), run(jnp.matmul(x, kernel))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, got, wanted)


def test_batch_norm_does_not_pool_what_it_convolves():
    layer = _untyped(BatchNorm(pool=Window(2)))
    with pytest.raises(ValueError, match="`kernel` and `pool` cannot both be given"):
        layer.init(KEY, _x((4, 4, 2, 5)), False, None, _x((5, 7)))


def test_batch_norm_over_devices():
    layer = _untyped(BatchNorm(axis_name="data"))
    x = jnp.array([1.0, 1.0, 1.0, 5.0]).reshape(2, 2, 1)
    variables = layer.init(KEY, x[0], use_running_average=False)

    @jax.jit
    def apply(x):
        def one(part):
            return layer.apply(
                variables, part, use_running_average=False, mutable=["batch_stats"]
            )[1]["batch_stats"]

        return jax.vmap(one, axis_name="data")(x)

    stats = apply(x)
    np.testing.assert_allclose(stats["mean"].ravel(), [0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(stats["var"].ravel(), [1.3, 1.3], rtol=1e-6)


def test_conv_bn_relu_in_half_precision():
    layer, x = _untyped(ConvBNReLU(4, strides=2)), _x((2, 6, 6, 3))
    variables = layer.init(KEY, x)
    assert set(variables["params"]["conv"]) == {"kernel"}
    half = {**variables, "params": _half_kernels(variables["params"])}
    y, new = layer.apply(half, x, train=True, mutable=["batch_stats"])
    assert y.shape == (2, 3, 3, 4) and y.dtype == jnp.float16
    stats = new["batch_stats"]["bn"]
    assert {s.dtype for s in stats.values()} == {jnp.dtype("float32")}
    # Statistics are those of the convolution as stored, in half precision.
    z = lax.conv_general_dilated(
        x.astype(jnp.float16),
        half["params"]["conv"]["kernel"],
        (2, 2),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    z = np.asarray(z, np.float64).reshape(-1, 4)
    np.testing.assert_allclose(stats["mean"], 0.1 * z.mean(0), rtol=1e-4, atol=1e-6)
    want = np.maximum((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5), 0.0)
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(y.reshape(-1, 4), want, eps, 1e-5)


@pytest.mark.parametrize(("channels", "barriers"), [(3, 1), (4, 0)])
def test_images_of_three_channels_are_padded_again_in_the_backward_pass(
    channels, barriers
):
    """XLA on GPU pads them to four, and keeps that where no barrier is."""
    layer, x = Conv(2, use_bias=False), _x((1, 6, 5, channels))
    params = _untyped(layer).init(KEY, x)["params"]
    how: Any = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def loss(kernel):
        return jnp.sum(_untyped(layer).apply({"params": {"kernel": kernel}}, x) ** 2)

    def plain(kernel):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **how)
        return jnp.sum(y**2)

    ours, theirs = jax.jit(jax.grad(loss)), jax.jit(jax.grad(plain))
    kernel = params["kernel"]
    np.testing.assert_allclose(ours(kernel), theirs(kernel), rtol=1e-5)
    assert ours.lower(kernel).as_text().count("optimization_barrier") == barriers
