"""Mirrored images."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rjax.data.augment.checks import check_images, check_number, per_image
from rjax.data.augment.draws import uniforms
from rjax.data.augment.structure import Augmentation, Images


def horizontal_flip(images: Images, flipped: Bool[Array, " batch"]) -> Images:
    """Return images with left and right exchanged where told.

    Equals `image[:, ::-1]` for the images that are flipped.

    Args:
      images: `[batch, height, width, channels]`.
      flipped: bool `[batch]`, or `[]` for all images.

    Returns:
      An array of the shape and dtype of the images.

    Raises:
      ValueError: images or `flipped` are not as above.

    Example:
      >>> images = jnp.arange(3.0).reshape(1, 1, 3, 1)
      >>> horizontal_flip(images, jnp.array([True])).ravel()
      Array([2., 1., 0.], dtype=float32)
    """
    images = check_images(images)
    flipped = per_image(flipped, "flipped", images, jnp.bool_)
    return jnp.where(flipped[:, None, None, None], images[:, :, ::-1], images)


@dataclasses.dataclass(frozen=True)
class RandomHorizontalFlip(Augmentation):
    """Exchange left and right of each image with a probability.

    Args:
      probability: of a flip, in [0, 1].

    Raises:
      ValueError: `probability` is out of range.

    Example:
      >>> flip = RandomHorizontalFlip()
      >>> flip(jax.random.key(0), jnp.ones((2, 32, 32, 3))).shape
      (2, 32, 32, 3)
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_number(self.probability, "probability", 0, 1)

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return bool `flipped`."""
        return {"flipped": uniforms(key, shape, 1)[:, 0] < self.probability}

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `horizontal_flip(images, flipped)`."""
        return horizontal_flip(images, drawn["flipped"])
