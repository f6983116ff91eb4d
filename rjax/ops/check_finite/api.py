"""Check an arena of gradients: the flag, the norm, the slots at fault."""

import functools
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float

from rjax.ops import mosaic
from rjax.ops.check_finite import base, mosaic_gpu
from rjax.ops.dispatch import resolve
from rjax.ops.ranges import resolve_bounds
from rjax.ops.slots import SlotTable


class Check(NamedTuple):
    """What one look at the gradients yields.

    Attributes:
        flag: bool[], set if the step must be skipped.
        norm: f32[], norm of the unscaled gradient before any clip; NaN on a skip.
    """

    flag: Bool[Array, ""]
    norm: Float[Array, ""]


def check_finite(
    grads: Float[Array, " n"],
    scale: Float[Array, ""],
    *,
    on_inf: str = "skip",
    bounds: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> Check:
    """Look for NaN and Inf in a range of an arena and take its norm over `scale`.

    Equals ``(any(~isfinite(grads)), norm(grads / scale))``, but decides by bit
    patterns, and the norm is safe for zero gradients and for values whose square
    overflows or underflows. Accumulates in float32.

    The flag is exact. The norm depends on the order of summation: all terms are
    positive, so with k terms one after the other its relative error is at most
    ``(k / 2 + 2) * 2^-24``, where k is 128 + n / 128 for "xla" at worst, and the
    number of blocks a program sums plus the logarithm of the rest for the kernel.

    Args:
        grads: float32[n], gradients times `scale`; padding is zero; n at most
            2^31 - 1.
        scale: float32[], the loss scale of this step.
        on_inf: "skip": NaN and Inf set the flag; "clamp": only NaN does.
        bounds: (start, stop) of the range to look at; `None` for all. The kernel
            reads it in place, at full speed from multiples of 128.
        implementation: "xla", "mosaic_gpu" or `None` to choose.

    Returns:
        A :class:`Check`.

    Raises:
        ValueError: for gradients that are not one-dimensional float32 or too many,
            or bounds that do not fit.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> import jax.numpy as jnp
        >>> flag, norm = check_finite(jnp.array([3.0, 4.0]), jnp.float32(2.0))
        >>> bool(flag), float(norm)
        (False, 2.5)

    Source: `RANGE_CHECK_NAN` of the article, section 4.3.
    """
    if grads.ndim != 1 or grads.dtype != "float32":
        raise ValueError(
            f"`grads` must be a float32 arena of shape [n], got "
            f"{grads.dtype}{list(grads.shape)}."
        )
    start, stop = resolve_bounds("grads", grads, bounds)
    options: dict[str, Any] = {"clamp": on_inf == "clamp", "bounds": bounds}
    available: dict[str, Any] = {
        "xla": functools.partial(base.check_finite, **options),
        "mosaic_gpu": mosaic.why_not()
        or functools.partial(mosaic_gpu.check_finite, **options),
    }
    size = "check_finite", stop - start
    run = resolve("check_finite", implementation, available, size)
    return Check(*run(grads, scale))


def nonfinite_slots(
    grads: Float[Array, " n"],
    table: SlotTable,
    *,
    on_inf: str = "skip",
    wanted: Bool[Array, ""] | None = None,
    implementation: str | None = None,
) -> Bool[Array, " slots"]:
    """Return bool[slots]: the slots that set the flag of :func:`check_finite`.

    Args:
        grads: float32[n], the whole arena.
        table: the slots that tile it.
        on_inf: as for :func:`check_finite`.
        wanted: bool[], or `None` for yes. If it is clear, the kernel reads nothing
            and marks none; "xla" marks none as well.
        implementation: "xla", "mosaic_gpu" or `None` to choose.

    Raises:
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> import jax.numpy as jnp
        >>> table = SlotTable(rows=(1, 1), decay=(False,) * 2, adaptive=(False,) * 2)
        >>> nonfinite_slots(jnp.ones(256).at[130].set(jnp.nan), table).tolist()
        [False, True]
    """
    options: dict[str, Any] = {"table": table, "clamp": on_inf == "clamp"}
    available: dict[str, Any] = {
        "xla": functools.partial(base.nonfinite_slots, **options),
        "mosaic_gpu": mosaic.why_not()
        or functools.partial(mosaic_gpu.nonfinite_slots, **options),
    }
    size = "check_finite", grads.size
    return resolve("nonfinite_slots", implementation, available, size)(grads, wanted)
