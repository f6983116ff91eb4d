"""Move an average towards a value."""

import functools
from typing import Any

from jaxtyping import Array, Float

from rjax.ops import mosaic
from rjax.ops.dispatch import resolve
from rjax.ops.ema import base, mosaic_gpu
from rjax.ops.ranges import check_length


def ema(
    average: Float[Array, " *shape"],
    value: Float[Array, " *shape"],
    decay: float,
    *,
    implementation: str | None = None,
) -> Float[Array, " *shape"]:
    """Return ``decay * average + (1 - decay) * value`` in float32.

    Computed as ``average + (1 - decay) * (value - average)``. A compiler may contract
    the product and the sum into one rounding: XLA on CPU and the kernel do, XLA on GPU
    and eager JAX do not. So implementations agree within two ULP of the larger of
    ``|average|`` and ``|value|``: one for the product that is rounded or not, one for
    the last rounding.

    Args:
        average: float32 array, the average so far; at most 2^31 - 1 elements. The
            kernel moves it in place, if n is a multiple of 128: donate it, or let the
            caller's jit drop it.
        value: float32 array of the same shape.
        decay: d in [0, 1]; 1 keeps the average as it is.
        implementation: "xla", "mosaic_gpu" or `None` to choose. The kernel is not
            differentiable.

    Returns:
        float32 array of the same shape.

    Raises:
        ValueError: if shapes differ, a dtype is not float32, or there are too many
            elements.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> import jax.numpy as jnp
        >>> ema(jnp.ones(2), jnp.zeros(2), 0.75).tolist()
        [0.75, 0.75]

    Source: SEMA/EMA of the article's pipeline, section 4 (`EMA_UPDATE`).
    """
    kinds = {str(average.dtype), str(value.dtype)}
    if average.shape != value.shape or kinds != {"float32"}:
        raise ValueError(
            f"`average` and `value` must be float32 of one shape, got "
            f"{average.dtype}{list(average.shape)} and "
            f"{value.dtype}{list(value.shape)}."
        )
    check_length("average", average)
    available: dict[str, Any] = {
        "xla": functools.partial(base.ema, decay=decay),
        "mosaic_gpu": mosaic.why_not()
        or functools.partial(mosaic_gpu.ema, decay=decay),
    }
    run = resolve("ema", implementation, available, ("ema", average.size))
    return run(average, value)
