"""Plain jnp: d E + (1 - d) W, written as a step from E towards W.

The two forms are the same number; this one has W as its fixed point, while the
float32 roundings of d and of 1 - d do not add up to one.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def ema(
    average: jax.Array,
    value: jax.Array,
    decay: float,
    times: Callable[[Any, Any], Any] = operator.mul,
) -> jax.Array:
    """Return the next average, in float32; `times` is how a kernel multiplies."""
    if decay == 0.0:
        return value
    return average + times(np.float32(1.0 - decay), value - average)
