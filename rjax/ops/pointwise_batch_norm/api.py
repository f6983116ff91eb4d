"""Public face of the pointwise batch norm."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from rjax.ops.batch_axes import shared_axes
from rjax.ops.batch_norm.checks import check_arrays, check_residual, check_values
from rjax.ops.batch_norm.training import values_per_channel
from rjax.ops.manual_axes import align
from rjax.ops.pointwise_batch_norm import training


def pointwise_batch_norm(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"],
    scale: Float[Array, " outputs"],
    bias: Float[Array, " outputs"],
    *,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Float[Array, "*batch outputs"] | None = None,
    twice: bool = False,
    after: Float[Array, "outputs features"] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Any, Float32[Array, " outputs"], Float32[Array, " outputs"]]:
    """Normalise a 1x1 convolution of x by the statistics of this batch.

    Equals, in exact arithmetic, `batch_norm(x @ kernel, scale, bias, ...)`, but the
    product `z = x @ kernel` is neither written nor kept, and neither is its gradient:
    mean and variance of z follow from mean and covariance of x, the norm becomes a part
    of the kernel, and the gradients are products of x and of the gradient of y with
    small matrices. It pays where there are several times as many outputs as inputs and
    memory sets the pace: of passes over an array of the size of y, seven of fifteen go
    away after a residual and a ReLU.

    The statistics are those of z before any rounding, where `batch_norm` has those of
    the z that was stored. The folded kernel, and on a GPU the folded bias, are rounded
    to the dtype of x; y is rounded once.

    Args:
      x: any floating dtype, channel last.
      kernel: `[inputs, outputs]` in the dtype of x; its gradient has that dtype too.
      scale: any floating dtype, `[outputs]`.
      bias: any floating dtype, `[outputs]`.
      eps: added to the variance.
      relu: whether to clamp the result at zero.
      residual: added before the ReLU, in shape and dtype of y. Its gradient is that of
        the sum.
      twice: return y as a pair of one array, for two uses of it, as in `batch_norm`.
      after: kernel of a 1x1 convolution of y that comes next: returns `(y, y @ after)`
        in place of y, and y's two gradients meet in one pass. It needs `relu`.
      axis_name: mesh (or `vmap`) axes whose devices share their statistics; `None`:
        those that :func:`rjax.parallel.data_parallel` splits the batch over, if any;
        `()`: none. The gradients of `kernel`, `scale` and `bias` stay those of the
        local part.

    Returns:
      `(y, mean, var)`: y, or a pair, `[*batch, outputs]` in the dtype of x; mean and
        biased variance of z, float32 `[outputs]`, not differentiable, for
        `running_update`.

    Raises:
      ValueError: a dtype, a shape or `eps` is wrong, or channels have fewer than two
        values.

    Example:
      >>> x = jnp.array([[1.0], [3.0]], jnp.float16)
      >>> kernel = jnp.ones((1, 1), jnp.float16)
      >>> y, mean, var = pointwise_batch_norm(x, kernel, jnp.ones(1), jnp.zeros(1))
      >>> y.ravel(), mean, var
      (Array([-1.,  1.], dtype=float16), Array([2.], dtype=float32),
       Array([1.], dtype=float32))

    Formula: that of `batch_norm`, with `mean(x @ k) = mean(x) @ k` and
      `cov(x @ k) = k.T @ cov(x) @ k`.
    """
    x, kernel, scale, bias = (jnp.asarray(a) for a in (x, kernel, scale, bias))
    _validate(x, kernel, {"scale": scale, "bias": bias}, residual, eps)
    _validate_after(after, kernel, relu=relu, twice=twice)
    axis_name = shared_axes(axis_name)
    n = values_per_channel(x, axis_name)
    check_values(n, x)
    how = training.How(
        eps=float(eps),
        relu=bool(relu),
        residual=residual is not None,
        twice=bool(twice),
        after=after is not None,
        axis_name=axis_name,
    )
    given = {"residual": residual, "after": after}
    there = {name: jnp.asarray(a) for name, a in given.items() if a is not None}
    x, kernel, scale, bias, *more = align(x, kernel, scale, bias, *there.values())
    given |= dict(zip(there, more, strict=True))
    return training.pointwise_batch_norm(how, x, kernel, scale, bias, *given.values())


def _validate(
    x: jax.Array,
    kernel: jax.Array,
    per_channel: dict[str, jax.Array],
    residual: jax.Array | None,
    eps: float,
) -> None:
    check_arrays(x, {"kernel": kernel, **per_channel}, eps)
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1] or kernel.dtype != x.dtype:
        raise ValueError(
            f"`kernel` must be [inputs, outputs] for the {x.shape[-1]} channels of `x` "
            f"and {x.dtype} like it, got {kernel.dtype} of shape {kernel.shape}; "
            "reshape the [1, 1, inputs, outputs] of a convolution, and convert x."
        )
    for name, array in per_channel.items():
        if array.shape != kernel.shape[1:]:
            raise ValueError(
                f"`{name}` must have one value per output of `kernel`, expected "
                f"{kernel.shape[1:]}, got {array.shape}."
            )
    shape = (*x.shape[:-1], kernel.shape[1])
    check_residual(residual, "the result", shape, x.dtype)


def _validate_after(
    after: jax.Array | None, kernel: jax.Array, *, relu: bool, twice: bool
) -> None:
    if after is None:
        return
    outputs, dtype = kernel.shape[1], kernel.dtype
    if jnp.ndim(after) != 2 or after.shape[0] != outputs or after.dtype != dtype:
        raise ValueError(
            f"`after` must be [outputs, features] for the {outputs} outputs of "
            f"`kernel` and {dtype} like it, got {after.dtype} of shape {after.shape}; "
            "reshape the [1, 1, outputs, features] of a convolution, and convert it."
        )
    if twice or not relu:
        raise ValueError(
            "`after` needs relu=True and cannot be given with twice=True: it already "
            "makes a pair; change these, or convolve y by `Conv`."
        )
