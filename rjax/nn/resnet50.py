"""ResNet-50 for images of ImageNet's size, from the layers of this package.

Call it as `model.apply(variables, x, train=...)`. Logits come in the precision of the
last kernel; `rjax.ops.softmax_cross_entropy` computes the loss in float32 from there.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from rjax.nn.draws import fan_in_uniform, kaiming_normal
from rjax.nn.layers import (
    BatchNorm,
    Conv,
    ConvBNReLU,
    Dense,
    Kernel,
    global_mean,
)
from rjax.ops.max_pool import Window

# Unlike "SAME", these put a window on the same pixels for even and odd images, and on
# those that the shortcut of a block takes.
_AROUND = ((1, 1), (1, 1))
_AROUND_STEM = ((3, 3), (3, 3))


class BottleneckBlock(nn.Module):
    """Add three convolutions, 1x1, 3x3 and 1x1, to their input ("bottleneck").

    `relu(bn3(conv3(cbr2(cbr1(x)))) + shortcut(x))`, where `shortcut` is x itself or, if
    channels or strides differ, a 1x1 convolution and a batch norm. The stride is in the
    3x3 convolution ("v1.5"). The last norm adds and clamps in float32, and rounds once.

    Attributes:
      features: channels of the first two convolutions; the third has four times as
        many.
      strides: steps along height and width of the second convolution.
      axis_name: mesh axes whose devices share their batch statistics.
      twice: whether the output is a pair of one array, which the next block takes: the
        gradients of its two uses are then added within a pass over them.
      folded: whether 1x1 convolutions that have more outputs than inputs, and no
        stride, go into their norms, as in `ResNet50`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> block = BottleneckBlock(4, strides=2)
      >>> key, x = jax.random.key(0), jnp.ones((2, 8, 8, 16))
      >>> variables = jax.eval_shape(block.init, key, x)
      >>> sorted(variables["params"])
      ['bn3', 'cbr1', 'cbr2', 'conv3', 'shortcut_bn', 'shortcut_conv']
      >>> jax.eval_shape(block.apply, variables, x).shape
      (2, 4, 4, 16)
    """

    features: int
    strides: int = 1
    axis_name: str | tuple[str, ...] | None = None
    twice: bool = False
    folded: bool = False

    @nn.compact
    def __call__(
        self,
        x: Any,
        train: bool = False,
        convolved: bool = False,
        after: jax.Array | None = None,
    ) -> Any:
        """Return the block's activations in the kernels' dtype.

        Args:
          x: `[batch, height, width, inputs]`, or a pair of it.
          train: whether statistics are those of the batch.
          convolved: whether the second of the pair is the result of the first
            convolution.
          after: kernel of the next block's first convolution, if the output is to be a
            pair with its result.
        """
        shortcut, x = x if isinstance(x, tuple) else (x, x)
        inner, outer, axis = self.features, 4 * self.features, self.axis_name
        how: dict[str, Any] = {"kernel_init": kaiming_normal}
        cbr = ConvBNReLU(inner, 1, axis_name=axis, name="cbr1", **how)
        y = cbr(x, train, convolved)
        y = ConvBNReLU(inner, 3, self.strides, _AROUND, axis, name="cbr2", **how)(
            y, train
        )
        y, kernel = self._pointwise("conv3", y, outer, 1)
        if self.strides != 1 or shortcut.shape[-1] != outer:
            found = self._pointwise("shortcut_conv", shortcut, outer, self.strides)
            norm = BatchNorm(axis_name=axis, name="shortcut_bn")
            shortcut = norm(found[0], not train, None, found[1])
        norm = BatchNorm(relu=True, axis_name=axis, twice=self.twice, name="bn3")
        shortcut = shortcut.astype(y.dtype)
        return norm(y, not train, shortcut, kernel, after)

    def _pointwise(
        self, name: str, x: jax.Array, features: int, strides: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return what a norm takes of a 1x1 convolution: its result, or x and a kernel.

        A norm that takes the kernel does not store the result.
        """
        if strides != 1 or not self.folded:
            how: dict[str, Any] = {"use_bias": False, "kernel_init": kaiming_normal}
            return Conv(features, 1, strides, name=name, **how)(x), None
        shape = (1, 1, x.shape[-1], features)
        kernel = Kernel(shape, kaiming_normal, name=name)()[0, 0]
        return x.astype(kernel.dtype), kernel


