"""Layers: parameters are float32 at init, compute follows the parameters given.

None has a dtype attribute. A half-precision kernel makes its layer compute in half
precision with float32 accumulation; norm parameters and biases stay float32 and are
used as such.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rjax.nn.draws import he_normal
from rjax.ops.batch_axes import shared_axes
from rjax.ops.batch_norm import (
    batch_norm,
    batch_norm_inference,
    running_update,
    values_per_channel,
)
from rjax.ops.dense import dense
from rjax.ops.max_pool import Window
from rjax.ops.pointwise_batch_norm import pointwise_batch_norm


class Dense(nn.Module):
    """Multiply by a kernel and add a bias, by `rjax.ops.dense`.

    Parameters `kernel` `[inputs, features]` and `bias` `[features]`; the output has the
    dtype of the kernel. Used once in a model, its kernel gets a float32 gradient.

    Attributes:
      features: outputs per example.
      use_bias: whether there is a bias.
      kernel_init: draws the kernel, `(key, shape, dtype) -> array`.

    Example:
      >>> layer = Dense(3)
      >>> params = layer.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
      >>> half = {**params, "kernel": params["kernel"].astype(jnp.float16)}
      >>> layer.apply({"params": half}, jnp.ones((1, 2))).dtype
      dtype('float16')
    """

    features: int
    use_bias: bool = True
    kernel_init: Callable[..., jax.Array] = he_normal

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch inputs"]
    ) -> Float[Array, "*batch features"]:
        """Return `x @ kernel + bias` in the kernel's dtype."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param(
                "bias", nn.initializers.zeros, (self.features,), jnp.float32
            )
        return dense(x, kernel, bias)


