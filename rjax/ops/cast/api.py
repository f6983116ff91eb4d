"""Cast a range of an arena."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.ops.cast import base
from rjax.ops.dispatch import resolve


def cast(
    x: Float[Array, " *shape"], dtype: Any, *, implementation: str | None = None
) -> jax.Array:
    """Cast an arena between float32 and half precision.

    Equals ``x.astype(dtype)``, with the promise that the rounding (and an overflow
    to infinity) survives compilation.

    Args:
        x: floating array of any shape.
        dtype: floating dtype of the result.
        implementation: "xla" or `None`.

    Returns:
        Array of x's shape: rounded to nearest even; a float32 above 65519.99 becomes
        inf in fp16.

    Raises:
        ValueError: if either dtype is not a floating one.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> import jax.numpy as jnp
        >>> cast(jnp.array([65519.0, 65520.0]), jnp.float16).tolist()
        [65504.0, inf]

    Source: `RANGE_CAST_FP32_TO_FP16` of the article, section 3.
    """
    dtype = jnp.dtype(dtype)
    for name, kind in (("x", x.dtype), ("dtype", dtype)):
        if not jnp.issubdtype(kind, jnp.floating):
            raise ValueError(f"`{name}` must be a floating type, got {kind}.")
    return resolve("cast", implementation, {"xla": base.cast})(x, dtype)
