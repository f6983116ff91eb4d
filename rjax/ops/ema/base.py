"""Plain jnp: d E + (1 - d) W, written as a step from E towards W.

The two forms are the same number; this one has W as its fixed point, while the
float32 roundings of d and of 1 - d do not add up to one.
"""

import jax
import jax.numpy as jnp


def ema(average: jax.Array, value: jax.Array, decay: float) -> jax.Array:
    """Return the next average, in float32."""
    if decay == 0.0:
        return value
    return average + jnp.float32(1.0 - decay) * (value - average)
