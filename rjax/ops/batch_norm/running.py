"""Running statistics of a batch norm, and their folding for inference."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32


def running_update(
    running_mean: Float32[Array, " channels"],
    running_var: Float32[Array, " channels"],
    mean: Float32[Array, " channels"],
    var: Float32[Array, " channels"],
    n: int,
    momentum: float = 0.1,
) -> tuple[Float32[Array, " channels"], Float32[Array, " channels"]]:
    """Return the running statistics after one batch.

    Equals `(1 - momentum) * running + momentum * batch`, where the batch variance is
    made unbiased with `n / (n - 1)`. The factors are formed in float64 on the host and
    rounded once, so a large `n` costs no accuracy.

    Args:
      running_mean: float32 `[channels]`.
      running_var: float32 `[channels]`, unbiased.
      mean: float32 `[channels]`, of the batch.
      var: float32 `[channels]`, biased, of the batch.
      n: values per channel in the batch (over all devices), a Python int.
      momentum: weight of the batch, in [0, 1] (PyTorch's convention).

    Returns:
      The new running mean and running variance, float32 `[channels]`.

    Raises:
      ValueError: `n` is below 2, or `momentum` is outside [0, 1].

    Example:
      >>> zero, one = jnp.zeros(1), jnp.ones(1)
      >>> running_update(zero, one, mean=2 * one, var=one, n=2)
      (Array([0.2], dtype=float32), Array([1.1], dtype=float32))

    Formula: https://pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html
    """
    if n < 2:
        raise ValueError(
            f"`n` must be at least 2 values per channel, got {n}; the variance of one "
            "value is not defined, use a larger batch."
        )
    if not 0.0 <= momentum <= 1.0:
        raise ValueError(
            f"`momentum` must be in [0, 1], got {momentum}; it is the weight of the "
            "new batch, usually 0.1."
        )
    keep = np.float32(1.0 - momentum)
    new_mean = keep * running_mean + np.float32(momentum) * mean
    new_var = keep * running_var + np.float32(momentum * n / (n - 1)) * var
    return new_mean, new_var


def fold(
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    mean: Float[Array, " channels"],
    var: Float[Array, " channels"],
    eps: float = 1e-5,
) -> tuple[Float32[Array, " channels"], Float32[Array, " channels"]]:
    """Fold statistics and parameters into one multiply and one add per channel.

    Equals `eq_scale = scale / sqrt(var + eps)` and `eq_bias = bias - mean * eq_scale`,
    in float32.

    Args:
      scale: floating `[channels]`.
      bias: floating `[channels]`.
      mean: floating `[channels]`.
      var: floating `[channels]`, not negative.
      eps: added to the variance.

    Returns:
      `(eq_scale, eq_bias)`, float32 `[channels]`: the norm is `x * eq_scale + eq_bias`.

    Example:
      >>> one = jnp.ones(1)
      >>> fold(2 * one, one, 3 * one, one, eps=0.0)
      (Array([2.], dtype=float32), Array([-5.], dtype=float32))
    """
    scale, bias, mean, var = map(_float32, (scale, bias, mean, var))
    eq_scale = scale * lax.rsqrt(var + eps)
    return eq_scale, bias - mean * eq_scale


def _float32(x: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)
