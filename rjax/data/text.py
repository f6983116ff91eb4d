"""Characters of a text, as examples of next-character prediction.

The default text is the Zen of Python, 856 characters that come with every Python as the
module `this`, the same in all versions: no download.
"""

import codecs
import contextlib
import io

import numpy as np

from rjax.data.dataset import Dataset
from rjax.data.order import check_fraction


def load_text(
    text: str | None = None, length: int = 32, test_fraction: float = 0.1
) -> Dataset:
    """Cut a text into windows of characters, each with the characters that follow.

    A window starts at every character of its part; those that run over the end are
    filled up, with targets of -1 there, which :func:`rjax.nn.masked_cross_entropy`
    leaves out.

    Args:
      text: any text of at least two different characters; `None` for the Zen of Python.
      length: characters in a window, at least 1.
      test_fraction: share of the text, at its end, that is held out, in (0, 1).

    Returns:
      A `Dataset`: inputs int32 `[n, length]`, indices into `class_names`, which are the
      characters of the text in order; targets int32 `[n, length]`, -1 where there is
      none.

    Raises:
      ValueError: the text is too short or of one character, or an argument is out of
        range.

    Example:
      >>> zen = load_text(length=16)
      >>> zen.train[0].shape, zen.num_classes
      ((769, 16), 45)
      >>> "".join(zen.class_names[i] for i in zen.train[0][0])
      'The Zen of Pytho'
    """
    check_fraction(test_fraction, "test_fraction")
    if length < 1:
        raise ValueError(
            f"`length` must be at least 1, got {length}; 32 is the default."
        )
    text, name = (_zen(), "zen") if text is None else (text, "text")
    alphabet = sorted(set(text))
    if len(alphabet) < 2:
        raise ValueError(
            "`text` must have at least two different characters, got "
            f"{len(alphabet)}; there is nothing to predict otherwise."
        )
    codes = np.searchsorted(np.array(alphabet), np.array(list(text))).astype(np.int32)
    held_out = round(len(codes) * test_fraction)
    if min(held_out, len(codes) - held_out) < 2:
        raise ValueError(
            f"`test_fraction` leaves a part of less than two characters of "
            f"{len(codes)}; take a longer text, or another fraction."
        )
    parts = codes[:-held_out], codes[-held_out:]
    train, test = (_windows(part, length) for part in parts)
    return Dataset(name, train, test, len(alphabet), tuple(alphabet))


def _windows(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows from every character but the last, and what follows in each."""
    starts = np.arange(len(codes) - 1)[:, None]
    inputs = np.pad(codes, (0, length))[starts + np.arange(length)]
    padded = np.pad(codes, (0, length + 1), constant_values=-1)
    return inputs, padded[starts + 1 + np.arange(length)]


def _zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself when imported
        import this
    return codecs.decode(this.s, "rot13")
