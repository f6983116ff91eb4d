"""VGG-16 with batch norm, from the layers of this package.

Call it as `model.apply(variables, x, train=...)`. Logits come in the precision of the
last kernel; `rjax.ops.softmax_cross_entropy` computes the loss in float32 from there.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.nn.draws import kaiming_normal, normal
from rjax.nn.layers import ConvBNReLU, Dense
from rjax.ops.max_pool import Window

# Convolutions of each stage and how far each widens the first: configuration D.
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
# Rows and columns of the image that the classifier reads.
POOLED = 7

_dense_init = normal(0.01)


class VGG16BN(nn.Module):
    """Classify images by VGG-16 with batch norm, the `vgg16_bn` of torchvision.

    Thirteen 3x3 convolutions in five stages of `width` times 1, 2, 4, 8 and 8 channels,
    each with batch norm and ReLU; a max pooling, which halves height and width, is in
    the last norm of each stage. An average to 7x7 (none for images of 224x224), two
    hidden layers with ReLU and dropout and a dense head follow. 138,361,768 parameters
    for 1000 classes of RGB images: torchvision's without the biases of its
    convolutions, which a batch norm cancels; `from_torchvision` loads its weights.

    Kernels start as torchvision's do: convolutions Kaiming normal by fan-out, dense
    layers normal with deviation 0.01, biases zero.

    Attributes:
      num_classes: number of logits.
      dropout: share of hidden activations dropped in training, in [0, 1); above 0 it
        needs a random key named `dropout`, which `rjax.linen_loss` gives.
      axis_name: mesh axes whose devices share their batch statistics.
      width: channels of the first stage, at least 1.
      hidden: width of the two hidden layers, at least 1.

    Raises:
      ValueError: when called, if `dropout` is outside [0, 1), a size is below 1, or an
        image has fewer than 32 rows or columns.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = VGG16BN(num_classes=10, width=8, hidden=64)
      >>> key, x = jax.random.key(0), jnp.ones((2, 32, 32, 3))
      >>> variables = jax.eval_shape(model.init, key, x)
      >>> jax.eval_shape(model.apply, variables, x).shape
      (2, 10)

    Source: Simonyan and Zisserman, https://arxiv.org/abs/1409.1556, table 1, D; batch
      norm, initialisation and pooling to 7x7 are torchvision's.
    """

    num_classes: int = 1000
    dropout: float = 0.5
    axis_name: str | tuple[str, ...] | None = None
    width: int = 64
    hidden: int = 4096

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], train: bool = False
    ) -> Float[Array, "batch classes"]:
        """Return logits in the dtype of the last kernel."""
        self._validate(x)
        for stage, (depth, widening) in enumerate(STAGES, start=1):
            for i in range(1, depth + 1):
                block = ConvBNReLU(
                    widening * self.width,
                    axis_name=self.axis_name,
                    pool=Window(2) if i == depth else None,
                    kernel_init=kaiming_normal,
                    name=f"stage{stage}_cbr{i}",
                )
                x = block(x, train)
        x = adaptive_mean(x, POOLED)
        x = x.reshape(x.shape[0], -1)
        for i in (1, 2):
            hidden = Dense(self.hidden, kernel_init=_dense_init, name=f"hidden{i}")
            x = nn.relu(hidden(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return Dense(self.num_classes, kernel_init=_dense_init, name="head")(x)

    def _validate(self, x: jax.Array) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"`dropout` must be in [0, 1), got {self.dropout}; 0 switches it off."
            )
        for name in ("width", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}; VGG-16 "
                    "has width=64 and hidden=4096."
                )
        if x.ndim == 4 and min(x.shape[1:3]) < 32:
            raise ValueError(
                "`x` must be images of at least 32x32, which five poolings halve, got "
                f"shape {x.shape}; enlarge them, or use `rjax.nn.ResNet`."
            )


def adaptive_mean(x: jax.Array, size: int) -> jax.Array:
    """Average images to `size` rows and columns, in float32, rounding once.

    Row i of the result is the mean of the rows from `floor(i * height / size)` to
    `ceil((i + 1) * height / size)`, the end left out, and columns likewise, as in
    `torch.nn.AdaptiveAvgPool2d`: windows overlap where `size` does not divide the
    length, and repeat a row where it is short.
    """
    if x.shape[1:3] == (size, size):
        return x
    y = x.astype(jnp.float32)
    for axis in (1, 2):
        n = x.shape[axis]
        bounds = [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)]
        parts = [jax.lax.slice_in_dim(y, a, b, axis=axis) for a, b in bounds]
        y = jnp.concatenate([part.mean(axis, keepdims=True) for part in parts], axis)
    return y.astype(x.dtype)
