import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rjax.ops.batch_norm import (
    batch_norm,
    batch_norm_inference,
    fold,
    running_update,
)

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
SHAPES = [(2, 1), (5, 3), (3, 4, 5, 7), (1025, 2), (2, 1, 1, 4)]


def _eps(dtype):
    return float(jnp.finfo(dtype).eps)


def _f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def _case(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(2.0, 3.0, shape), jnp.float32).astype(dtype)
    ct = jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)
    scale = jnp.asarray(rng.uniform(0.5, 2.0, shape[-1]), jnp.float32)
    bias = jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)
    return x, scale, bias, ct


def _reference(x, scale, bias, ct, relu, eps=1e-5):
    """Return float64 y, mean, var, dx, dscale, dbias by the formulas."""
    x, scale, bias, dy = _f64(x), _f64(scale), _f64(bias), _f64(ct)
    axes = tuple(range(x.ndim - 1))
    mean, var = x.mean(axes), x.var(axes)
    istd = 1 / np.sqrt(var + eps)
    xhat = (x - mean) * istd
    z = xhat * scale + bias
    dy = np.where(z > 0, dy, 0.0) if relu else dy
    dbias, dscale = dy.sum(axes), (dy * xhat).sum(axes)
    n = x.size // x.shape[-1]
    dx = scale * istd * (dy - dbias / n - xhat * dscale / n)
    return np.maximum(z, 0) if relu else z, mean, var, dx, dscale, dbias


def _close(got, want, n, size):
    """Compare up to one rounding to the dtype of got and float32 accumulation."""
    slack = (8 + n**0.5) * _eps(jnp.float32) * size
    tiny = float(jnp.finfo(got.dtype).smallest_subnormal)
    np.testing.assert_allclose(_f64(got), want, _eps(got.dtype), slack + tiny)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
def test_value_and_gradients_match_float64(dtype, shape, relu):
    x, scale, bias, ct = _case(shape, dtype)

    @jax.jit
    def run(x, scale, bias):
        def norm(*args):
            return batch_norm(*args, relu=relu)

        (y, mean, var), pullback = jax.vjp(norm, x, scale, bias)
        return y, mean, var, *pullback((ct, mean, var))

    y, mean, var, dx, dscale, dbias = run(x, scale, bias)
    want = _reference(x, scale, bias, ct, relu)
    n = x.size // shape[-1]
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert {a.dtype for a in (mean, var, dscale, dbias)} == {jnp.dtype("float32")}
    # Two values close together have a large 1/std, which magnifies every rounding.
    gain = 1 + 4 * (2.0 / np.sqrt(want[2] + 1e-5)).max()
    for got, expected, size in zip(
        (y, mean, var, dx, dscale, dbias),
        want,
        (4.0, 10.0, 100.0, gain**2, gain * n, 4.0 * n),
        strict=True,
    ):
        _close(got, expected, n, size * gain if got is y else size)


def test_gradient_agrees_with_autodiff_of_plain_jnp():
    x, scale, bias, ct = _case((6, 5, 3), jnp.float32)

    def plain(x, scale, bias):
        rows = x.reshape(-1, 3)
        centred = rows - rows.mean(0, keepdims=True)
        xhat = centred / jnp.sqrt((centred**2).mean(0, keepdims=True) + 1e-5)
        z = jnp.maximum(xhat * scale[None] + bias[None], 0.0)
        return jnp.sum(z.reshape(x.shape) * ct)

    def ours(x, scale, bias):
        return jnp.sum(batch_norm(x, scale, bias, relu=True)[0] * ct)

    got = jax.jit(jax.grad(ours, (0, 1, 2)))(x, scale, bias)
    want = jax.jit(jax.grad(plain, (0, 1, 2)))(x, scale, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, 0, 30 * 4 * _eps(jnp.float32))


def _alternating():
    first = jnp.arange(16 * 224 * 224) % 2 == 0
    return jnp.where(first, 1000.5, 1001.5).astype(jnp.float16).reshape(16, 224, 224, 1)


