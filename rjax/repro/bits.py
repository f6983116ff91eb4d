"""Numbers as their bits: read, shown, and how far apart they are."""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Bits:
    """One number of a record.

    Attributes:
        word: its bits.
        dtype: name of its dtype; random keys are uint32.

    Example:
        >>> print(Bits(0x3F800000, "float32"), Bits(1, "bool"), Bits(0xFFFF, "int16"))
        1.0 (0x3f800000) True (0x1) -1 (0xffff)
    """

    word: int
    dtype: str

    @property
    def value(self) -> float | int | bool:
        """The number as Python's own."""
        return decode(np.array([self.word], np.uint64), self.dtype)[0].item()

    @property
    def hex(self) -> str:
        """The bits, as long as the dtype."""
        if self.dtype == "bool":
            return hex(self.word)
        return f"0x{self.word:0{2 * np.dtype(self.dtype).itemsize}x}"

    def __str__(self) -> str:
        return f"{decode(np.array([self.word], np.uint64), self.dtype)[0]} ({self.hex})"


def decode(words: np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers whose bits stand in `words`, in their dtype.

    Args:
        words: of any unsigned type, one number in each.
        dtype: name of the numbers' dtype, such as "bfloat16".
    """
    found = np.dtype(dtype)
    if found == np.bool_:
        return words.astype(bool)
    return words.astype(f"u{found.itemsize}").view(found)


def is_float(dtype: str) -> bool:
    """Return whether a dtype, by its name, is one of floating point."""
    return bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))


def ulps(a: Bits, b: Bits) -> int | None:
    """Return how many steps between neighbouring floats lie between two numbers.

    Returns:
        0 for zeros of two signs; `None` where it means nothing: NaN, no floats, or
        two dtypes.

    Example:
        >>> ulps(Bits(0x3C00, "float16"), Bits(0x3C02, "float16"))
        2
        >>> ulps(Bits(0x8001, "float16"), Bits(0x0001, "float16"))
        2
    """
    if a.dtype != b.dtype or not is_float(a.dtype):
        return None
    if a.value != a.value or b.value != b.value:
        return None
    sign = 1 << (8 * np.dtype(a.dtype).itemsize - 1)
    places = [-(x.word & ~sign) if x.word & sign else x.word for x in (a, b)]
    return abs(places[0] - places[1])


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b| / max(|a|, |b|) in float64, 0 between two NaN.

    Infinite between a NaN or an infinity and any other number.

    Example:
        >>> nan, inf = np.nan, np.inf
        >>> relative(np.array([1.0, 0.0, nan, inf, nan]), np.array([2.0, -0.0, nan,
        ...     inf, 1.0]))
        array([0.5, 0. , 0. , 0. , inf])
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        found = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    return np.where(same, 0.0, np.where(np.isnan(found), np.inf, found))
