"""Reading an image at other places than its own pixels; one image, for `vmap`.

Places are given in pixels, row 0 and column 0 at the centre of the first one. Around
the image lies an endless ground of one value per channel.
"""

import jax
import jax.numpy as jnp


def pixels_at(
    image: jax.Array, rows: jax.Array, columns: jax.Array, ground: jax.Array
) -> jax.Array:
    """Return the pixels at whole places, in one gather and without a padded copy.

    Args:
      image: `[height, width, channels]`.
      rows: int32 `[out_height, out_width]`; an axis may have length 1.
      columns: int32, likewise.
      ground: `[channels]`, of the dtype of the image.

    Returns:
      `[out_height, out_width, channels]`, of the dtype of the image.
    """
    height, width, channels = image.shape
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    nearest = jnp.clip(rows, 0, height - 1) * width + jnp.clip(columns, 0, width - 1)
    flat = image.reshape(height * width, channels)
    found = flat.at[nearest].get(mode="promise_in_bounds")
    return jnp.where(inside[..., None], found, ground[None, None])


def bilinear(
    image: jax.Array, rows: jax.Array, columns: jax.Array, ground: jax.Array
) -> jax.Array:
    """Return the image between its pixels, by bilinear interpolation in float32.

    Args:
      image: `[height, width, channels]`.
      rows: float32 `[out_height, out_width]`; an axis may have length 1.
      columns: float32, likewise.
      ground: `[channels]`, of the dtype of the image.

    Returns:
      float32 `[out_height, out_width, channels]`; at a whole place, the pixel itself.
    """
    height, width, _ = image.shape
    # Further out there is nothing but ground; so every place fits an int32.
    rows, columns = jnp.clip(rows, -1, height), jnp.clip(columns, -1, width)
    top, left = jnp.floor(rows), jnp.floor(columns)
    down, right = rows - top, columns - left
    top, left = top.astype(jnp.int32), left.astype(jnp.int32)
    mixed = jnp.zeros((), jnp.float32)
    for row, of_row in ((top, 1 - down), (top + 1, down)):
        for column, of_column in ((left, 1 - right), (left + 1, right)):
            found = pixels_at(image, row, column, ground).astype(jnp.float32)
            mixed += (of_row * of_column)[..., None] * found
    return mixed


def as_dtype(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return float32 values rounded to a dtype, uint8 to the nearest in range."""
    if dtype == jnp.uint8:
        values = jnp.clip(jnp.round(values), 0, 255)
    return values.astype(dtype)
