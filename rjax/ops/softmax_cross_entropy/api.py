"""Public face of the softmax cross-entropy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from rjax.ops.dispatch import resolve
from rjax.ops.manual_axes import align
from rjax.ops.softmax_cross_entropy import base

_IMPLEMENTATIONS = {"xla": base.softmax_cross_entropy}


def softmax_cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    label_smoothing: float = 0.0,
    *,
    implementation: str | None = None,
) -> Float32[Array, "*batch"]:
    """Return the cross-entropy of each example with its integer label.

    Equals `-sum(q * log_softmax(float32(logits)), -1)` with the smoothed target
    `q = (1 - label_smoothing) * one_hot(labels) + label_smoothing / classes`. Forward
    and backward compute in float32 whatever the logits are; the gradient
    `ct * (softmax(logits) - q)` is rounded once, to the dtype of the logits. Only
    logits and labels are kept for the backward pass.

    A label outside `[0, classes)` cannot be reported from inside a compiled program:
    its loss is NaN, and so is its gradient unless the incoming cotangent is exactly 0
    (as for padding rows dropped with `jnp.where(mask, losses, 0)`).

    Args:
      logits: any floating dtype, `[*batch, classes]`.
      labels: any integer dtype, `[*batch]`, class ids.
      label_smoothing: Python number in [0, 1).
      implementation: `"xla"`, or `None` to let rjax choose.

    Returns:
      float32 losses, `[*batch]`; take their mean for the usual loss.

    Raises:
      ValueError: a dtype, a shape or `label_smoothing` is wrong.

    Example:
      >>> logits = jnp.array([[0.0, 0.0], [0.0, 200.0]], jnp.float16)
      >>> softmax_cross_entropy(logits, jnp.array([0, 0])).round(4)
      Array([  0.6931, 200.    ], dtype=float32)

    Formula: Szegedy et al., https://arxiv.org/abs/1512.00567, section 7.
    """
    run = resolve("softmax_cross_entropy", implementation, _IMPLEMENTATIONS)
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    _validate(logits, labels, label_smoothing)
    logits, labels = align(logits, labels)
    return run(logits, labels, float(label_smoothing))


def _validate(logits: jax.Array, labels: jax.Array, label_smoothing: float) -> None:
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"`logits` must be floating, got {logits.dtype}; pass the scores that the "
            "model computes, before any argmax."
        )
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            "`logits` must have a last axis of at least one class, got shape "
            f"{logits.shape}; put the classes last."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"`labels` must be integer class ids, got {labels.dtype}; convert one-hot "
            "labels with `labels.argmax(-1)`."
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"`labels` must have the shape of `logits` without its last axis, expected "
            f"{logits.shape[:-1]}, got {labels.shape}; give one class id per example."
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(
            f"`label_smoothing` must be in [0, 1), got {label_smoothing}; 0.1 is the "
            "usual choice, 0 switches it off."
        )
