"""The order of the examples: a pure function of seed and epoch."""

import functools

import numpy as np

# Apart from every epoch, so that a split shares no stream with a shuffle.
_SPLIT_EPOCH = 2**64 - 1


@functools.lru_cache(maxsize=2)  # the epoch under way, and its neighbour
def permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffle of one epoch, a pure function of its arguments.

    Equals the stable argsort of Philox words keyed by (seed, epoch). NumPy guarantees
    those words for ever; it does not guarantee `Generator.permutation`.

    Args:
      num_examples: size of the set.
      seed: a non-negative int below 2**64.
      epoch: a non-negative int below 2**64.

    Returns:
      Read-only int32 `[num_examples]`.

    Raises:
      ValueError: `seed` is out of range.

    Example:
      >>> sorted(permutation(4, seed=0, epoch=7).tolist())
      [0, 1, 2, 3]
    """
    if not 0 <= seed < 2**64:
        raise ValueError(
            f"`seed` must be in [0, 2**64), got {seed}; take a small non-negative int."
        )
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(
        num_examples
    )
    order = np.argsort(words, kind="stable").astype(np.int32)
    order.flags.writeable = False
    return order


def split_rows(
    num_examples: int, fraction: float, seed: int, argument: str = "fraction"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that stay and the rows that are held out.

    Args:
      num_examples: size of the set.
      fraction: share of examples held out, in (0, 1).
      seed: of the shuffle before the split, a non-negative int below 2**64.
      argument: what messages call the fraction.

    Returns:
      `(rest, held_out)`, int32 arrays that share no row and miss none.

    Raises:
      ValueError: an argument is out of range, or a side would be empty.

    Example:
      >>> [len(rows) for rows in split_rows(10, 0.3, seed=0)]
      [7, 3]
    """
    check_fraction(fraction, argument)
    held_out = round(num_examples * fraction)
    if not 0 < held_out < num_examples:
        raise ValueError(
            f"`{argument}` must leave examples on both sides of the split, got "
            f"{fraction} of {num_examples}; move it away from 0 and 1."
        )
    order = permutation(num_examples, int(seed), _SPLIT_EPOCH)
    return order[held_out:], order[:held_out]


def check_fraction(fraction: float, argument: str) -> None:
    """Raise `ValueError` unless `fraction` lies in (0, 1)."""
    if not 0.0 < fraction < 1.0:
        raise ValueError(
            f"`{argument}` must be in (0, 1), got {fraction}; 0.2 holds out a fifth."
        )
