"""Examples, in memory or read when asked for: count, pick and split them.

A set of examples is one of two things:

- arrays: a pytree, as a rule the pair `(images, labels)`, of arrays `[n, ...]`;
- a `grain.MapDataset`, whose elements are such pytrees without the first axis, as a
  rule pairs `(image, label)`. Nothing is read before it is asked for.
"""

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rjax.data.errors import DataError
from rjax.data.order import split_rows

# Not spelled out as a union: grain is an extra, and imported only when it is used.
Examples = Any


def num_examples(examples: Examples) -> int:
    """Return how many examples there are.

    Args:
      examples: a pytree of arrays `[n, ...]`, or a `grain.MapDataset`.

    Returns:
      n.

    Raises:
      ValueError: the arrays differ in length, or there is none.

    Example:
      >>> num_examples((np.zeros((10, 8, 8, 1)), np.arange(10)))
      10
    """
    if is_lazy(examples):
        return len(examples)
    lengths = {len(array) for array in jax.tree.leaves(examples)}
    if len(lengths) != 1:
        raise ValueError(
            "`examples` must have one number of examples along the first axis, got "
            f"{sorted(lengths)}; every array needs one row per example."
        )
    return lengths.pop()


def split(examples: Examples, fraction: float, seed: int = 0) -> tuple[Any, Any]:
    """Split off a random share of the examples.

    The split depends on the number of examples, `fraction` and `seed` only. Arrays are
    copied. Of a `grain.MapDataset` the two sides are views that read nothing by
    themselves, and that read its first epoch only, so that no reshuffling of grain's
    can move an example across: add random transformations after the split.

    Args:
      examples: a pytree of arrays `[n, ...]`, or a `grain.MapDataset`.
      fraction: share of examples held out, in (0, 1).
      seed: a non-negative int below 2**64.

    Returns:
      `(rest, held_out)`, of the same kind as `examples`; together they have every
      example once.

    Raises:
      ValueError: an argument is out of range, or a side would be empty.

    Example:
      >>> rest, held_out = split(np.arange(10), 0.3)
      >>> len(rest), sorted({*rest.tolist(), *held_out.tolist()})
      (7, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    rest, held_out = split_rows(num_examples(examples), fraction, seed)
    return take(examples, rest), take(examples, held_out)


def take(examples: Examples, rows: np.ndarray) -> Examples:
    """Return the given rows: copies of arrays, a view of a `grain.MapDataset`."""
    if not is_lazy(examples):
        return jax.tree.map(lambda array: array[rows], examples)
    return from_source(_Rows(examples, rows))


def from_source(source: Any) -> Examples:
    """Return a `grain.MapDataset` of a source, with the fingerprint of the source."""
    import grain

    examples = grain.MapDataset.source(source)
    return with_fingerprint(examples, fingerprint_of(source))


def is_lazy(examples: Examples) -> bool:
    """Return whether `examples` is a `grain.MapDataset`."""
    # Whoever made one has imported grain; looking must not import it.
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(examples, grain.MapDataset)


def read(examples: Examples, index: int) -> Any:
    """Return one element of a `grain.MapDataset`, as grain counts over all epochs.

    Raises:
      DataError: there is no such element: the set was filtered.
    """
    element = examples[index]
    if element is None:
        raise DataError(
            f"the element of index {index % len(examples)} is missing, as after "
            "`filter`; filter the list of files or rows that the set is made from."
        )
    return element


def stack(elements: Sequence[Any]) -> Any:
    """Return elements as one batch: every leaf gets a first axis.

    Raises:
      DataError: the elements differ in structure or shape.
    """
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *elements)
    except ValueError as error:
        shapes = {str(jax.tree.map(np.shape, element)) for element in elements}
        raise DataError(
            "the examples of a batch must have one structure and one shape, got "
            f"{' and '.join(sorted(shapes))}; resize or crop them to one size."
        ) from error


def fingerprint_of(source: Any) -> str | None:
    """Return the attribute `fingerprint` of a source or data set, if it is a string."""
    found = getattr(source, "fingerprint", None)
    return found if isinstance(found, str) else None


def with_fingerprint(examples: Examples, fingerprint: str | None) -> Examples:
    """Attach what `Dataset.fingerprint` is to use instead of looking at elements."""
    if fingerprint is not None:
        examples.fingerprint = fingerprint
    return examples


class _Rows:
    """A random-access source of some rows of a `grain.MapDataset`."""

    def __init__(self, examples: Examples, rows: np.ndarray) -> None:
        self._examples = examples
        self._rows = rows
        self.fingerprint = None
        if (whole := fingerprint_of(examples)) is not None:
            text = whole.encode() + rows.astype("<i8").tobytes()
            self.fingerprint = hashlib.sha256(text).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return read(self._examples, int(self._rows[index]))
