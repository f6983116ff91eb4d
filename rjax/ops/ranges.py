"""Which elements of an array a range operation works on."""

import jax

LIMIT = 2**31 - 1

_TOO_LONG = (
    "`{name}` must have at most 2^31 - 1 = {limit} elements, got {n}; split it into "
    "several arrays, or over devices."
)


def check_length(name: str, x: jax.Array) -> None:
    """Raise `ValueError` for an array whose last element int32 cannot index."""
    if x.size > LIMIT:
        raise ValueError(_TOO_LONG.format(name=name, limit=LIMIT, n=x.size))


def resolve_bounds(
    name: str, x: jax.Array, bounds: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the range (start, stop) of `x` meant by `bounds`, all of it for `None`.

    Args:
        name: what the caller calls the array, for error texts.
        x: array, one-dimensional if there are bounds.
        bounds: (start, stop) with 0 <= start <= stop <= n, or `None`.

    Raises:
        ValueError: for more than 2^31 - 1 elements, or bounds that do not fit.

    Example:
        >>> resolve_bounds("x", jax.numpy.ones(5), (2, 4))
        (2, 4)
    """
    check_length(name, x)
    if bounds is None:
        return 0, x.size
    start, stop = bounds
    if x.ndim != 1 or not 0 <= start <= stop <= x.size:
        raise ValueError(
            f"`bounds` must be (start, stop) within a one-dimensional `{name}`, got "
            f"{bounds} for shape {list(x.shape)}."
        )
    return int(start), int(stop)
