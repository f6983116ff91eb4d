"""Cast a range of an arena."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.ops import mosaic
from rjax.ops.cast import base, mosaic_gpu
from rjax.ops.dispatch import resolve
from rjax.ops.ranges import resolve_bounds

_HALVES = (jnp.float16, jnp.bfloat16)


def cast(
    x: Float[Array, " *shape"],
    dtype: Any,
    *,
    bounds: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Cast an arena, or a range of it, between float32 and half precision.

    Equals ``x[start:stop].astype(dtype)``, with the promise that the rounding (and an
    overflow to infinity) survives compilation.

    Args:
        x: floating array of any shape, at most 2^31 - 1 elements.
        dtype: floating dtype of the result.
        bounds: (start, stop) of the range of a one-dimensional `x`; `None` for all.
            The kernel reads the range in place, at full speed from multiples of 128.
        implementation: "xla", "mosaic_gpu" or `None` to choose. The kernel casts
            between float32 and one of float16, bfloat16, and is not differentiable.

    Returns:
        Array of x's shape, or [stop - start]: rounded to nearest even; a float32 above
        65519.99 becomes inf in fp16; subnormals and NaN are kept (no NaN's payload).

    Raises:
        ValueError: if either dtype is not a floating one, `x` is too long, or the
            bounds do not fit.
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
    start, stop = resolve_bounds("x", x, bounds)
    options: dict[str, Any] = {"dtype": dtype}
    if bounds is not None:
        options["bounds"] = (start, stop)
    missing = mosaic.why_not() or _pair_without_kernel(x.dtype, dtype)
    available: dict[str, Any] = {
        "xla": functools.partial(base.cast, **options),
        "mosaic_gpu": missing or functools.partial(mosaic_gpu.cast, **options),
    }
    size = mosaic_gpu.op_name(x.dtype, dtype), stop - start
    return resolve("cast", implementation, available, size)(x)


def _pair_without_kernel(source: Any, target: Any) -> str | None:
    pair = {jnp.dtype(source), jnp.dtype(target)}
    if any(pair == {jnp.dtype(jnp.float32), jnp.dtype(half)} for half in _HALVES):
        return None
    return f"it casts between float32 and half precision, not {source} to {target}"
