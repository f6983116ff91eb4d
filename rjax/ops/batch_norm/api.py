"""Public face of the batch norm ops."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from rjax.ops.batch_axes import shared_axes
from rjax.ops.batch_norm import training
from rjax.ops.batch_norm.checks import check_arrays, check_residual, check_values
from rjax.ops.batch_norm.running import fold
from rjax.ops.manual_axes import align
from rjax.ops.max_pool.window import Window


def batch_norm(
    x: Float[Array, "*batch channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    *,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Float[Array, "*batch channels"] | None = None,
    pool: Window | None = None,
    twice: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str | None = None,
) -> tuple[
    Any,
    Float32[Array, " channels"],
    Float32[Array, " channels"],
]:
    """Normalise each channel by the statistics of this batch.

    Equals, over all axes but the last and in float32,
    `y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias`, then what is asked for: the
    residual is added, a ReLU clamps, windows are pooled. Rounded once, at the end, to
    the dtype of x. Statistics accumulate in float32, each part of the batch about a
    value or mean of its own, so that they survive a mean far above the spread.

    Each pass (statistics, apply; backward reduce, gradient) reads every array once.
    The backward pass keeps x and recomputes the rest, the ReLU mask and the places of
    the largest values too; after a residual and a ReLU it keeps y as well, which the
    next layer keeps anyway. Each gradient is rounded once.

    The returned statistics are for `running_update`: they are **not differentiable**,
    a loss that depends on them gets no gradient through them.

    Args:
      x: any floating dtype, channel last.
      scale: any floating dtype, `[channels]`.
      bias: any floating dtype, `[channels]`.
      eps: added to the variance.
      relu: whether to clamp the result at zero.
      residual: added before the ReLU, in shape and dtype of x. Its gradient is that of
        the sum.
      pool: keeps the largest value of each window, after the ReLU; x is then
        `[batch, height, width, channels]` and there is no residual. Which element that
        is, and gets the gradient, is found in x: the first of the largest, or of the
        smallest where `scale` is negative.
      twice: return y as a pair of one array, for two uses of it. Their gradients are
        then added in float32 on the way back, where otherwise JAX adds them in a pass
        of its own; it pays after a residual and a ReLU.
      axis_name: mesh (or `vmap`) axes whose devices share their statistics; `None`:
        those that :func:`rjax.parallel.data_parallel` splits the batch over, if any;
        `()`: none. The gradients of `scale` and `bias` stay those of the local part of
        the batch.
      implementation: `"xla"`, `"mosaic_gpu"`, or `None` to let rjax choose for each
        pass. The kernels agree with XLA within the order of float32 sums.

    Returns:
      `(y, mean, var)`: y, or a pair of it, in the dtype of x and of its shape unless it
      is pooled; mean and biased variance of the batch, float32 `[channels]`.

    Raises:
      ValueError: a dtype, a shape or `eps` is wrong, channels have fewer than two
        values, or there are both a residual and pooling.
      NotImplementedError: if the implementation named cannot serve.

    Example:
      >>> x = jnp.array([[1.0], [3.0]], jnp.float16)
      >>> y, mean, var = batch_norm(x, jnp.ones(1), jnp.zeros(1), relu=True)
      >>> y.ravel(), mean, var
      (Array([0., 1.], dtype=float16), Array([2.], dtype=float32),
       Array([1.], dtype=float32))

    Formula: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, algorithm 1;
      backward `dx = scale * istd * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)`.
    """
    x, scale, bias = (jnp.asarray(a) for a in (x, scale, bias))
    _validate(x, eps, {"scale": scale, "bias": bias}, residual, pool)
    axis_name = shared_axes(axis_name)
    n = training.values_per_channel(x, axis_name)
    check_values(n, x)
    how = training.How(
        eps=float(eps),
        relu=bool(relu),
        residual=residual is not None,
        twice=bool(twice),
        window=pool,
        axis_name=axis_name,
        implementation=implementation,
    )
    if residual is None:
        x, scale, bias = align(x, scale, bias)
    else:
        x, scale, bias, residual = align(x, scale, bias, residual)
    return training.batch_norm(how, x, scale, bias, residual)


def batch_norm_inference(
    x: Float[Array, "*batch channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    mean: Float[Array, " channels"],
    var: Float[Array, " channels"],
    *,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Float[Array, "*batch channels"] | None = None,
    pool: Window | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch channels"]:
    """Normalise each channel by given statistics, as a trained model does.

    Equals `x * eq_scale + eq_bias` with the two factors of `fold`, computed in float32,
    then what is asked for as in
    :func:`batch_norm`, rounded once to the dtype of x. Differentiable in all arrays.

    Args:
      x: any floating dtype, channel last.
      scale: any floating dtype, `[channels]`.
      bias: any floating dtype, `[channels]`.
      mean: floating `[channels]`, the running mean.
      var: floating `[channels]`, the running variance.
      eps: added to the variance.
      relu: whether to clamp the result at zero.
      residual: as in :func:`batch_norm`.
      pool: as in :func:`batch_norm`.
      implementation: `"xla"`, `"mosaic_gpu"`, or `None` to let rjax choose.

    Returns:
      An array of the dtype of x, and of its shape unless it is pooled.

    Raises:
      ValueError: a dtype, a shape or `eps` is wrong, or there are both a residual and
        pooling.
      NotImplementedError: if the implementation named cannot serve.

    Example:
      >>> one = jnp.ones(1)
      >>> batch_norm_inference(jnp.array([[3.0]]), one, one, one, 4 * one).round(3)
      Array([[2.]], dtype=float32)
    """
    x, scale, bias, mean, var = (jnp.asarray(a) for a in (x, scale, bias, mean, var))
    per_channel = {"scale": scale, "bias": bias, "mean": mean, "var": var}
    _validate(x, eps, per_channel, residual, pool)
    eq_scale, eq_bias = fold(scale, bias, mean, var, eps)
    vectors = jnp.zeros_like(eq_bias), eq_scale, eq_bias
    options = {"relu": bool(relu), "window": pool, "implementation": implementation}
    return training.run_pass("apply", x, *vectors, residual, **options)


def _validate(
    x: jax.Array,
    eps: float,
    per_channel: dict[str, jax.Array],
    residual: jax.Array | None,
    pool: Window | None,
) -> None:
    check_arrays(x, per_channel, eps)
    for name, array in per_channel.items():
        if array.shape != x.shape[-1:]:
            raise ValueError(
                f"`{name}` must have one value per channel of `x`, expected "
                f"{x.shape[-1:]}, got {array.shape}; channels are the last axis of `x`."
            )
    check_residual(residual, "`x`", x.shape, x.dtype)
    if pool is None:
        return
    if residual is not None:
        raise ValueError(
            "`residual` and `pool` cannot both be given; pool the sum by `max_pool`."
        )
    if x.ndim != 4:
        raise ValueError(
            "`x` must be images [batch, height, width, channels] to be pooled, got "
            f"shape {x.shape}; leave `pool` out."
        )
