"""Public face of the batch norm ops."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from rjax.ops.batch_norm import base
from rjax.ops.dispatch import resolve
from rjax.ops.manual_axes import align

_TRAINING = {"xla": base.batch_norm}
_INFERENCE = {"xla": base.batch_norm_inference}


def batch_norm(
    x: Float[Array, "*batch channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    *,
    eps: float = 1e-5,
    relu: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "*batch channels"],
    Float32[Array, " channels"],
    Float32[Array, " channels"],
]:
    """Normalise each channel by the statistics of this batch.

    Equals, over all axes but the last and in float32,
    `y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias`, then a ReLU if asked for,
    rounded once to the dtype of x. Statistics accumulate in float32 as trees of
    centred sums, so that they survive a mean far above the spread. The backward pass
    keeps x, recomputes the rest (the ReLU mask too) and rounds each gradient once.

    The returned statistics are for `running_update`: they are **not differentiable**,
    a loss that depends on them gets no gradient through them.

    Args:
      x: any floating dtype, channel last.
      scale: any floating dtype, `[channels]`.
      bias: any floating dtype, `[channels]`.
      eps: added to the variance.
      relu: whether to clamp the result at zero.
      axis_name: mesh (or `vmap`) axes whose devices share their statistics. The
        gradients of `scale` and `bias` stay those of the local part of the batch.
      implementation: `"xla"`, or `None` to let rjax choose.

    Returns:
      `(y, mean, var)`: y in shape and dtype of x; mean and biased variance of the
      batch, float32 `[channels]`.

    Raises:
      ValueError: a dtype, a shape or `eps` is wrong, or channels have fewer than two
        values.

    Example:
      >>> x = jnp.array([[1.0], [3.0]], jnp.float16)
      >>> y, mean, var = batch_norm(x, jnp.ones(1), jnp.zeros(1), relu=True)
      >>> y.ravel(), mean, var
      (Array([0., 1.], dtype=float16), Array([2.], dtype=float32),
       Array([1.], dtype=float32))

    Formula: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, algorithm 1;
      backward `dx = scale * istd * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)`.
    """
    run = resolve("batch_norm", implementation, _TRAINING)
    x, scale, bias = (jnp.asarray(a) for a in (x, scale, bias))
    _validate(x, eps, {"scale": scale, "bias": bias})
    n = base.values_per_channel(x, axis_name)
    if n < 2:
        raise ValueError(
            f"`x` must have at least 2 values per channel, got {n} in shape {x.shape}; "
            "use a larger batch, or `batch_norm_inference`."
        )
    x, scale, bias = align(x, scale, bias)
    return run(x, scale, bias, float(eps), bool(relu), axis_name)


def batch_norm_inference(
    x: Float[Array, "*batch channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    mean: Float[Array, " channels"],
    var: Float[Array, " channels"],
    *,
    eps: float = 1e-5,
    relu: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*batch channels"]:
    """Normalise each channel by given statistics, as a trained model does.

    Equals `x * eq_scale + eq_bias` with the two factors of `fold`, computed in float32,
    then a ReLU if asked for, rounded once to the dtype of x. Differentiable in all
    arrays.

    Args:
      x: any floating dtype, channel last.
      scale: any floating dtype, `[channels]`.
      bias: any floating dtype, `[channels]`.
      mean: floating `[channels]`, the running mean.
      var: floating `[channels]`, the running variance.
      eps: added to the variance.
      relu: whether to clamp the result at zero.
      implementation: `"xla"`, or `None` to let rjax choose.

    Returns:
      An array of the shape and dtype of x.

    Raises:
      ValueError: a dtype, a shape or `eps` is wrong.

    Example:
      >>> one = jnp.ones(1)
      >>> batch_norm_inference(jnp.array([[3.0]]), one, one, one, 4 * one).round(3)
      Array([[2.]], dtype=float32)
    """
    run = resolve("batch_norm_inference", implementation, _INFERENCE)
    x, scale, bias, mean, var = (jnp.asarray(a) for a in (x, scale, bias, mean, var))
    _validate(x, eps, {"scale": scale, "bias": bias, "mean": mean, "var": var})
    return run(x, scale, bias, mean, var, float(eps), bool(relu))


def _validate(x: jax.Array, eps: float, per_channel: dict[str, jax.Array]) -> None:
    for name, array in ({"x": x} | per_channel).items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"`{name}` must be floating, got {array.dtype}; convert it with "
                "`.astype(jnp.float32)`."
            )
    if x.ndim < 2:
        raise ValueError(
            f"`x` must have a batch and a channel axis, got shape {x.shape}; put the "
            "channels last."
        )
    for name, array in per_channel.items():
        if array.shape != x.shape[-1:]:
            raise ValueError(
                f"`{name}` must have one value per channel of `x`, expected "
                f"{x.shape[-1:]}, got {array.shape}; channels are the last axis of `x`."
            )
    if not eps > 0.0:
        raise ValueError(f"`eps` must be above 0, got {eps}; the usual value is 1e-5.")
