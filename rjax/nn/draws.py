"""Kernels drawn at random: equal to Flax's draws, and quick to compile.

XLA compiles a draw for every shape that it meets: for a GPU, the 54 kernels of a
ResNet-50 took it 16 seconds. The n-th number that JAX draws from a key depends on the
key and on n alone, so that kernels of many shapes can be the beginnings of draws of a
few sizes, which XLA compiles once each.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_LEAST = 2**12  # elements; below, a draw costs nothing
# Standard deviation of a standard normal variable cut off at -2 and 2.
_OF_TRUNCATED = 0.87962566103423978

Shape = tuple[int, ...]
Init = Callable[[jax.Array, Shape, Any], jax.Array]


def he_normal(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
    """Draw a kernel of variance `2 / fan_in`; `flax.linen.initializers.he_normal()`.

    Code for other shapes may round the last place of some elements otherwise.

    Args:
        key: of the draw.
        shape: `[..., inputs, features]`.
        dtype: of the kernel.

    Source: He et al., https://arxiv.org/abs/1502.01852, section 2.2, forward case.
    """
    std = math.sqrt(2 / math.prod(shape[:-1])) / _OF_TRUNCATED

    def cut(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
        return jax.random.truncated_normal(key, -2, 2, shape, dtype)

    return _scaled(cut, std)(key, shape, dtype)


def kaiming_normal(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
    """Draw a kernel of variance `2 / fan_out`, not truncated, as torchvision does.

    Args:
        key: of the draw.
        shape: `[height, width, inputs, features]`; `fan_out` is `height * width *
            features`.
        dtype: of the kernel.

    Source: He et al., https://arxiv.org/abs/1502.01852, section 2.2, backward case.
    """
    return normal(math.sqrt(2 / math.prod((*shape[:-2], shape[-1]))))(key, shape, dtype)


def normal(std: float) -> Init:
    """Return what draws kernels of a standard deviation, whatever their shape."""
    return _scaled(jax.random.normal, std)


def fan_in_uniform(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
    """Draw a kernel between `±1 / sqrt(fan_in)`, as PyTorch's linear layers do.

    Args:
        key: of the draw.
        shape: `[..., inputs, features]`.
        dtype: of the kernel.
    """

    def even(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -1)

    return _scaled(even, math.sqrt(1 / math.prod(shape[:-1])))(key, shape, dtype)


def _scaled(draw: Init, factor: float) -> Init:
    """Return an initializer: a factor times a standard draw."""

    def init(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
        n = math.prod(shape)
        size = max(_LEAST, 2 ** math.ceil(math.log2(max(n, 1))))
        # Barriers, or XLA would merge a draw with what is before and after it, and
        # compile it again for every kernel.
        key = lax.optimization_barrier(key)
        drawn = lax.optimization_barrier(draw(key, (size,), dtype))
        return (drawn[:n] * jnp.asarray(factor, dtype)).reshape(shape)

    return init
