"""A batch norm that was not applied yet: what the next layer does to its input."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


class Norm(NamedTuple):
    """`relu((x - mean) * factor + bias)`, a value of each per channel.

    The mean is taken away first: far above the spread, `x * factor` and a bias that
    cancels it would leave little of a float32.

    Attributes:
        mean: float32 `[channels]`.
        factor: float32 `[channels]`.
        bias: float32 `[channels]`.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> norm = rjax.ops.Norm(jnp.ones(2), jnp.full(2, 2.0), jnp.zeros(2))
        >>> norm.factor.tolist()
        [2.0, 2.0]
    """

    mean: jax.Array
    factor: jax.Array
    bias: jax.Array


def norm_of(
    mean: Float32[Array, " channels"],
    var: Float32[Array, " channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    eps: float = 1e-5,
) -> Norm:
    """Return the norm that statistics and parameters make.

    Equals `Norm(mean, scale / sqrt(var + eps), bias)` in float32, and is differentiable
    in all four: what a loss wants of statistics goes back through them.

    Args:
        mean: float32 `[channels]`.
        var: float32 `[channels]`, biased, not negative.
        scale: floating `[channels]`.
        bias: floating `[channels]`.
        eps: added to the variance.

    Returns:
        A :class:`Norm`, float32 `[channels]` each.

    Raises:
        ValueError: if `eps` is not above 0.

    Example:
        >>> one = jnp.ones(1)
        >>> norm_of(one, 3 * one, 4 * one, one, eps=1.0).factor
        Array([2.], dtype=float32)

    Formula: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, algorithm 1.
    """
    if not eps > 0.0:
        raise ValueError(f"`eps` must be above 0, got {eps}; the usual value is 1e-5.")
    mean, var, scale, bias = (
        jnp.asarray(x).astype(jnp.float32) for x in (mean, var, scale, bias)
    )
    return Norm(mean, scale * lax.rsqrt(var + eps), bias)
