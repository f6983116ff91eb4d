"""Rotation, zoom and shift about the centre, in one resampling."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rjax.data.augment.checks import (
    Fill,
    Range,
    check_fill,
    check_images,
    check_number,
    check_range,
    fill_array,
    is_number,
    per_image,
)
from rjax.data.augment.draws import between, uniforms
from rjax.data.augment.sampling import as_dtype, bilinear
from rjax.data.augment.structure import Augmentation, Images


def affine(
    images: Images,
    degrees: float | Float[Array, " batch"] = 0.0,
    scale: float | Float[Array, " batch"] = 1.0,
    shift: float | Float[Array, "batch 2"] = 0.0,
    fill: Fill = 0.0,
) -> Images:
    """Return each image turned and zoomed about its centre, then shifted.

    The pixel at o reads the image at `c + R(o - c - shift) / scale`, with c the centre
    and R the inverse of the turn, by bilinear interpolation on an endless ground of
    `fill`: four reads a pixel, and no copy that is padded or larger. Multiples of 90
    degrees are exact. No low-pass filter is applied, so a scale far below 1 aliases.

    Args:
      images: `[batch, height, width, channels]`.
      degrees: counter-clockwise as one looks at the image, `[batch]` or `[]`.
      scale: above 0; 2 makes everything twice as large, `[batch]` or `[]`.
      shift: in pixels, down and to the right, `[batch, 2]`, `[2]` or `[]`.
      fill: one number or one per channel, in units of the images.

    Returns:
      An array of the shape and dtype of the images, computed in float32.

    Raises:
      ValueError: images, `fill` or the shape of a number are not as above.

    Example:
      >>> images = jnp.arange(4.0).reshape(1, 2, 2, 1)
      >>> affine(images, degrees=90)[0, :, :, 0]
      Array([[1., 3.],
             [0., 2.]], dtype=float32)

    Source: the signs of `rotate` in torchvision, the sampling of
    `torch.nn.functional.grid_sample`.
    """
    images = check_images(images)
    ground = fill_array(fill, images)
    degrees = per_image(degrees, "degrees", images, jnp.float32)
    scale = per_image(scale, "scale", images, jnp.float32)
    shift = per_image(shift, "shift", images, jnp.float32, (2,))
    cosine, sine = _cosine_and_sine(degrees)
    middle = ((images.shape[1] - 1) / 2, (images.shape[2] - 1) / 2)
    y = jnp.arange(images.shape[1], dtype=jnp.float32)[:, None] - middle[0]
    x = jnp.arange(images.shape[2], dtype=jnp.float32)[None] - middle[1]

    def one(
        image: jax.Array, cosine: jax.Array, sine: jax.Array, shift: jax.Array
    ) -> jax.Array:
        down, right = y - shift[0], x - shift[1]
        rows = cosine * down + sine * right + middle[0]
        columns = cosine * right - sine * down + middle[1]
        return as_dtype(bilinear(image, rows, columns, ground), image.dtype)

    # What comes before is not to be computed again at each read, nor this by readers.
    given = lax.optimization_barrier((images, cosine / scale, sine / scale, shift))
    return lax.optimization_barrier(jax.vmap(one)(*given))


@dataclasses.dataclass(frozen=True)
class RandomAffine(Augmentation):
    """Turn, zoom and shift each image at random, in one resampling.

    Args:
      degrees: range of the angle, counter-clockwise; d stands for (-d, d).
      scale: range of the zoom about the centre, above 0.
      translate: the largest shift, as a share of height and width, in [0, 1]; one
        number for both or a pair.
      fill: value around the image, one number or one per channel.

    Raises:
      ValueError: an option is out of range.

    Example:
      >>> change = RandomAffine(degrees=20, scale=(0.8, 1.2))
      >>> change(jax.random.key(0), jnp.ones((2, 28, 28, 1))).shape
      (2, 28, 28, 1)
    """

    degrees: Range = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    translate: float | tuple[float, float] = 0.0
    fill: Fill = 0.0

    def __post_init__(self) -> None:
        _symmetric(self.degrees)
        check_range(self.scale, "scale", 0, above=True)
        _shares(self.translate)
        check_fill(self.fill)

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return float32 `degrees`, `scale` and `shift`, uniform over their ranges."""
        u = uniforms(key, shape, 4)
        shares = zip(_shares(self.translate), shape[1:3], strict=True)
        most = jnp.array([[share * side for share, side in shares]], jnp.float32)
        return {
            "degrees": between(u[:, 0], _symmetric(self.degrees)),
            "scale": between(u[:, 1], self.scale),
            "shift": between(u[:, 2:], (-most, most)),
        }

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `affine(images, degrees, scale, shift, fill)`."""
        return affine(images, **drawn, fill=self.fill)


@dataclasses.dataclass(frozen=True)
class RandomRotation(Augmentation):
    """Turn each image about its centre by a random angle.

    Equals `RandomAffine(degrees, fill=fill)`; to turn and zoom, use one of that.

    Args:
      degrees: range of the angle, counter-clockwise; d stands for (-d, d).
      fill: value around the image, one number or one per channel.

    Raises:
      ValueError: an option is out of range.

    Example:
      >>> change = RandomRotation(20)
      >>> change(jax.random.key(0), jnp.ones((2, 28, 28, 1))).shape
      (2, 28, 28, 1)
    """

    degrees: Range
    fill: Fill = 0.0

    def __post_init__(self) -> None:
        _symmetric(self.degrees)
        check_fill(self.fill)

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return float32 `degrees`."""
        return {"degrees": RandomAffine(self.degrees).draw(key, shape)["degrees"]}

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `affine(images, degrees, fill=fill)`."""
        return affine(images, drawn["degrees"], fill=self.fill)


@dataclasses.dataclass(frozen=True)
class RandomScale(Augmentation):
    """Zoom each image about its centre by a random factor; its size stays.

    Equals `RandomAffine(scale=scale, fill=fill)`; to turn and zoom, use one of that.

    Args:
      scale: range of the factor, above 0; 2 makes everything twice as large.
      fill: value around the image, one number or one per channel.

    Raises:
      ValueError: an option is out of range.

    Example:
      >>> change = RandomScale((0.8, 1.2))
      >>> change(jax.random.key(0), jnp.ones((2, 28, 28, 1))).shape
      (2, 28, 28, 1)
    """

    scale: tuple[float, float]
    fill: Fill = 0.0

    def __post_init__(self) -> None:
        check_range(self.scale, "scale", 0, above=True)
        check_fill(self.fill)

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return float32 `scale`."""
        return {"scale": RandomAffine(scale=self.scale).draw(key, shape)["scale"]}

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `affine(images, scale=scale, fill=fill)`."""
        return affine(images, scale=drawn["scale"], fill=self.fill)


def _symmetric(degrees: Any) -> tuple[float, float]:
    if is_number(degrees):
        limit = check_number(degrees, "degrees", 0, math.inf)
        return -limit, limit
    return check_range(degrees, "degrees")


def _shares(translate: float | tuple[float, float]) -> tuple[float, float]:
    pair = translate if isinstance(translate, tuple) else (translate, translate)
    if len(pair) != 2:
        raise ValueError(
            f"`translate` must be a number or a tuple (rows, columns), got {pair!r}; "
            "0.1 stands for (0.1, 0.1)."
        )
    rows, columns = (check_number(share, "translate", 0, 1) for share in pair)
    return rows, columns


def _cosine_and_sine(degrees: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both, exact at multiples of 90 degrees.

    Quarter turns are taken out first: the angle that is left is at most 45 degrees.
    """
    quarters = jnp.round(degrees / 90)
    rest = jnp.deg2rad(degrees - 90 * quarters)
    cosine, sine = jnp.cos(rest), jnp.sin(rest)
    quarter = jnp.mod(quarters, 4)
    odd, back = jnp.mod(quarter, 2) == 1, quarter >= 2
    cosine, sine = jnp.where(odd, -sine, cosine), jnp.where(odd, cosine, sine)
    return jnp.where(back, -cosine, cosine), jnp.where(back, -sine, sine)
