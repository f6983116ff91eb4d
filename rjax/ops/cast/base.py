"""Plain jnp: a conversion that XLA must not cancel against its inverse.

With excess precision allowed (the default), XLA removes float32 -> half -> float32,
and an overflow or a rounding with it. A barrier on the half-precision side keeps
both conversions. `lax.reduce_precision` would not do: it flushes fp16 subnormals.
"""

from typing import Any

import jax
from jax import lax


def cast(x: jax.Array, dtype: Any, bounds: tuple[int, int] | None = None) -> jax.Array:
    """Return `x`, or the range `bounds` of it, as `dtype`.

    Rounds to nearest even exactly once.
    """
    if bounds is not None:
        x = x[slice(*bounds)]
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize < dtype.itemsize:
        return lax.optimization_barrier(x).astype(dtype)
    return lax.optimization_barrier(x.astype(dtype))
