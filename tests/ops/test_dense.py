import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rjax.ops.dense import dense, float32_weight_gradients
from rjax.ops.dense.taps import find_tap

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
HALF = jnp.float16


def _eps(dtype):
    return float(jnp.finfo(dtype).eps)


def _normal(shape, dtype, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def _f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def _close(got, want, size, length):
    """Compare up to one rounding to the dtype of got and float32 accumulation."""
    assert got.dtype != jnp.float64
    slack = length**0.5 * _eps(jnp.float32) * size
    tiny = float(jnp.finfo(got.dtype).smallest_subnormal)
    np.testing.assert_allclose(_f64(got), want, _eps(got.dtype), slack + tiny)


@pytest.mark.parametrize("x_dtype", [HALF, jnp.float32])
@pytest.mark.parametrize("kernel_dtype", DTYPES)
@pytest.mark.parametrize(
    ("leading", "bias_dtype"),
    [((), jnp.float32), ((33,), jnp.float32), ((33,), HALF), ((2, 5), None)],
)
def test_value_and_gradients_match_float64(x_dtype, kernel_dtype, bias_dtype, leading):
    x = _normal((*leading, 7), x_dtype, 0)
    kernel = _normal((7, 3), kernel_dtype, 1)
    bias = None if bias_dtype is None else _normal((3,), bias_dtype, 2)
    ct = _normal((*leading, 3), kernel_dtype, 3)

    @jax.jit
    def run(x, kernel, bias):
        y, pullback = jax.vjp(dense, x, kernel, bias)
        return y, *pullback(ct)

    y, dx, dw, db = run(x, kernel, bias)
    x64, w64, ct64 = _f64(x.astype(kernel_dtype)), _f64(kernel), _f64(ct)
    want = x64 @ w64 + (0.0 if bias is None else _f64(bias))
    rows = int(np.prod(leading))
    assert (y.dtype, dx.dtype, dw.dtype) == (kernel_dtype, x_dtype, kernel_dtype)
    _close(y, want, 30.0, 7)
    _close(dx, ct64 @ w64.T, 30.0, 3)
    x64, ct64 = x64.reshape(-1, 7), ct64.reshape(-1, 3)
    _close(dw, x64.T @ ct64, 10.0 * rows, rows)
    if bias is None:
        assert db is None
    else:
        assert db.dtype == bias_dtype
        _close(db, ct64.sum(0), 5.0 * rows, rows)


def test_output_is_rounded_once():
    # 2048 + 1 + 1 is 2050 in float32; adding 1 in half precision gives 2048 twice.
    kernel = jnp.array([[2048.0], [1.0]], HALF)
    y = dense(jnp.ones((1, 2), HALF), kernel, jnp.ones(1))
    assert y[0, 0] == 2050.0


def _grads(model, kernel, size=6):
    """Return the kernel's own gradient, the tap's, and the positions used."""
    records = []

    def loss(kernel, tap):
        with float32_weight_gradients([kernel], [tap]) as record:
            out = model(kernel)
        records.append(record)
        return jnp.sum(out.astype(jnp.float32) ** 2) / size

    dw, dtap = jax.jit(jax.grad(loss, (0, 1)))(kernel, jnp.zeros(kernel.shape))
    assert dw.dtype == kernel.dtype and dtap.dtype == jnp.float32
    return dw, dtap, records[-1].used


X = _normal((6, 5), jnp.float32, 0)
TAPPED = {
    "plain": lambda w: dense(X, w),
    "vmap": lambda w: jax.vmap(lambda row: dense(row, w))(X),
    "scan": lambda w: lax.scan(lambda c, row: (c, dense(row, w)), 0, X)[1],
    "checkpoint": lambda w: jax.checkpoint(lambda x: dense(x, w))(X),
    "jit": lambda w: jax.jit(lambda x: dense(x, w))(X),
    "twice": lambda w: dense(dense(X, w), w),
}
UNTAPPED = {
    "vmap": lambda w: jax.vmap(dense)(X, jnp.broadcast_to(w, (6, 5, 5))),
    "scan": lambda w: lax.scan(lambda c, row: (c, dense(row, c)), w, X)[1],
    "checkpoint": lambda w: jax.checkpoint(dense)(X, w),
    "jit": lambda w: jax.jit(dense)(X, w),
    "copy": lambda w: dense(X, w + 0),
    "foreign": lambda w: X.astype(w.dtype) @ w,
}
MIXED = {
    "tied": lambda w: dense(dense(X, w), w.T),
    "closed_and_carried": lambda w: (
        dense(X, w) + lax.scan(lambda c, row: (c, dense(row, c)), w, X)[1]
    ),
}


def _float32_gradient(model, kernel):
    def loss(kernel):
        return jnp.sum(model(kernel) ** 2) / 6

    return jax.jit(jax.grad(loss))(kernel.astype(jnp.float32))


@pytest.mark.parametrize("name", TAPPED)
def test_tapped_kernel_gets_a_float32_gradient(name):
    kernel = _normal((5, 5), HALF, 1)
    dw, dtap, used = _grads(TAPPED[name], kernel)
    assert used == {0}
    np.testing.assert_array_equal(dw, 0.0)
    want = _float32_gradient(TAPPED[name], kernel)
    # The forward pass rounds activations to half, the weight gradient is not rounded.
    np.testing.assert_allclose(dtap, want, 0, 8 * _eps(HALF) * np.abs(want).max())
    assert (dtap != dtap.astype(HALF).astype(jnp.float32)).any()


@pytest.mark.parametrize("name", UNTAPPED)
def test_other_kernels_fall_back_to_their_own_precision(name):
    kernel = _normal((5, 5), HALF, 1)
    dw, dtap, used = _grads(UNTAPPED[name], kernel)
    assert used == set()
    np.testing.assert_array_equal(dtap, 0.0)
    want = _float32_gradient(UNTAPPED[name], kernel)
    np.testing.assert_allclose(_f64(dw), want, 0, 8 * _eps(HALF) * np.abs(want).max())


@pytest.mark.parametrize("name", MIXED)
def test_shared_kernel_has_its_gradient_in_the_sum(name):
    kernel = _normal((5, 5), HALF, 1)
    dw, dtap, used = _grads(MIXED[name], kernel)
    assert used == {0}
    assert np.abs(dw).max() > 0 and np.abs(dtap).max() > 0
    want = _float32_gradient(MIXED[name], kernel)
    total = _f64(dw) + _f64(dtap)
    np.testing.assert_allclose(total, want, 0, 16 * _eps(HALF) * np.abs(want).max())


def test_tapped_gradient_survives_what_half_cannot_hold():
    # Each weight gradient is 6 * 16384 = 98304, infinite in fp16.
    kernel, x = jnp.ones((1, 1), HALF), jnp.ones((6, 1), HALF)

    def loss(kernel, tap, tapped):
        with float32_weight_gradients([kernel] * tapped, [tap] * tapped):
            return 16384.0 * dense(x, kernel).astype(jnp.float32).sum()

    both = jax.grad(loss, (0, 1))
    tap = jnp.zeros((1, 1))
    assert both(kernel, tap, True)[1] == 98304.0
    assert np.isinf(both(kernel, tap, False)[0]).all()


def test_tap_is_exact_under_jit_and_does_not_change_the_value():
    kernel, bias = _normal((5, 4), jnp.bfloat16, 1), _normal((4,), jnp.float32, 2)

    def loss(kernel, tap, bias):
        with float32_weight_gradients([kernel], [tap]):
            y = dense(X, kernel, bias)
        return y.astype(jnp.float32).sum(), y

    tap = jnp.zeros((5, 4))
    (dw, dtap, db), y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(
        kernel, tap, bias
    )
    np.testing.assert_array_equal(_f64(y), _f64(dense(X, kernel, bias)))
    want = _f64(X.astype(jnp.bfloat16)).sum(0)[:, None].repeat(4, 1)
    np.testing.assert_allclose(dtap, want, 6 * _eps(jnp.float32), 1e-6)
    np.testing.assert_array_equal(db, 6.0)
    np.testing.assert_array_equal(_f64(dw), 0.0)


def test_contexts_nest_and_end():
    a, b = jnp.ones((2, 2), HALF), jnp.ones((2, 2), HALF)
    x, tap = jnp.ones((1, 2), HALF), jnp.zeros((2, 2))
    with float32_weight_gradients([a], [tap]) as outer:
        with float32_weight_gradients([b], [tap]) as inner:
            dense(x, a)
            dense(x, b)
        dense(x, b)
    dense(x, a)
    assert outer.used == {0} and inner.used == {0}
    with float32_weight_gradients([a, b], [tap, tap]) as record:
        dense(x, b)
    assert record.used == {1}


def test_context_ends_after_an_error():
    kernel, tap = jnp.ones((2, 2), HALF), jnp.zeros((2, 2))
    with pytest.raises(ValueError, match="`x`"):
        with float32_weight_gradients([kernel], [tap]):
            dense(jnp.ones((1, 3), HALF), kernel)
    assert find_tap(kernel) is None


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([], "expected 1, got 0"),
        ([jnp.zeros((3, 2))], "must be float32 of shape .2, 3., got float32 of shape"),
        ([jnp.zeros((2, 3), HALF)], "must be float32 .* got float16"),
    ],
)
def test_wrong_taps(taps, message):
    with pytest.raises(ValueError, match=message):
        with float32_weight_gradients([jnp.ones((2, 3), HALF)], taps):
            pass


@pytest.mark.parametrize(
    ("x", "kernel", "bias", "message"),
    [
        (jnp.zeros((2, 3)), jnp.zeros((4, 5)), None, "`x` must end in the 4 inputs"),
        (jnp.zeros(()), jnp.zeros((4, 5)), None, "`x` must end in the 4 inputs"),
        (jnp.zeros((2, 3)), jnp.zeros(3), None, "`kernel` must be .inputs, outputs."),
        (jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros(3), "`bias` must have one"),
        (jnp.zeros((2, 3), int), jnp.zeros((3, 5)), None, "`x` must be floating"),
        (jnp.zeros((2, 3)), jnp.zeros((3, 5), int), None, "`kernel` must be floating"),
        (jnp.zeros((2, 3)), jnp.zeros((3, 5)), jnp.zeros(5, int), "`bias` must be fl"),
    ],
)
def test_wrong_arguments(x, kernel, bias, message):
    with pytest.raises(ValueError, match=message):
        dense(x, kernel, bias)


def test_missing_implementation():
    with pytest.raises(NotImplementedError, match="`dense` has no 'mosaic_gpu'"):
        dense(jnp.zeros((2, 3)), jnp.zeros((3, 1)), implementation="mosaic_gpu")
