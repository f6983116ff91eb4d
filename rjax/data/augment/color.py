"""Brightness, contrast, saturation and hue of RGB images."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rjax.data.augment.checks import (
    Range,
    check_images,
    check_number,
    check_range,
    is_number,
    per_image,
)
from rjax.data.augment.draws import between, uniforms
from rjax.data.augment.sampling import as_dtype
from rjax.data.augment.structure import Augmentation, Images

PerImage = float | Float[Array, " batch"] | None

_GREY = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601
# Ranges that change nothing.
_STILL = {
    "brightness": (1.0, 1.0),
    "contrast": (1.0, 1.0),
    "saturation": (1.0, 1.0),
    "hue": (0.0, 0.0),
}


def adjust_color(
    images: Images,
    brightness: PerImage = None,
    contrast: PerImage = None,
    saturation: PerImage = None,
    hue: PerImage = None,
) -> Images:
    """Return images with other colors, adjusted in the order of the arguments.

    With x in [0, 1] and clipped to it after each step: brightness is `f x`; contrast
    `f x + (1 - f) m`, m the mean grey of the image; saturation `f x + (1 - f) g`, g the
    grey of the pixel; hue turns the color circle by a share of it. Grey is `0.299 red +
    0.587 green + 0.114 blue`.

    Args:
      images: RGB `[batch, height, width, 3]`, floating in [0, 1] or uint8.
      brightness: factor of at least 0, `[batch]` or `[]`; `None` leaves this out.
      contrast: likewise.
      saturation: likewise.
      hue: turns of the color circle, red to green to blue; `[batch]` or `[]`, or
        `None`.

    Returns:
      An array of the shape and dtype of the images, computed in float32.

    Raises:
      ValueError: images have other than 3 channels, or a shape is not as above.

    Example:
      >>> red = jnp.array([1.0, 0.0, 0.0]).reshape(1, 1, 1, 3)
      >>> adjust_color(red, hue=1 / 3).ravel()
      Array([0., 1., 0.], dtype=float32)
      >>> adjust_color(red, brightness=0.5).ravel()
      Array([0.5, 0. , 0. ], dtype=float32)

    Source: `adjust_brightness` and its like in torchvision; the HSV of
    https://en.wikipedia.org/wiki/HSL_and_HSV, "HSV to RGB alternative".
    """
    # What comes before is not to be computed for the mean and again for each pixel.
    images = lax.optimization_barrier(check_images(images, channels=3))
    top = 255.0 if images.dtype == jnp.uint8 else 1.0
    x = images.astype(jnp.float32) / top
    steps = (
        ("brightness", brightness, _brightness),
        ("contrast", contrast, _contrast),
        ("saturation", saturation, _saturation),
        ("hue", hue, _hue),
    )
    for name, value, change in steps:
        if value is not None:
            by = per_image(value, name, images, jnp.float32)
            x = jnp.clip(change(x, by[:, None, None, None]), 0, 1)
    return lax.optimization_barrier(as_dtype(x * top, images.dtype))


@dataclasses.dataclass(frozen=True)
class ColorJitter(Augmentation):
    """Change brightness, contrast, saturation and hue of each image at random.

    Always in this order, where torchvision shuffles it: every order would have to be
    computed for every batch. Images must not be normalized yet.

    Args:
      brightness: range of the factor, of at least 0; b stands for (max(0, 1 - b),
        1 + b), and 0 leaves this out.
      contrast: likewise.
      saturation: likewise.
      hue: range of the turn, within [-0.5, 0.5]; h stands for (-h, h).

    Raises:
      ValueError: an option is out of range; when called, images are not RGB.

    Example:
      >>> change = ColorJitter(brightness=0.4, hue=0.1)
      >>> change(jax.random.key(0), jnp.ones((2, 32, 32, 3))).shape
      (2, 32, 32, 3)
    """

    brightness: Range = 0.0
    contrast: Range = 0.0
    saturation: Range = 0.0
    hue: Range = 0.0

    def __post_init__(self) -> None:
        self._ranges()

    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return float32 numbers for what is not left out, uniform over its range."""
        u = uniforms(key, shape, 4)
        return {
            name: between(u[:, index], bounds)
            for index, (name, bounds) in enumerate(self._ranges().items())
            if bounds != _STILL[name]
        }

    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return `adjust_color(images, **drawn)`."""
        return adjust_color(images, **drawn)

    def _ranges(self) -> dict[str, tuple[float, float]]:
        factors = ("brightness", "contrast", "saturation")
        found = {name: _factors(getattr(self, name), name) for name in factors}
        return found | {"hue": _turns(self.hue)}


def _brightness(x: jax.Array, factor: jax.Array) -> jax.Array:
    return factor * x


def _contrast(x: jax.Array, factor: jax.Array) -> jax.Array:
    mean = _grey(x).mean(axis=(1, 2), keepdims=True)
    return factor * x + (1 - factor) * mean


def _saturation(x: jax.Array, factor: jax.Array) -> jax.Array:
    return factor * x + (1 - factor) * _grey(x)


def _grey(x: jax.Array) -> jax.Array:
    # Not a product of matrices, for which a GPU would take TF32.
    parts = [weight * x[..., i, None] for i, weight in enumerate(_GREY)]
    return parts[0] + parts[1] + parts[2]


def _hue(x: jax.Array, turns: jax.Array) -> jax.Array:
    red, green, blue = (x[..., i, None] for i in range(3))
    value = jnp.maximum(jnp.maximum(red, green), blue)
    chroma = value - jnp.minimum(jnp.minimum(red, green), blue)
    per_sixth = jnp.where(chroma > 0, chroma, 1)
    sixths = jnp.where(
        value == red,
        (green - blue) / per_sixth,
        jnp.where(
            value == green,
            (blue - red) / per_sixth + 2,
            (red - green) / per_sixth + 4,
        ),
    )
    offsets = jnp.array([5, 3, 1], jnp.float32)[None, None, None]
    k = jnp.mod(offsets + sixths + 6 * turns, 6)
    return value - chroma * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)


def _factors(value: Any, name: str) -> tuple[float, float]:
    if is_number(value):
        spread = check_number(value, name, 0, math.inf)
        return max(0.0, 1 - spread), 1 + spread
    return check_range(value, name, 0)


def _turns(value: Any) -> tuple[float, float]:
    if is_number(value):
        limit = check_number(value, "hue", 0, 0.5)
        return -limit, limit
    return check_range(value, "hue", -0.5, 0.5)
