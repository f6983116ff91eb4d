"""Move an average towards a value."""

from jaxtyping import Array, Float

from rjax.ops.dispatch import resolve
from rjax.ops.ema import base


def ema(
    average: Float[Array, " *shape"],
    value: Float[Array, " *shape"],
    decay: float,
    *,
    implementation: str | None = None,
) -> Float[Array, " *shape"]:
    """Return ``decay * average + (1 - decay) * value`` in float32.

    Args:
        average: float32 array, the average so far.
        value: float32 array of the same shape.
        decay: d in [0, 1]; 1 keeps the average as it is.
        implementation: "xla" or `None`.

    Returns:
        float32 array of the same shape.

    Raises:
        ValueError: if shapes differ or a dtype is not float32.
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
    return resolve("ema", implementation, {"xla": base.ema})(average, value, decay)
