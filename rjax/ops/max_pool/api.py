"""Public face of max pooling."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.ops.dispatch import resolve
from rjax.ops.max_pool import base
from rjax.ops.max_pool.window import Pads, Pair, Window

_IMPLEMENTATIONS = {"xla": base.max_pool}


def max_pool(
    x: Float[Array, "batch height width channels"],
    size: int | Pair = 2,
    strides: int | Pair | None = None,
    padding: str | Pads = "VALID",
    *,
    implementation: str | None = None,
) -> Float[Array, "batch rows columns channels"]:
    """Return the largest element of each window of an image.

    Equals `flax.linen.max_pool(x, size, strides, padding)` but for the default of the
    strides: a maximum over windows, for which padding counts as -inf. NaN in a window
    gives NaN.

    The gradient of a window goes to its first largest element (its first NaN, if it
    holds one) in row-major order, never to padding. Where windows overlap, gradients
    are summed in float32 in a fixed order and rounded once, so that two runs agree in
    every bit. One int8 a window is kept for the backward pass.

    Args:
      x: floating, of 16 bits or more, `[batch, height, width, channels]`.
      size: rows and columns of a window, one number for both or a pair.
      strides: from one window to the next, likewise; `None` is `size`.
      padding: `"VALID"`, `"SAME"` or `((top, bottom), (left, right))`, each pad below
        the size of a window.
      implementation: `"xla"`, or `None` to let rjax choose.

    Returns:
      An array of the dtype of x, `[batch, rows, columns, channels]`, with
      `rows = (top + height + bottom - size) // stride + 1`, and columns likewise.

    Raises:
      ValueError: the dtype or shape of x is wrong, a number is out of range, a window
        could lie wholly in padding, or none fits the image.

    Example:
      >>> x = jnp.arange(16, dtype=jnp.float16).reshape(1, 4, 4, 1)
      >>> max_pool(x)[0, :, :, 0]
      Array([[ 5.,  7.],
             [13., 15.]], dtype=float16)
      >>> max_pool(x, 3, 2, ((1, 1), (1, 1)))[0, :, :, 0]
      Array([[ 5.,  7.],
             [13., 15.]], dtype=float16)
    """
    run = resolve("max_pool", implementation, _IMPLEMENTATIONS)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ValueError(
            f"`x` must be floating, of 16 bits or more, got {x.dtype}; convert it with "
            "`.astype(jnp.float32)`."
        )
    if x.ndim != 4:
        raise ValueError(
            "`x` must have the axes [batch, height, width, channels], got shape "
            f"{x.shape}; a single image becomes a batch with `x[None]`."
        )
    window = Window(size, strides, padding)
    window.output(x.shape[1], x.shape[2])  # or an error from here, not from inside
    return run(x, window)