class ResNet50(nn.Module):
    """Classify images by ResNet-50 v1.5, the `resnet50` of torchvision.

    A 7x7 stem with stride 2 whose norm also pools, stages of bottleneck blocks whose
    3x3 convolutions have `width` times 1, 2, 4 and 8 channels, all but the first of
    which halve height and width, a global average and a dense head. 25,557,032
    parameters for 1000 classes of RGB images; `from_torchvision` loads torchvision's.
    Any image size and channel count works.

    Kernels start as torchvision's do: convolutions Kaiming normal by fan-out, the head
    uniform within `1 / sqrt(inputs)`. Its bias starts at zero, which torchvision draws.

    Attributes:
      num_classes: number of logits.
      axis_name: mesh axes whose devices share their batch statistics.
      blocks: bottlenecks in each stage, at least 1; `(3, 4, 23, 3)` is ResNet-101.
      width: channels of the stem, at least 1.
      folded: whether the last convolution of a block, and that of a shortcut without a
        stride, goes into its norm, by `rjax.ops.pointwise_batch_norm`: nothing of their
        size is then stored between the two. In training the first convolution of the
        next block is part of that op too. Parameters stay the same, results agree to
        rounding. At batch 256 on an H200 a step takes 14 % less time and 29 % less
        memory, but XLA compiles for more than twice as long.

    Raises:
      ValueError: when called, if a number in `blocks`, or `width`, is below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = ResNet50(num_classes=10, blocks=(1, 1, 1, 1), width=8)
      >>> key, x = jax.random.key(0), jnp.ones((2, 64, 64, 3))
      >>> variables = jax.eval_shape(model.init, key, x)
      >>> jax.eval_shape(model.apply, variables, x).shape
      (2, 10)

    Source: He et al., https://arxiv.org/abs/1512.03385, table 1; the stride in the 3x3
      convolution and the initialisation are torchvision's.
    """

    num_classes: int = 1000
    axis_name: str | tuple[str, ...] | None = None
    blocks: Sequence[int] = (3, 4, 6, 3)
    width: int = 64
    folded: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], train: bool = False
    ) -> Float[Array, "batch classes"]:
        """Return logits in the dtype of the last kernel."""
        if self.width < 1 or min(self.blocks, default=0) < 1:
            raise ValueError(
                f"`width` and `blocks` must be at least 1, got {self.width} and "
                f"{tuple(self.blocks)}; ResNet-50 has width=64, blocks=(3, 4, 6, 3)."
            )
        axis = self.axis_name
        stem = ConvBNReLU(
            self.width,
            kernel_size=7,
            strides=2,
            padding=_AROUND_STEM,
            axis_name=axis,
            pool=Window(3, 2, _AROUND),
            kernel_init=kaiming_normal,
            name="stem",
        )
        x = stem(x, train)
        places = [
            (stage, i)
            for stage, depth in enumerate(self.blocks, start=1)
            for i in range(1, depth + 1)
        ]
        after = None
        for (stage, i), following in zip(places, [*places[1:], None], strict=True):
            convolved, after = after is not None, self._first_kernel(following, train)
            block = BottleneckBlock(
                self.width * 2 ** (stage - 1),
                2 if stage > 1 and i == 1 else 1,
                axis,
                twice=following is not None and after is None,
                folded=self.folded,
                name=f"stage{stage}_block{i}",
            )
            x = block(x, train, convolved, after)
        head = Dense(self.num_classes, kernel_init=fan_in_uniform, name="head")
        return head(global_mean(x))

    def _first_kernel(
        self, place: tuple[int, int] | None, train: bool
    ) -> jax.Array | None:
        """Return the kernel of a block's first convolution, or `None`.

        Where there is one, the block before convolves: the gradient then meets that of
        the shortcut within a product.
        """
        if place is None or not train or not self.folded or self.is_initializing():
            return None
        block = self.get_variable("params", "stage{}_block{}".format(*place))
        return block["cbr1"]["conv"]["kernel"][0, 0]
