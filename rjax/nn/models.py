"""Small models for digits and their like.

Call them as `model.apply(variables, x, train=...)`. Logits come in the precision of the
last kernel; `rjax.ops.softmax_cross_entropy` computes the loss in float32 from there.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
from jaxtyping import Array, Float

from rjax.nn.layers import ConvBNReLU, Dense, global_mean


class MLP(nn.Module):
    """Classify flattened inputs by dense layers with ReLU between them.

    Attributes:
      features: width of each hidden layer, first to last; may be empty.
      num_classes: number of logits.
      dropout: share of hidden activations dropped in training, in [0, 1); above 0 it
        needs a random key named `dropout`.

    Raises:
      ValueError: when called, if `dropout` is outside [0, 1).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = MLP(features=(16,), num_classes=10)
      >>> key, x = jax.random.key(0), jnp.ones((1, 8, 8, 1))
      >>> variables = jax.eval_shape(model.init, key, x)
      >>> variables["params"]["hidden1"]["kernel"].shape
      (64, 16)
    """

    features: Sequence[int]
    num_classes: int
    dropout: float = 0.0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch ..."], train: bool = False
    ) -> Float[Array, "batch classes"]:
        """Return logits in the dtype of the last kernel."""
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"`dropout` must be in [0, 1), got {self.dropout}; 0 switches it off."
            )
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        for i, width in enumerate(self.features, start=1):
            x = nn.relu(Dense(width, name=f"hidden{i}")(x))
            if self.dropout:
                x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return Dense(self.num_classes, name="head")(x)


class CNN(nn.Module):
    """Classify small images by three convolutions with batch norm.

    Made for one-channel images of 8x8 to 28x28; any size and channel count works.

    Attributes:
      num_classes: number of logits.
      width: channels of the first block; the other two have twice as many.
      axis_name: mesh axes whose devices share their batch statistics.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = CNN(num_classes=10, width=4)
      >>> key, x = jax.random.key(0), jnp.ones((2, 8, 8, 1))
      >>> variables = jax.eval_shape(model.init, key, x)
      >>> jax.eval_shape(model.apply, variables, x).shape
      (2, 10)
    """

    num_classes: int
    width: int = 32
    axis_name: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], train: bool = False
    ) -> Float[Array, "batch classes"]:
        """Return logits in the dtype of the last kernel."""
        wide, axis = 2 * self.width, self.axis_name
        x = ConvBNReLU(self.width, axis_name=axis, name="block1")(x, train)
        x = ConvBNReLU(wide, strides=2, axis_name=axis, name="block2")(x, train)
        x = ConvBNReLU(wide, axis_name=axis, name="block3")(x, train)
        return Dense(self.num_classes, name="head")(global_mean(x))
