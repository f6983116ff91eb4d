"""Where the windows of a pooling lie."""

import dataclasses
import itertools
import operator
from typing import Any, Literal

from jax import lax

Pair = tuple[int, int]
Pads = tuple[Pair, Pair]

# An int8 index names every element of a window, and has values left over for none.
_MOST_ELEMENTS = 127

_PADDING = (
    '`padding` must be "VALID", "SAME" or two (low, high) pairs of integers of at '
    "least 0, got {}; one row or column on each side is ((1, 1), (1, 1))."
)
_ALL_PADDING = (
    "`padding` must be below `size` {}, got {}; pad less, or no window would be sure "
    "to hold an element of the image."
)
_NO_FIT = (
    "`size` must be at most the padded image, got {} for an image of {} with padding "
    "{}; use a smaller window or larger images."
)


@dataclasses.dataclass(frozen=True, init=False)
class Window:
    """A static description of pooling over the rows and columns of an image.

    Args:
        size: rows and columns of a window, one number for both or a pair.
        strides: from one window to the next, likewise; `None` is `size`.
        padding: "VALID" (none), "SAME" (XLA's rule: `ceil(length / stride)` windows,
            the odd pad at the end) or ((top, bottom), (left, right)).

    Raises:
        ValueError: a number is out of range, or a window could lie wholly in padding.

    Example:
        >>> Window(3, 2, "SAME").pads(8, 9), Window(3, 2, "SAME").output(8, 9)
        (((0, 1), (1, 1)), (4, 5))
    """

    size: Pair
    strides: Pair
    padding: Literal["VALID", "SAME"] | Pads

    def __init__(
        self,
        size: int | Pair,
        strides: int | Pair | None = None,
        padding: str | Pads = "VALID",
    ) -> None:
        rows_columns = _pair("size", size)
        steps = rows_columns if strides is None else _pair("strides", strides)
        if rows_columns[0] * rows_columns[1] > _MOST_ELEMENTS:
            raise ValueError(
                f"`size` must have at most {_MOST_ELEMENTS} elements, got "
                f"{rows_columns}; `x.max((1, 2))` pools whole images."
            )
        object.__setattr__(self, "size", rows_columns)
        object.__setattr__(self, "strides", steps)
        object.__setattr__(self, "padding", _padding(padding, rows_columns))

    @property
    def offsets(self) -> tuple[Pair, ...]:
        """Row and column of each element of a window, in row-major order."""
        rows, columns = self.size
        return tuple(itertools.product(range(rows), range(columns)))

    @property
    def overlaps(self) -> bool:
        """Whether an element of the image can be in two windows."""
        return any(map(operator.lt, self.strides, self.size))

    def pads(self, height: int, width: int) -> Pads:
        """Return ((top, bottom), (left, right)) for images of that size."""
        if not isinstance(self.padding, str):
            return self.padding
        pads = lax.padtype_to_pads(
            (height, width), self.size, self.strides, self.padding
        )
        (top, bottom), (left, right) = pads
        return (int(top), int(bottom)), (int(left), int(right))

    def output(self, height: int, width: int) -> Pair:
        """Return how many rows and columns of windows such images have.

        Raises:
            ValueError: not one window fits.
        """
        pads, image = self.pads(height, width), (height, width)
        room = [n + sum(p) - k for n, p, k in zip(image, pads, self.size, strict=True)]
        if min(image) < 1 or min(room) < 0:
            raise ValueError(_NO_FIT.format(self.size, image, pads))
        return room[0] // self.strides[0] + 1, room[1] // self.strides[1] + 1


def _pair(name: str, value: Any) -> Pair:
    try:
        first, second = value if isinstance(value, (tuple, list)) else (value, value)
        pair = operator.index(first), operator.index(second)
    except (TypeError, ValueError):
        pair = (0, 0)
    if min(pair) < 1:
        raise ValueError(
            f"`{name}` must be an integer of at least 1 or a pair of them (rows, "
            f"columns), got {value!r}; 2 is the usual choice."
        )
    return pair


def _padding(value: Any, size: Pair) -> Any:
    if isinstance(value, str):
        if value not in ("VALID", "SAME"):
            raise ValueError(_PADDING.format(repr(value)))
        return value
    try:
        (top, bottom), (left, right) = value
        top, bottom, left, right = map(operator.index, (top, bottom, left, right))
    except (TypeError, ValueError):
        raise ValueError(_PADDING.format(repr(value))) from None
    if min(top, bottom, left, right) < 0:
        raise ValueError(_PADDING.format(repr(value)))
    if max(top, bottom) >= size[0] or max(left, right) >= size[1]:
        raise ValueError(_ALL_PADDING.format(size, repr(value)))
    return (top, bottom), (left, right)