class Conv(nn.Module):
    """Convolve images over height and width.

    Parameters `kernel` `[height, width, inputs, features]` and, if asked for, `bias`
    `[features]`; the output has the dtype of the kernel, and so has its gradient.

    Attributes:
      features: output channels.
      kernel_size: height and width of the kernel, or one int for both.
      strides: steps along height and width, or one int for both.
      padding: `"SAME"`, `"VALID"`, or a (low, high) pair per spatial axis.
      use_bias: whether there is a bias.
      kernel_init: as in `Dense`.

    Example:
      >>> layer = Conv(4, strides=2)
      >>> y, _ = layer.init_with_output(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
      >>> y.shape
      (1, 4, 4, 4)
    """

    features: int
    kernel_size: int | tuple[int, int] = 3
    strides: int | tuple[int, int] = 1
    padding: str | Sequence[tuple[int, int]] = "SAME"
    use_bias: bool = True
    kernel_init: Callable[..., jax.Array] = he_normal

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width inputs"]
    ) -> Float[Array, "batch rows columns features"]:
        """Return the convolution of x, rounded to the kernel's dtype."""
        _check_images(x)
        shape = (*_pair(self.kernel_size), x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        convolve = functools.partial(
            lax.conv_general_dilated,
            window_strides=_pair(self.strides),
            padding=self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        if x.shape[-1] == 3:
            # XLA on GPU pads those to four, and would keep them for the backward pass.
            convolve = jax.checkpoint(convolve)
        y = convolve(x.astype(kernel.dtype), kernel)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        shifted = y.astype(jnp.float32) + bias.astype(jnp.float32).reshape(1, 1, 1, -1)
        return shifted.astype(kernel.dtype)


class Kernel(nn.Module):
    """Hold the kernel of a convolution that another layer computes.

    Parameter `kernel`, named and drawn as that of a `Conv` in the same place.

    Attributes:
      shape: of the kernel.
      kernel_init: as in `Dense`.
    """

    shape: tuple[int, ...]
    kernel_init: Callable[..., jax.Array] = he_normal

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the kernel."""
        return self.param("kernel", self.kernel_init, self.shape, jnp.float32)


class BatchNorm(nn.Module):
    """Normalise each channel, by `rjax.ops.batch_norm`.

    Parameters `scale` and `bias` `[channels]`; collection `batch_stats` with `mean` and
    (unbiased) `var` `[channels]`, float32. The output has the dtype of the input.

    Attributes:
      eps: added to the variance.
      momentum: weight of a new batch in the running statistics.
      relu: whether to clamp the result at zero.
      pool: keeps the largest value of each window then; images only.
      axis_name: mesh axes whose devices share their batch statistics; `None`: those
        that `rjax.parallel.data_parallel` splits the batch over, if any; `()`: none.
      twice: whether the output is a pair of one array, as in `rjax.ops.batch_norm`.

    Example:
      >>> layer, x = BatchNorm(), jnp.array([[1.0], [3.0]])
      >>> variables = layer.init(jax.random.key(0), x, use_running_average=False)
      >>> y, new = layer.apply(
      ...     variables, x, use_running_average=False, mutable=["batch_stats"])
      >>> new["batch_stats"]["var"]
      Array([1.1], dtype=float32)
    """

    eps: float = 1e-5
    momentum: float = 0.1
    relu: bool = False
    pool: Window | None = None
    axis_name: str | tuple[str, ...] | None = None
    twice: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch channels"],
        use_running_average: bool,
        residual: Float[Array, "*batch channels"] | None = None,
        kernel: Float[Array, "inputs channels"] | None = None,
        after: Float[Array, "channels features"] | None = None,
    ) -> Any:
        """Return x normalised by the running statistics, or by its own.

        Args:
          x: channel last.
          use_running_average: whether by the running ones.
          residual: added before the ReLU, in shape and dtype of the output.
          kernel: of a 1x1 convolution of x, whose result is what is normalised, and is
            not stored in training: by `rjax.ops.pointwise_batch_norm`.
          after: its argument of that name, in training, with `kernel`.

        Raises:
          ValueError: as the ops do, or if there are both a kernel and pooling.
        """
        if kernel is not None and self.pool is not None:
            raise ValueError(
                "`kernel` and `pool` cannot both be given; convolve first, by `Conv`."
            )
        if after is not None and (kernel is None or use_running_average):
            raise ValueError(
                "`after` goes with `kernel` and the statistics of a batch; convolve "
                "the result, by `Conv`."
            )
        shape = x.shape[-1:] if kernel is None else kernel.shape[1:]
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        how: dict[str, Any] = {"eps": self.eps, "relu": self.relu, "pool": self.pool}
        how["residual"] = residual
        if use_running_average:
            x = x if kernel is None else jnp.matmul(x, kernel)
            y = batch_norm_inference(x, scale, bias, mean.value, var.value, **how)
            return (y, y) if self.twice else y
        how["twice"] = self.twice
        run: Any = functools.partial(batch_norm, x)
        if kernel is not None:
            del how["pool"]
            how["after"] = after
            run = functools.partial(pointwise_batch_norm, x, kernel)
        if self.is_initializing():  # no mesh axis is bound and no statistic moves
            return run(scale, bias, **how)[0]
        axes = shared_axes(self.axis_name)
        y, batch_mean, batch_var = run(scale, bias, axis_name=axes or (), **how)
        n = values_per_channel(x, axes)
        mean.value, var.value = running_update(
            mean.value, var.value, batch_mean, batch_var, n, self.momentum
        )
        return y


class ConvBNReLU(nn.Module):
    """Convolve without a bias, normalise by batch norm, clamp at zero ("CBR"), pool.

    Attributes:
      features: output channels.
      kernel_size: height and width of the kernel, or one int for both.
      strides: steps along height and width, or one int for both.
      padding: as in `Conv`.
      axis_name: as in `BatchNorm`.
      pool: as in `BatchNorm`.
      kernel_init: as in `Dense`.

    Example:
      >>> layer = ConvBNReLU(4)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
      >>> sorted(variables["params"])
      ['bn', 'conv']
    """

    features: int
    kernel_size: int | tuple[int, int] = 3
    strides: int | tuple[int, int] = 1
    padding: str | Sequence[tuple[int, int]] = "SAME"
    axis_name: str | tuple[str, ...] | None = None
    pool: Window | None = None
    kernel_init: Callable[..., jax.Array] = he_normal

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch height width inputs"],
        train: bool = False,
        convolved: bool = False,
    ) -> Float[Array, "batch rows columns features"]:
        """Return the block's activations in the kernel's dtype.

        Args:
          x: images.
          train: whether statistics are those of the batch.
          convolved: whether x is the result of the convolution, not yet normalised.
        """
        conv = Conv(
            self.features,
            self.kernel_size,
            self.strides,
            self.padding,
            use_bias=False,
            kernel_init=self.kernel_init,
            name="conv",
        )
        axis = self.axis_name
        norm = BatchNorm(relu=True, pool=self.pool, axis_name=axis, name="bn")
        return norm(x if convolved else conv(x), use_running_average=not train)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _check_images(x: jax.Array) -> None:
    if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            "`x` must be floating images [batch, height, width, channels], got "
            f"{x.dtype} of shape {x.shape}; convert it, or add the missing axis with "
            "`x[..., None]`."
        )


def global_mean(x: jax.Array) -> jax.Array:
    """Average over height and width in float32, rounding once."""
    return x.astype(jnp.float32).mean((1, 2)).astype(x.dtype)
