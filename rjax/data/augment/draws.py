"""Random numbers for a batch, all of an augmentation from one call of the generator."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_TRIES = 10
# Of the generator, for one box: area and aspect of every try, and a place.
BOX_DRAWS = 2 * _TRIES + 2


def uniforms(key: Any, shape: tuple[int, ...], each: int) -> jax.Array:
    """Return float32 `[batch, each]`, uniform in [0, 1), for images of a shape.

    A single call keeps the launches few, and the default generator numbers its words
    by row, so that a row does not depend on how many there are. The barrier keeps its
    many integer operations from being repeated wherever a number is used.
    """
    u = jax.random.uniform(key, (shape[0], each), jnp.float32)
    return lax.optimization_barrier(u)


def between(u: jax.Array, bounds: tuple[Any, Any]) -> jax.Array:
    """Return numbers uniform between two bounds, from numbers uniform in [0, 1)."""
    low, high = bounds
    return low + u * (high - low)


def whole(u: jax.Array, count: int | jax.Array) -> jax.Array:
    """Return int32 uniform in `[0, count)`; `count` is whole, float32 as an array.

    The largest u is 1 - 2**-23: rounded, the product stays below a count up to 2**22.
    """
    return jnp.floor(u * count).astype(jnp.int32)


def random_boxes(
    u: jax.Array,
    shape: tuple[int, ...],
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
    """Return boxes within images, of random area, aspect and place.

    Ten times, sides are made from a uniform area and a log-uniform aspect, and rounded;
    the first that fit are taken.

    Args:
      u: float32 `[batch, BOX_DRAWS]`, uniform in [0, 1).
      shape: of the images.
      area: range, as a share of the pixels of an image.
      aspect: range of width / height.

    Returns:
      int32 `[batch, 4]`, each (top, left, height, width), and bool `[batch]`, whether
      one fitted; if not, the box means nothing.

    Source: `RandomResizedCrop.get_params` of torchvision.
    """
    limits = jnp.array([shape[1:3]], jnp.float32)
    logs = (math.log(aspect[0]), math.log(aspect[1]))
    pixels = shape[1] * shape[2] * between(u[:, :_TRIES], area)
    ratios = jnp.exp(between(u[:, _TRIES : 2 * _TRIES], logs))
    # [batch, tries, rows and columns]
    sides = jnp.round(jnp.sqrt(jnp.stack([pixels / ratios, pixels * ratios], axis=2)))
    fit = ((sides >= 1) & (sides <= limits[None])).all(axis=2)
    first = jnp.argmax(fit, axis=1)[:, None, None]
    sides = jnp.take_along_axis(sides, first, axis=1)[:, 0]
    corners = whole(u[:, -2:], limits - sides + 1)
    boxes = jnp.concatenate([corners, sides.astype(jnp.int32)], axis=1)
    return boxes, fit.any(axis=1)
