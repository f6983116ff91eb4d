"""Softmax cross-entropy in plain jnp: reference, fallback and documentation."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_Residuals = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax_cross_entropy(
    logits: jax.Array, labels: jax.Array, label_smoothing: float
) -> jax.Array:
    """Return float32 losses `[*batch]`; see the API page."""
    return _losses(logits, labels, label_smoothing)


def _losses(logits: jax.Array, labels: jax.Array, label_smoothing: float) -> jax.Array:
    shifted, log_sum = _shift(logits)
    at_label, in_range = _at_label(labels, logits.shape[-1])
    # The target sums to 1, so the shift by the maximum drops out of the loss; using
    # shifted logits throughout keeps small losses exact beside large logits.
    picked = jnp.where(at_label, shifted, 0.0).sum(-1)
    loss = log_sum - (1.0 - label_smoothing) * picked
    if label_smoothing:  # 0 * (-inf logit) would be NaN
        loss = loss - label_smoothing * shifted.mean(-1)
    return jnp.where(in_range, loss, jnp.nan)


def _forward(
    logits: jax.Array, labels: jax.Array, label_smoothing: float
) -> tuple[jax.Array, _Residuals]:
    return _losses(logits, labels, label_smoothing), (logits, labels)


def _backward(
    label_smoothing: float, residuals: _Residuals, ct: jax.Array
) -> tuple[jax.Array, None]:
    logits, labels = residuals
    classes = logits.shape[-1]
    shifted, log_sum = _shift(logits)
    probabilities = jnp.exp(shifted - log_sum[..., None])
    at_label, in_range = _at_label(labels, classes)
    target = jnp.where(at_label, 1.0 - label_smoothing, 0.0) + label_smoothing / classes
    # A row that the caller masked out (cotangent 0) must not poison the gradient.
    ct = jnp.where(in_range | (ct == 0.0), ct, jnp.nan)
    gradient = ct[..., None] * (probabilities - target)
    return gradient.astype(logits.dtype), None


softmax_cross_entropy.defvjp(_forward, _backward)


def _shift(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 logits minus their maximum, and their log-sum-exp."""
    logits = logits.astype(jnp.float32)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted, jnp.log(jnp.exp(shifted).sum(-1))


def _at_label(labels: jax.Array, classes: int) -> tuple[jax.Array, jax.Array]:
    """Return the one-hot mask and whether each label names a class."""
    if labels.dtype.itemsize < 4:  # int8 cannot be compared with 1000 classes
        labels = labels.astype(jnp.int32)
    ids = lax.broadcasted_iota(labels.dtype, (*labels.shape, classes), labels.ndim)
    return ids == labels[..., None], (labels >= 0) & (labels < classes)
