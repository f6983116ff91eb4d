"""What images, ranges, sizes and fill values must be."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, reshard

Range = float | tuple[float, float]
Fill = float | tuple[float, ...]

_DTYPES = ("float16", "bfloat16", "float32", "uint8")


def check_images(images: Any, channels: int | None = None) -> jax.Array:
    """Return images as an array, or raise `ValueError` if they are none."""
    images = jnp.asarray(images)
    if images.ndim != 4:
        raise ValueError(
            "`images` must have the axes [batch, height, width, channels], got shape "
            f"{images.shape}; add an axis of length 1 with `images[None]` or "
            "`images[..., None]`."
        )
    if str(images.dtype) not in _DTYPES:
        raise ValueError(
            f"`images` must be float16, bfloat16, float32 or uint8, got {images.dtype};"
            " convert them with `.astype(jnp.float32)`."
        )
    if 0 in images.shape[1:]:
        raise ValueError(
            f"`images` must have pixels and channels, got shape {images.shape}; check "
            "what made them."
        )
    if channels is not None and images.shape[3] != channels:
        raise ValueError(
            f"`images` must have {channels} channels, got shape {images.shape}; "
            "repeat a grey channel with `jnp.repeat(images, 3, axis=-1)`."
        )
    return images


def per_image(
    value: Any, name: str, images: jax.Array, dtype: Any, trailing: tuple[int, ...] = ()
) -> jax.Array:
    """Return numbers as an array `[batch, *trailing]`; one set serves all images.

    `dtype` is float32 for any numbers, int32 for integers, or bool.
    """
    value = jnp.asarray(value)
    shape = (images.shape[0], *trailing)
    kind = jnp.dtype(dtype).name
    kinds = {"float32": jnp.number, "int32": jnp.integer, "bool": jnp.bool_}
    if not jnp.issubdtype(value.dtype, kinds[kind]):
        raise ValueError(
            f"`{name}` must be like {kind}, got {value.dtype}; convert it with "
            f"`.astype({kind!r})`."
        )
    if value.shape not in ((), trailing, shape):
        raise ValueError(
            f"`{name}` must have one row per image, shape {shape}, got {value.shape}; "
            "one for all images has none of the first axis."
        )
    rows = jnp.broadcast_to(value.astype(dtype), shape)
    # On a mesh with explicit axes, rows lie where their images do.
    place = jax.typeof(images).sharding
    if any(axis is not None for axis in place.spec[:1]):
        spec = PartitionSpec(place.spec[0], *(None for _ in trailing))
        rows = reshard(rows, NamedSharding(place.mesh, spec))
    return rows


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number, and no bool."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def check_count(value: Any, name: str) -> int:
    """Return a whole number, or raise unless it is at least 0."""
    if not _is_whole(value) or value < 0:
        raise ValueError(
            f"`{name}` must be a whole number of at least 0, got {value!r}; 0 switches "
            "it off."
        )
    return int(value)


def check_number(value: Any, name: str, least: float, most: float) -> float:
    """Return a number as a float, or raise unless it lies in [least, most]."""
    if not is_number(value) or not least <= value <= most:
        upper = "" if math.isinf(most) else f", at most {most:g}"
        raise ValueError(
            f"`{name}` must be a number of at least {least:g}{upper}, got {value!r}; "
            f"{least:g} switches it off."
        )
    return float(value)


def check_range(
    value: Any,
    name: str,
    least: float = -math.inf,
    most: float = math.inf,
    above: bool = False,
) -> tuple[float, float]:
    """Return a range as two floats, or raise unless it lies in [least, most].

    Where `above`, `least` itself is out of range as well.
    """
    pair = isinstance(value, tuple) and len(value) == 2
    if not pair or not all(map(is_number, value)) or value[0] > value[1]:
        raise ValueError(
            f"`{name}` must be a tuple (low, high) of finite numbers, low <= high, "
            f"got {value!r}; (1.0, 1.0) stands for 1 alone."
        )
    low, high = map(float, value)
    if low < least or high > most or (above and low == least):
        bracket = "(" if above else "["
        end = ")" if math.isinf(most) else "]"
        raise ValueError(
            f"`{name}` must lie in {bracket}{least:g}, {most:g}{end}, got {value!r}; "
            "move the bound that is outside."
        )
    return low, high


def check_size(value: Any, name: str = "size") -> tuple[int, int]:
    """Return rows and columns, one number for both or a pair, or raise."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or not all(map(_is_whole, pair)) or min(pair) < 1:
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, or a tuple (rows, "
            f"columns) of such, got {value!r}; 32 stands for (32, 32)."
        )
    return int(pair[0]), int(pair[1])


def check_fill(value: Any, name: str = "fill") -> Fill:
    """Return a fill value, one number or one per channel, or raise."""
    several = isinstance(value, tuple)
    if not all(map(is_number, value if several else (value,))) or several and not value:
        raise ValueError(
            f"`{name}` must be a finite number, or a tuple of them, one per channel, "
            f"got {value!r}; 0.0 is a usual choice."
        )
    return tuple(map(float, value)) if several else float(value)


def fill_array(value: Fill, images: jax.Array, name: str = "fill") -> jax.Array:
    """Return a fill value as an array `[channels]` of the dtype of the images."""
    fill = np.asarray(check_fill(value, name), np.float32)
    channels = images.shape[3]
    if fill.shape not in ((), (channels,)):
        raise ValueError(
            f"`{name}` must be one number or one per channel, got {fill.size} for "
            f"{channels} channels; give as many as there are channels."
        )
    if images.dtype == jnp.uint8 and not np.isin(fill, np.arange(256)).all():
        raise ValueError(
            f"`{name}` must be whole, in [0, 255], for uint8 images, got {value!r}; "
            "multiply one in [0, 1] by 255."
        )
    return jnp.broadcast_to(jnp.asarray(fill, images.dtype), (channels,))


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
