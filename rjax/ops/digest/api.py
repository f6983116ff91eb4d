"""Digest raw bits: a whole array, a range of it, or every slot."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, UInt32

from rjax.ops import mosaic
from rjax.ops.digest import base, mosaic_gpu
from rjax.ops.dispatch import resolve
from rjax.ops.ranges import check_length, resolve_bounds
from rjax.ops.slots import ROW

_DTYPES = ("float32", "float16", "bfloat16", "int32", "uint32")


def digest(
    x: Array,
    *,
    start_index: int | Integer[Array, ""] = 0,
    bounds: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> UInt32[Array, "2"]:
    """Return 64 bits, as two uint32, that depend on every bit of an array.

    The sum modulo 2^32, in each of two lanes, of a mix of an element's bits and its
    index. So it has no order: it is the same on every platform, for every
    implementation and sharding, and digests of the parts of an array, each with its
    `start_index`, add up to the digest of the whole.

    One changed bit always changes both lanes. -0 differs from 0, NaNs with different
    payloads differ. A zero counts: what is padding must be left out, by `bounds` or by
    :func:`digest_slots`. Neither dtype nor shape enters, only bits and their number
    (16-bit types are extended by zeros). Not for cryptography.

    Args:
        x: float32, float16, bfloat16, int32 or uint32 of any shape, read in row-major
            order; at most 2^31 - 1 elements.
        start_index: index of ``x.reshape(-1)[0]``, modulo 2^32; may be traced.
        bounds: (start, stop) of the range of a one-dimensional `x` to digest; `None`
            for all. Indices are those in `x`, so digests of ranges add up as well.
        implementation: "xla", "mosaic_gpu" or `None` to choose.

    Returns:
        uint32[2], zeros for no elements.

    Raises:
        ValueError: for another dtype, too many elements, or bounds that do not fit.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(5.0)
        >>> parts = digest(x[:2]) + digest(x[2:], start_index=2)
        >>> bool((parts == digest(x)).all()), bool((digest(x) == digest(-x)).all())
        (True, False)

    Source: mixing constants as named in `rjax.ops.digest.base`.
    """
    _check_dtype(x)
    start, stop = resolve_bounds("x", x, bounds)
    first = (
        jnp.asarray(np.uint32(start_index % 2**32))
        if isinstance(start_index, int)
        else start_index.astype(jnp.uint32)
    )
    available: dict[str, Any] = {
        "xla": functools.partial(base.digest, bounds=bounds),
        "mosaic_gpu": mosaic.why_not()
        or functools.partial(mosaic_gpu.digest, bounds=bounds),
    }
    size = mosaic_gpu.op_name("digest", x), stop - start
    run = resolve("digest", implementation, available, size)
    return run(x.reshape(-1), first)


def digest_slots(
    x: Array,
    table: Sequence[tuple[int, int]],
    *,
    implementation: str | None = None,
) -> UInt32[Array, "slots 2"]:
    """Return the :func:`digest` of every slot of an arena, in one pass.

    Equals ``[digest(x[start : start + size]) for start, size in table]``: indices
    count from the start of the slot, so a tensor has the same digest in every arena,
    alone, and wherever its slot lies. What lies between slots (padding) is not read
    into any digest, whatever its value.

    Args:
        x: one-dimensional array of a type :func:`digest` takes.
        table: (start, size) of each slot, in elements; starts are multiples of 128,
            ascending, and slots do not overlap.
        implementation: "xla", "mosaic_gpu" or `None` to choose. The kernel reads whole
            rows of 128, so each slot's last row must lie within `x`.

    Returns:
        uint32[slots, 2], a row of zeros for an empty slot.

    Raises:
        ValueError: for another dtype or shape, too many elements, or a table that does
            not fit.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> import jax.numpy as jnp
        >>> arena = jnp.zeros(256).at[:3].set(1.0).at[128:131].set(1.0)
        >>> a, b = digest_slots(arena, [(0, 3), (128, 3)])
        >>> bool((a == b).all() and (a == digest(jnp.ones(3))).all())
        True
    """
    _check_dtype(x)
    check_length("x", x)
    table = tuple((int(start), int(size)) for start, size in table)
    _check_table(x, table)
    missing = mosaic.why_not() or _ragged_end(x, table)
    available: dict[str, Any] = {
        "xla": functools.partial(base.digest_slots, table=table),
        "mosaic_gpu": missing
        or functools.partial(mosaic_gpu.digest_slots, table=table),
    }
    size = mosaic_gpu.op_name("digest_slots", x), x.size
    return resolve("digest_slots", implementation, available, size)(x)


def _check_dtype(x: jax.Array) -> None:
    if str(x.dtype) not in _DTYPES:
        raise ValueError(
            f"`x` must have one of the dtypes {_DTYPES}, got {x.dtype}; bitcast or "
            "widen it first."
        )


def _check_table(x: jax.Array, table: base.Table) -> None:
    end = 0
    for start, size in table:
        if x.ndim != 1 or start % ROW or size < 0 or start < end or end > x.size:
            break
        end = start + size
    else:
        if end <= x.size:
            return
    raise ValueError(
        "`table` must hold (start, size) of slots within a one-dimensional `x`, "
        "ascending, apart, each start a multiple of 128, got "
        f"{table[:4]}{'...' if len(table) > 4 else ''} for shape {list(x.shape)}."
    )


def _ragged_end(x: jax.Array, table: base.Table) -> str | None:
    if any(-(-(start + size) // ROW) * ROW > x.size for start, size in table):
        return "it reads whole rows of 128 elements, and the last row is cut off"
    return None