def test_variance_survives_a_mean_far_above_it():
    x = _alternating()
    one, zero = jnp.ones(1), jnp.zeros(1)
    y, mean, var = jax.jit(batch_norm)(x, one, zero)
    assert mean[0] == 1001.0
    np.testing.assert_allclose(var, 0.25, rtol=1e-6)
    np.testing.assert_array_equal(np.unique(y), [-1.0, 1.0])
    clamped = jax.jit(lambda *a: batch_norm(*a, relu=True))(x, one, zero)[0]
    np.testing.assert_array_equal(np.unique(clamped), [0.0, 1.0])
    _, new_var = running_update(zero, one, mean, var, n=x.size)
    np.testing.assert_allclose(new_var, 0.9 + 0.1 * 0.25 * 802816 / 802815, rtol=1e-6)


@pytest.mark.parametrize("value", [0.3, 0.7])
def test_long_sums_do_not_drift(value):
    # A serial float32 sum rounds each 0.3 to the unit of its running total.
    rows = jnp.full((300_001, 1), value).at[0].set(0.0)
    _, mean, var = jax.jit(batch_norm)(rows, jnp.ones(1), jnp.zeros(1))
    want = np.asarray(rows, np.float64)
    np.testing.assert_allclose(mean, want.mean(0), rtol=2 * _eps(jnp.float32))
    np.testing.assert_allclose(var, want.var(0), rtol=1e-3)


def test_outlier_in_the_first_row():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4096, 1))
    rows[0] = 3e4
    x = jnp.asarray(rows, jnp.float32)
    _, mean, var = batch_norm(x, jnp.ones(1), jnp.zeros(1))
    want = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, want.mean(0), rtol=4 * _eps(jnp.float32))
    np.testing.assert_allclose(var, want.var(0), rtol=64 * _eps(jnp.float32))


def test_two_values():
    x = jnp.array([[1.0], [3.0]])
    y, mean, var = batch_norm(x, jnp.ones(1), jnp.zeros(1))
    np.testing.assert_allclose(y.ravel(), [-0.999995, 0.999995], rtol=1e-6)
    new_mean, new_var = running_update(jnp.zeros(1), jnp.ones(1), mean, var, n=2)
    np.testing.assert_allclose(new_mean, 0.2, rtol=1e-6)
    np.testing.assert_allclose(new_var, 1.1, rtol=1e-6)
    new_mean, new_var = running_update(new_mean, new_var, mean, var, n=2)
    np.testing.assert_allclose(new_mean, 0.38, rtol=1e-6)
    np.testing.assert_allclose(new_var, 1.19, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_bad_input_shows_in_everything(bad):
    x = jnp.array([[bad], [1.0], [2.0]])
    for out in batch_norm(x, jnp.ones(1), jnp.zeros(1), relu=True):
        assert not np.isfinite(out).all()


def test_constant_channel_is_bias():
    y, _, var = batch_norm(jnp.full((7, 2), 1e4 + 1), jnp.ones(2), jnp.array([1.0, 2]))
    np.testing.assert_array_equal(var, 0.0)
    np.testing.assert_array_equal(y, np.tile([1.0, 2.0], (7, 1)))


def test_statistics_have_no_gradient():
    def loss(x):
        _, mean, var = batch_norm(x, jnp.ones(2), jnp.zeros(2))
        return mean.sum() + var.sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.arange(6.0).reshape(3, 2)), 0.0)


