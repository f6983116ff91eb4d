"""Finiteness by bit pattern, which no fast-math flag can compile away."""

import jax
import jax.numpy as jnp
from jax import lax


def magnitude(x: jax.Array) -> tuple[jax.Array, int]:
    """Return the bits of |x| as int32, and the bits of infinity of that type.

    Bits of magnitudes order like the magnitudes: finite < infinity < NaN.
    """
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        x = x.astype(jnp.float32)
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{info.bits}")).astype(jnp.int32)
    infinity = ((1 << info.nexp) - 1) << info.nmant
    return bits & jnp.int32((1 << (info.bits - 1)) - 1), infinity


def is_finite(x: jax.Array) -> jax.Array:
    """Return bool of x's shape: neither NaN nor infinite."""
    bits, infinity = magnitude(x)
    return bits < infinity


def is_nan(x: jax.Array) -> jax.Array:
    """Return bool of x's shape: NaN."""
    bits, infinity = magnitude(x)
    return bits > infinity
