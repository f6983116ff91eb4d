"""Move an average towards a value."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from rjax.ops import mosaic
from rjax.ops.dispatch import resolve
from rjax.ops.ema import base
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
            kernel moves it in place: donate it, or let the caller's jit drop it.
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
    kernel: Callable[..., jax.Array] | str = mosaic.why_not() or _kernel
    run = resolve("ema", implementation, {"xla": base.ema, "mosaic_gpu": kernel})
    return run(average, value, decay)


def _kernel(average: jax.Array, value: jax.Array, decay: float) -> jax.Array:
    from rjax.ops.ema import mosaic_gpu  # Pallas loads only where it is used

    return mosaic_gpu.ema(average, value, decay)