def test_devices_share_the_global_batch():
    x = jnp.array([[1.0], [1.0], [1.0], [5.0], [5.0], [5.0]]).reshape(2, 3, 1)
    ct = jnp.arange(6.0).reshape(2, 3, 1)
    one, zero = jnp.ones(1), jnp.zeros(1)

    def gradients(x, ct, axis):
        def loss(x, scale, bias):
            y, mean, var = batch_norm(x, scale, bias, axis_name=axis)
            return jnp.sum(y * ct), (y, mean, var)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(x, one, zero)

    @jax.jit
    def over_devices(x, ct):
        each = jax.vmap(lambda x, ct: gradients(x, ct, "data"), axis_name="data")
        return each(x, ct)

    got, (y, mean, var) = over_devices(x, ct)
    want, (y1, _, _) = jax.jit(gradients, static_argnums=2)(
        x.reshape(6, 1), ct.reshape(6, 1), None
    )
    np.testing.assert_array_equal(mean.ravel(), [3.0, 3.0])
    np.testing.assert_array_equal(var.ravel(), [4.0, 4.0])
    np.testing.assert_allclose(y.ravel(), y1.ravel(), rtol=1e-6)
    np.testing.assert_allclose(got[0].ravel(), want[0].ravel(), 0, 1e-5)
    for local, whole in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(local.sum(0), whole, rtol=1e-6)


def test_replicated_parameters_in_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x, scale, bias, ct = _case((6, 3), jnp.float32)

    def gradients(scale, x):
        def loss(scale):
            return jnp.sum(batch_norm(x, scale, bias, axis_name="data")[0] * ct)

        return jax.grad(loss)(scale)

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    want = _reference(x, scale, bias, ct, relu=False)[4]
    np.testing.assert_allclose(jax.jit(sharded)(scale, x), want, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
def test_inference_matches_float64(dtype, relu):
    x, scale, bias, _ = _case((4, 3, 5), dtype)
    mean, var = jnp.linspace(-1.0, 3.0, 5), jnp.linspace(0.1, 4.0, 5)
    y = batch_norm_inference(x, scale, bias, mean, var, relu=relu)
    want = (_f64(x) - _f64(mean)) / np.sqrt(_f64(var) + 1e-5)
    want = want * _f64(scale) + _f64(bias)
    assert y.dtype == dtype
    _close(y, np.maximum(want, 0) if relu else want, 1, 100.0)


def test_fold_and_inference_agree():
    x, scale, bias, _ = _case((4, 5), jnp.float32)
    mean, var = jnp.linspace(-1.0, 3.0, 5), jnp.linspace(0.1, 4.0, 5)
    eq_scale, eq_bias = fold(scale, bias, mean, var)
    np.testing.assert_allclose(
        batch_norm_inference(x, scale, bias, mean, var),
        x * eq_scale[None] + eq_bias[None],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("shape", "kwargs", "message"),
    [
        ((1, 3), {}, "at least 2 values per channel, got 1"),
        ((1, 1, 1, 3), {}, "at least 2 values per channel, got 1"),
        ((0, 3), {}, "at least 2 values per channel, got 0"),
        ((3,), {}, "`x` must have a batch and a channel axis"),
        ((2, 4), {}, "`scale` must have one value per channel"),
        ((2, 3), {"eps": 0.0}, "`eps` must be above 0"),
    ],
)
def test_wrong_arguments(shape, kwargs, message):
    with pytest.raises(ValueError, match=message):
        batch_norm(jnp.zeros(shape), jnp.ones(3), jnp.zeros(3), **kwargs)


def test_wrong_dtypes_and_inference_shapes():
    three = jnp.ones(3)
    with pytest.raises(ValueError, match="`x` must be floating, got int32"):
        batch_norm(jnp.zeros((2, 3), jnp.int32), three, three)
    with pytest.raises(ValueError, match="`var` must have one value per channel"):
        batch_norm_inference(jnp.zeros((2, 3)), three, three, three, jnp.ones(2))
    with pytest.raises(NotImplementedError, match="`batch_norm/statistics` has no"):
        batch_norm(jnp.zeros((2, 3)), three, three, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("n", "momentum", "message"),
    [(1, 0.1, "`n` must be at least 2"), (2, 1.5, "`momentum` must be in")],
)
def test_wrong_running_update(n, momentum, message):
    one = jnp.ones(1)
    with pytest.raises(ValueError, match=message):
        running_update(one, one, one, one, n, momentum)
