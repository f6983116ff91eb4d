"""Crops at random places of a padded image."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rjax.data.augment.checks import (
    Fill,
    check_count,
    check_fill,
    check_images,
    check_size,
    fill_array,
    per_image,
)
from rjax.data.augment.draws import uniforms, whole
from rjax.data.augment.sampling import pixels_at
from rjax.data.augment.structure import Augmentation, Images


def crop(
    images: Images,
    corners: Int[Array, "batch 2"],
    size: int | tuple[int, int],
    fill: Fill = 0.0,
) -> Images:
    """Return a window of each image, filled where it reaches over the edge.

    Equals `image[top : top + rows, left : left + columns]` of every image on an endless
    ground of `fill`. One gather; no padded copy is made.

    Args:
      images: `[batch, height, width, channels]`.
      corners: integers `[batch, 2]`, top and left of each window in pixels of the
        image, negative above it or left of it; `[2]` for one place in all images.
      size: rows and columns of a window, one number for both or a pair.
      fill: one number or one per channel, in units of the images.

    Returns:
      `[batch, rows, columns, channels]`, of the dtype of the images.

    Raises:
      ValueError: images, `corners`, `size` or `fill` are not as above.

    Example:
      >>> images = jnp.arange(1.0, 5.0).reshape(1, 2, 2, 1)
      >>> crop(images, jnp.array([0, -1]), size=2)[0, :, :, 0]
      Array([[0., 1.],
             [0., 3.]], dtype=float32)
    """
    images = check_images(images)
    rows, columns = check_size(size)
    ground = fill_array(fill, images)
    corners = per_image(corners, "corners", images, jnp.int32, (2,))

    def one(image: jax.Array, corner: jax.Array) -> jax.Array:
        down = corner[0] + jnp.arange(rows, dtype=jnp.int32)
        right = corner[1] + jnp.arange(columns, dtype=jnp.int32)
        return pixels_at(image, down[:, None], right[None], ground)

    return jax.vmap(one)(images, corners)


@dataclasses.dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Pad images on all sides and cut a window at a random place.

    Args:
      pad: pixels added on every side, a whole number of at least 0.
      size: rows and columns of the window; the size of the images if `None`.
      fill: value of the added pixels, one number or one per channel.

    Raises:
      ValueError: an option is out of range; when called, the window does not fit.

    Example:
      >>> change = RandomCrop(pad=4)
      >>> change(jax.random.key(0), jnp.ones((2, 32, 32, 3))).shape
      (2, 32, 32, 3)

    Source: He et al., https://arxiv.org/abs/1512.03385, section 4.2.
    """

    pad: int = 0
    size: int | tuple[int, int] | None = None
    fill: Fill = 0.0

    def __post_init__(self) -> None:
        check_count(self.pad, "pad")
        check_fill(self.fill)
        if self.size is not None:
            check_size(self.size)

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return int32 `corners`, uniform over all places of the window."""
        sides = [side + 2 * self.pad for side in shape[1:3]]
        room = [a - b + 1 for a, b in zip(sides, self._window(shape), strict=True)]
        if min(room) < 1:
            raise ValueError(
                f"`size` must fit into the padded image, got {self._window(shape)} for "
                f"{tuple(sides)}; pad more or cut less."
            )
        places = whole(uniforms(key, shape, 2), jnp.array([room], jnp.float32))
        return {"corners": places - self.pad}

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `crop(images, corners, ...)`."""
        window = self._window(jnp.shape(images))
        return crop(images, drawn["corners"], window, self.fill)

    def _window(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return (shape[1], shape[2]) if self.size is None else check_size(self.size)
