"""Boxes of one value over images."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rjax.data.augment.checks import (
    Fill,
    check_fill,
    check_images,
    check_number,
    check_range,
    fill_array,
    per_image,
)
from rjax.data.augment.draws import BOX_DRAWS, random_boxes, uniforms
from rjax.data.augment.structure import Augmentation, Images


def erase(images: Images, boxes: Int[Array, "batch 4"], value: Fill = 0.0) -> Images:
    """Return images with one value inside a box of each.

    Equals `image.at[top : top + height, left : left + width].set(value)`.

    Args:
      images: `[batch, height, width, channels]`.
      boxes: integers `[batch, 4]` or `[4]`: top, left, height and width in pixels; a
        height or width of 0 erases nothing.
      value: one number or one per channel, in units of the images.

    Returns:
      An array of the shape and dtype of the images.

    Raises:
      ValueError: images, `value` or the shape of `boxes` are not as above.

    Example:
      >>> erase(jnp.ones((1, 2, 3, 1)), jnp.array([0, 1, 1, 2]))[0, :, :, 0]
      Array([[1., 0., 0.],
             [1., 1., 1.]], dtype=float32)
    """
    images = check_images(images)
    ground = fill_array(value, images, "value")
    boxes = per_image(boxes, "boxes", images, jnp.int32, (4,))
    top, left, height, width = (boxes[:, i, None, None, None] for i in range(4))
    rows = jnp.arange(images.shape[1], dtype=jnp.int32)[None, :, None, None]
    columns = jnp.arange(images.shape[2], dtype=jnp.int32)[None, None, :, None]
    inside = (rows >= top) & (rows < top + height)
    inside &= (columns >= left) & (columns < left + width)
    return jnp.where(inside, ground[None, None, None], images)


@dataclasses.dataclass(frozen=True)
class RandomErasing(Augmentation):
    """Set a box of random area, aspect and place to one value, with a probability.

    Ten boxes are tried; where none fits into the image, nothing is erased.

    Args:
      probability: that an image loses a box, in [0, 1].
      area: range of the area of the box, as a share of the image, in (0, 1]; true up to
        the rounding of its sides to whole pixels.
      aspect: range of width / height of the box, drawn log-uniformly, above 0.
      value: of the box, one number or one per channel, in units of the images.

    Raises:
      ValueError: an option is out of range.

    Example:
      >>> change = RandomErasing(probability=1.0, area=(0.25, 0.25), aspect=(1.0, 1.0))
      >>> change(jax.random.key(0), jnp.ones((2, 32, 32, 3))).mean()
      Array(0.75, dtype=float32)

    Source: Zhong et al., https://arxiv.org/abs/1708.04896, with the ranges of
    torchvision.
    """

    probability: float = 0.5
    area: tuple[float, float] = (0.02, 0.33)
    aspect: tuple[float, float] = (0.3, 3.3)
    value: Fill = 0.0

    def __post_init__(self) -> None:
        check_number(self.probability, "probability", 0, 1)
        check_range(self.area, "area", 0, 1, above=True)
        check_range(self.aspect, "aspect", 0, above=True)
        check_fill(self.value, "value")

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return int32 `boxes`, all zeros where nothing is erased."""
        u = uniforms(key, shape, BOX_DRAWS + 1)
        found, fit = random_boxes(u[:, 1:], shape, self.area, self.aspect)
        erased = fit & (u[:, 0] < self.probability)
        return {"boxes": jnp.where(erased[:, None], found, 0)}

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `erase(images, boxes, value)`."""
        return erase(images, drawn["boxes"], self.value)
