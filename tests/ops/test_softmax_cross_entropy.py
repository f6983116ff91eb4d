import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.ops.softmax_cross_entropy import softmax_cross_entropy

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
# exp and log of XLA may be a few units off; sums over classes add half a unit a step.
UNITS = 8


def _case(dtype, shape, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=shape) * spread, jnp.float32).astype(dtype)
    labels = jnp.asarray(rng.integers(0, shape[-1], shape[:-1]), jnp.int32)
    return logits, labels


def _reference(logits, labels, smoothing):
    """Return float64 losses and gradients of their sum."""
    z = np.asarray(logits.astype(jnp.float32), np.float64)
    classes = z.shape[-1]
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    target = (1 - smoothing) * np.eye(classes)[np.asarray(labels)]
    target = target + smoothing / classes
    return -(target * log_p).sum(-1), np.exp(log_p) - target


def _eps(dtype):
    return float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "smoothing"),
    [
        ((1, 1), 0.1),
        ((5, 3), 0.0),
        ((5, 3), 0.1),
        ((7, 1000), 0.1),
        ((2, 3, 17), 0.0),
        ((4,), 0.0),
    ],
)
def test_value_and_gradient_match_float64(dtype, shape, smoothing):
    logits, labels = _case(dtype, shape)

    @jax.jit
    def run(logits):
        losses, pullback = jax.vjp(
            lambda z: softmax_cross_entropy(z, labels, smoothing), logits
        )
        return losses, *pullback(jnp.ones(shape[:-1], jnp.float32))

    losses, gradient = run(logits)
    want, want_gradient = _reference(logits, labels, smoothing)
    assert losses.dtype == jnp.float32 and gradient.dtype == dtype
    # Absolute bound: the loss is a difference of numbers as large as the logits.
    bound = (UNITS + shape[-1] ** 0.5) * _eps(jnp.float32)
    scale = np.abs(np.asarray(logits, np.float64)).max() + np.log(shape[-1]) + 1
    np.testing.assert_allclose(losses, want, rtol=0, atol=bound * scale)
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64),
        want_gradient,
        rtol=_eps(dtype),
        atol=bound * scale + float(jnp.finfo(dtype).smallest_subnormal),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_follows_the_loss_scale(dtype):
    logits, labels = _case(dtype, (6, 10))
    scale = 8192.0

    def scaled(z):
        return scale * softmax_cross_entropy(z, labels, 0.1).mean()

    gradient = jax.jit(jax.grad(scaled))(logits)
    want = scale / 6 * _reference(logits, labels, 0.1)[1]
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64),
        want,
        rtol=_eps(dtype),
        atol=scale * UNITS * _eps(jnp.float32),
    )


def test_agrees_with_autodiff_of_log_softmax():
    logits, labels = _case(jnp.float32, (9, 5))

    def plain(z):
        return -jnp.take_along_axis(
            jax.nn.log_softmax(z), labels[:, None], axis=-1
        ).mean()

    def ours(z):
        return softmax_cross_entropy(z, labels).mean()

    bound = UNITS * _eps(jnp.float32)
    np.testing.assert_allclose(jax.grad(ours)(logits), jax.grad(plain)(logits), bound)


def test_large_fp16_logits_stay_finite():
    logits = jnp.array([[60000.0, -60000.0], [60000.0, 60000.0]], jnp.float16)
    losses = softmax_cross_entropy(logits, jnp.array([1, 0]))
    np.testing.assert_allclose(losses, [120000.0, np.log(2.0)], rtol=1e-6)


def test_masked_class_of_minus_infinity():
    logits = jnp.array([[1.0, -jnp.inf, 1.0]])
    loss, gradient = jax.value_and_grad(
        lambda z: softmax_cross_entropy(z, jnp.array([0])).sum()
    )(logits)
    np.testing.assert_allclose(loss, np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.5, 0.0, 0.5]], atol=1e-6)


@pytest.mark.parametrize("bad", [-1, 3, 127])
@pytest.mark.parametrize("label_dtype", [jnp.int8, jnp.int32, jnp.uint32])
def test_label_out_of_range_is_nan_not_a_number(bad, label_dtype):
    labels = jnp.array([0, bad]).astype(label_dtype)
    logits = jnp.zeros((2, 3))
    losses = jax.jit(softmax_cross_entropy)(logits, labels)
    gradient = jax.grad(lambda z: softmax_cross_entropy(z, labels).sum())(logits)
    assert np.isfinite(losses[0]) and np.isnan(losses[1])
    assert np.isfinite(gradient[0]).all() and np.isnan(gradient[1]).all()


def test_masked_row_with_a_bad_label_leaves_no_trace():
    labels, mask = jnp.array([0, -1]), jnp.array([True, False])

    def loss(z):
        return jnp.where(mask, softmax_cross_entropy(z, labels), 0.0).sum()

    value, gradient = jax.value_and_grad(loss)(jnp.zeros((2, 3)))
    assert np.isfinite(value)
    np.testing.assert_array_equal(gradient[1], 0.0)


def test_small_label_dtype_with_many_classes():
    logits, _ = _case(jnp.float32, (2, 300))
    labels = jnp.array([5, 120])
    np.testing.assert_array_equal(
        softmax_cross_entropy(logits, labels.astype(jnp.int8)),
        softmax_cross_entropy(logits, labels),
    )


def test_vmap_and_empty_batch():
    logits, labels = _case(jnp.float32, (4, 3, 5))
    np.testing.assert_allclose(
        jax.vmap(softmax_cross_entropy)(logits, labels),
        softmax_cross_entropy(logits, labels),
        rtol=UNITS * _eps(jnp.float32),
    )
    assert softmax_cross_entropy(logits[:0], labels[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("logits", "labels", "smoothing", "message"),
    [
        (jnp.zeros((2, 3)), jnp.zeros(2), 0.0, "`labels` must be integer"),
        (jnp.zeros((2, 3)), jnp.zeros(2, bool), 0.0, "`labels` must be integer"),
        (
            jnp.zeros((2, 3)),
            jnp.zeros((2, 3), int),
            0.0,
            "`labels` must have the shape",
        ),
        (jnp.zeros((2, 3)), jnp.zeros(3, int), 0.0, "expected .2,., got .3,."),
        (jnp.zeros((2, 3), int), jnp.zeros(2, int), 0.0, "`logits` must be floating"),
        (jnp.zeros((2, 0)), jnp.zeros(2, int), 0.0, "at least one class"),
        (jnp.zeros(()), jnp.zeros((), int), 0.0, "at least one class"),
        (jnp.zeros((2, 3)), jnp.zeros(2, int), 1.0, "`label_smoothing` must be in"),
        (jnp.zeros((2, 3)), jnp.zeros(2, int), -0.1, "`label_smoothing` must be in"),
        (jnp.zeros((2, 3)), jnp.zeros(2, int), float("nan"), "`label_smoothing`"),
    ],
)
def test_wrong_arguments(logits, labels, smoothing, message):
    with pytest.raises(ValueError, match=message):
        softmax_cross_entropy(logits, labels, smoothing)


def test_unknown_and_missing_implementations():
    args = jnp.zeros((2, 3)), jnp.zeros(2, int)
    with pytest.raises(ValueError, match="`implementation` must be None or one of"):
        softmax_cross_entropy(*args, implementation="cuda")
    with pytest.raises(NotImplementedError, match="has no 'mosaic_gpu'"):
        softmax_cross_entropy(*args, implementation="mosaic_gpu")
