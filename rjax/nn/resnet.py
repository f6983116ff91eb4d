"""A residual network for small images, from the layers of this package.

Call it as `model.apply(variables, x, train=...)`. Logits come in the precision of the
last kernel; `rjax.ops.softmax_cross_entropy` computes the loss in float32 from there.
"""

import flax.linen as nn
from jaxtyping import Array, Float

from rjax.nn.layers import BatchNorm, Conv, ConvBNReLU, Dense, global_mean

# One pixel on every side, unlike "SAME", which pads an even image by none at the top
# and left when it strides: a 3x3 window then stands on the pixel that the shortcut of
# its block takes.
_AROUND = ((1, 1), (1, 1))


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to their input ("basic block").

    `relu(bn2(conv2(cbr1(x))) + shortcut(x))`, where `shortcut` is x itself or, if its
    shape differs, a 1x1 convolution and a batch norm. The last norm adds and clamps in
    float32, and rounds once.

    Attributes:
      features: output channels.
      strides: steps along height and width of the first convolution.
      axis_name: mesh axes whose devices share their batch statistics.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> block = BasicBlock(8, strides=2)
      >>> key, x = jax.random.key(0), jnp.ones((2, 8, 8, 4))
      >>> variables = jax.eval_shape(block.init, key, x)
      >>> sorted(variables["params"])
      ['bn2', 'cbr1', 'conv2', 'shortcut_bn', 'shortcut_conv']
    """

    features: int
    strides: int = 1
    axis_name: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width inputs"], train: bool = False
    ) -> Float[Array, "batch rows columns features"]:
        """Return the block's activations in the kernels' dtype."""
        width, axis = self.features, self.axis_name
        y = ConvBNReLU(width, 3, self.strides, _AROUND, axis, name="cbr1")(x, train)
        y = Conv(width, 3, padding=_AROUND, use_bias=False, name="conv2")(y)
        if x.shape != y.shape:
            project = Conv(width, 1, self.strides, use_bias=False, name="shortcut_conv")
            norm = BatchNorm(axis_name=axis, name="shortcut_bn")
            x = norm(project(x), use_running_average=not train)
        norm = BatchNorm(relu=True, axis_name=axis, name="bn2")
        return norm(y, use_running_average=not train, residual=x.astype(y.dtype))


class ResNet(nn.Module):
    """Classify small images by a residual network of depth `6 * blocks + 2`.

    A 3x3 stem, three stages of basic blocks with `width`, `2 * width` and `4 * width`
    channels, the second and third of which halve height and width, a global average
    and a dense head. `blocks=3` is ResNet-20: 272,474 parameters on 32x32x3 images of
    ten classes. Any image size and channel count works.

    Attributes:
      num_classes: number of logits.
      blocks: basic blocks in each of the three stages, at least 1.
      width: channels of the stem and of the first stage, at least 1.
      axis_name: mesh axes whose devices share their batch statistics.

    Raises:
      ValueError: when called, if `blocks` or `width` is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = ResNet(num_classes=10)
      >>> key, x = jax.random.key(0), jnp.ones((2, 32, 32, 3))
      >>> variables = jax.eval_shape(model.init, key, x)
      >>> jax.eval_shape(model.apply, variables, x).shape
      (2, 10)

    Source: He et al., https://arxiv.org/abs/1512.03385, section 4.2; with projection
      shortcuts (option B of section 4.1) in place of zero padding.
    """

    num_classes: int
    blocks: int = 3
    width: int = 16
    axis_name: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], train: bool = False
    ) -> Float[Array, "batch classes"]:
        """Return logits in the dtype of the last kernel."""
        for name in ("blocks", "width"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}; "
                    "ResNet-20 has blocks=3 and width=16."
                )
        axis = self.axis_name
        x = ConvBNReLU(self.width, 3, 1, _AROUND, axis, name="stem")(x, train)
        for stage, widening in enumerate((1, 2, 4), start=1):
            channels = widening * self.width
            for i in range(1, self.blocks + 1):
                strides = 2 if stage > 1 and i == 1 else 1
                name = f"stage{stage}_block{i}"
                block = BasicBlock(channels, strides, axis_name=axis, name=name)
                x = block(x, train)
        return Dense(self.num_classes, name="head")(global_mean(x))
