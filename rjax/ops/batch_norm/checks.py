"""What every training norm asks of its arguments."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def check_arrays(x: jax.Array, others: Mapping[str, jax.Array], eps: float) -> None:
    """Refuse arrays that are not floating, an x without channels, and a wrong eps."""
    for name, array in {"x": x, **others}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"`{name}` must be floating, got {array.dtype}; convert it with "
                "`.astype(jnp.float32)`."
            )
    if x.ndim < 2:
        raise ValueError(
            f"`x` must have a batch and a channel axis, got shape {x.shape}; put the "
            "channels last."
        )
    if not eps > 0.0:
        raise ValueError(f"`eps` must be above 0, got {eps}; the usual value is 1e-5.")


def check_values(n: int, x: jax.Array) -> None:
    """Refuse channels whose variance is not defined, of n values each."""
    if n < 2:
        raise ValueError(
            f"`x` must have at least 2 values per channel, got {n} in shape {x.shape}; "
            "use a larger batch, or `batch_norm_inference`."
        )


def check_residual(
    residual: jax.Array | None, what: str, shape: tuple[int, ...], dtype: Any
) -> None:
    """Refuse a residual that is not like `what`."""
    if residual is not None and (residual.shape, residual.dtype) != (shape, dtype):
        raise ValueError(
            f"`residual` must be like {what}, {dtype} of shape {shape}, got "
            f"{residual.dtype} of shape {residual.shape}; project or convert it first."
        )
