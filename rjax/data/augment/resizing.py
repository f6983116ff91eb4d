"""Random parts of images, brought to one size."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from rjax.data.augment.checks import check_images, check_range, check_size, per_image
from rjax.data.augment.draws import BOX_DRAWS, random_boxes, uniforms
from rjax.data.augment.sampling import as_dtype, bilinear
from rjax.data.augment.structure import Augmentation, Images


def resized_crop(
    images: Images, boxes: Int[Array, "batch 4"], size: int | tuple[int, int]
) -> Images:
    """Return a box of each image, resized by bilinear interpolation.

    Pixel i of the result reads the box at `(i + 0.5) * side / size - 0.5`, held within
    its first and last pixel: nothing outside the box is seen. No low-pass filter is
    applied, so keep boxes below about twice `size`, or pixels go unread.

    Args:
      images: `[batch, height, width, channels]`.
      boxes: `[batch, 4]` or `[4]`: top, left, height and width in pixels, at least one
        pixel high and wide and within the image.
      size: rows and columns of the result, one number for both or a pair.

    Returns:
      `[batch, rows, columns, channels]`, of the dtype of the images, computed in
      float32.

    Raises:
      ValueError: images, `size` or the shape of `boxes` are not as above.

    Example:
      >>> images = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> resized_crop(images, jnp.array([1, 1, 2, 2]), size=2)[0, :, :, 0]
      Array([[ 5.,  6.],
             [ 9., 10.]], dtype=float32)

    Source: `resized_crop` of torchvision with `antialias=False`.
    """
    images = check_images(images)
    rows, columns = check_size(size)
    boxes = per_image(boxes, "boxes", images, jnp.int32, (4,))
    ground = jnp.zeros(images.shape[3], images.dtype)  # never seen

    def one(image: jax.Array, box: jax.Array) -> jax.Array:
        down = _places(box[0], box[2], rows)
        right = _places(box[1], box[3], columns)
        mixed = bilinear(image, down[:, None], right[None], ground)
        return as_dtype(mixed, image.dtype)

    # What comes before is not to be computed again at each read, nor this by readers.
    given = lax.optimization_barrier((images, boxes.astype(jnp.float32)))
    return lax.optimization_barrier(jax.vmap(one)(*given))


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """Cut a box of random area and aspect from each image, and resize it.

    Ten boxes are tried; where none fits into the image, the largest one about its
    centre whose aspect is in range is taken.

    Args:
      size: rows and columns of the result, one number for both or a pair.
      area: range of the area of the box, as a share of the image, in (0, 1]; true up to
        the rounding of its sides to whole pixels.
      aspect: range of width / height of the box, drawn log-uniformly, above 0.

    Raises:
      ValueError: an option is out of range.

    Example:
      >>> change = RandomResizedCrop(24, area=(0.25, 1.0))
      >>> change(jax.random.key(0), jnp.ones((2, 32, 32, 3))).shape
      (2, 24, 24, 3)

    Source: Szegedy et al., https://arxiv.org/abs/1409.4842, section 6, as in
    torchvision.
    """

    size: int | tuple[int, int]
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        check_size(self.size)
        check_range(self.area, "area", 0, 1, above=True)
        check_range(self.aspect, "aspect", 0, above=True)

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return int32 `boxes`."""
        u = uniforms(key, shape, BOX_DRAWS)
        found, fit = random_boxes(u, shape, self.area, self.aspect)
        central = jnp.array([_central(shape, self.aspect)], jnp.int32)
        return {"boxes": jnp.where(fit[:, None], found, central)}

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `resized_crop(images, boxes, size)`."""
        return resized_crop(images, drawn["boxes"], self.size)


def _places(start: jax.Array, side: jax.Array, count: int) -> jax.Array:
    """Return where `count` pixels read a side that starts there."""
    steps = (jnp.arange(count, dtype=jnp.float32) + 0.5) * (side / count) - 0.5
    return start + jnp.clip(steps, 0, side - 1)


def _central(shape: tuple[int, ...], aspect: tuple[float, float]) -> list[int]:
    """Return the largest box about the centre with an aspect in range."""
    _, height, width, _ = shape
    rows, columns = height, width
    if width / height < aspect[0]:
        rows = max(1, round(width / aspect[0]))
    elif width / height > aspect[1]:
        columns = max(1, round(height * aspect[1]))
    return [(height - rows) // 2, (width - columns) // 2, rows, columns]
