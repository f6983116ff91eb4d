"""Batches as pure functions: the same seed and step give the same examples.

There is no iterator state to save. A run that resumes at step 1000, or a comparison
that looks at step 1000 alone, asks for step 1000. The order is the same for arrays and
for a `grain.MapDataset`: a folder of pictures trains like the arrays of its pixels.
"""

import itertools
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from rjax.data.examples import Examples, is_lazy, num_examples, read, stack
from rjax.data.order import permutation
from rjax.data.reading import read_ahead

_BATCHES_AHEAD = 2


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Return how many full batches an epoch has.

    Equals `num_examples // batch_size`; the examples that are left over (others in each
    epoch) are dropped.

    Args:
      num_examples: size of the training set.
      batch_size: examples per step.

    Returns:
      An int of at least 1.

    Raises:
      ValueError: the set is empty, or the batch is not between 1 and its size.

    Example:
      >>> steps_per_epoch(1438, 64)
      22
    """
    _check_sizes(num_examples, batch_size)
    if batch_size > num_examples:
        raise ValueError(
            f"`batch_size` must not exceed the {num_examples} examples of the set, got "
            f"{batch_size}; take a smaller batch."
        )
    return num_examples // batch_size


def batch_indices(
    num_examples: int, batch_size: int, seed: int, step: int
) -> np.ndarray:
    """Return the examples of one training step.

    Equals a slice of the epoch's shuffle, `epoch = step // steps_per_epoch(...)`; no
    example comes twice within an epoch.

    Args:
      num_examples: size of the training set.
      batch_size: examples per step.
      seed: of the shuffles, a non-negative int.
      step: number of the step, from 0.

    Returns:
      int32 `[batch_size]`, indices into the set.

    Raises:
      ValueError: a size, `seed` or `step` is out of range.

    Example:
      >>> first = batch_indices(10, 4, seed=0, step=0)
      >>> second = batch_indices(10, 4, seed=0, step=1)
      >>> len(set(first) | set(second))
      8
    """
    steps = steps_per_epoch(num_examples, batch_size)
    if step < 0:
        raise ValueError(f"`step` must not be negative, got {step}; count from 0.")
    epoch, within = divmod(int(step), steps)
    order = permutation(int(num_examples), int(seed), epoch)
    return order[within * batch_size : (within + 1) * batch_size].copy()


def batch_at(examples: Examples, batch_size: int, seed: int, step: int) -> Any:
    """Return the batch of one training step.

    Equals `tree.map(lambda a: a[batch_indices(...)], examples)` for arrays. Elements of
    a `grain.MapDataset` are read one by one and stacked; in epoch e, element i is asked
    for as `examples[e * n + i]`, so that grain's random transformations differ from
    epoch to epoch and still are functions of the step.

    Args:
      examples: a pytree (a pair of images and labels, a dict) of arrays `[n, ...]`, or
        a `grain.MapDataset` with such pytrees, less the first axis, as elements.
      batch_size: examples per step.
      seed: of the shuffles, a non-negative int.
      step: number of the step, from 0.

    Returns:
      The same pytree with arrays `[batch_size, ...]`.

    Raises:
      ValueError: as `batch_indices`, or the arrays differ in length.
      DataError: an example that is read only now cannot be used.

    Example:
      >>> images, labels = np.zeros((10, 8)), np.arange(10)
      >>> batch_at((images, labels), 4, seed=0, step=3)[0].shape
      (4, 8)
    """
    count = num_examples(examples)
    rows = batch_indices(count, batch_size, seed, step)
    if not is_lazy(examples):
        return jax.tree.map(lambda array: array[rows], examples)
    passed = int(step) // (count // batch_size) * count
    return stack([read(examples, passed + int(row)) for row in rows])


def train_batches(
    examples: Examples,
    batch_size: int,
    seed: int = 0,
    start: int = 0,
    stop: int | None = None,
) -> Generator[Any, None, None]:
    """Go through the batches of consecutive training steps.

    Equals `(batch_at(examples, batch_size, seed, step) for step in range(start, stop))`
    bit for bit. A `grain.MapDataset` is read ahead by grain's threads, two batches at
    most; closing the iterator, or dropping it, ends them. The position to resume from
    is the number of the step.

    Args:
      examples: as in `batch_at`.
      batch_size: examples per step. What an epoch has beyond full batches is dropped,
        other examples in each epoch.
      seed: of the shuffles, a non-negative int.
      start: the first step.
      stop: the step before which to end; for ever if `None`.

    Returns:
      An iterator of pytrees of arrays `[batch_size, ...]`.

    Raises:
      ValueError: at once, a size, `seed`, `start` or `stop` is out of range.
      DataError: from the iterator, an example that is read only then cannot be used.

    Example:
      >>> images, labels = np.zeros((10, 8)), np.arange(10)
      >>> [y.shape for _, y in train_batches((images, labels), 4, start=1, stop=3)]
      [(4,), (4,)]
    """
    count = num_examples(examples)
    batch_indices(count, batch_size, seed, start)  # complains now, not in the loop
    if stop is not None and stop < start:
        raise ValueError(
            f"`stop` must not be before `start`, got {stop} and {start}; leave it out "
            "to go on for ever."
        )
    start, stop = int(start), None if stop is None else int(stop)
    if is_lazy(examples):
        return _read_train(examples, int(batch_size), int(seed), start, stop)
    steps = itertools.count(start) if stop is None else range(start, stop)
    return (batch_at(examples, batch_size, seed, step) for step in steps)


def evaluation_batches(
    examples: Examples, batch_size: int
) -> Generator[tuple[Any, np.ndarray], None, None]:
    """Go through every example exactly once, in order, in batches of one shape.

    The last batch is filled up with copies of the last example, which the mask leaves
    out; so no shape changes and nothing recompiles. A `grain.MapDataset` is read ahead
    as in `train_batches`.

    Args:
      examples: as in `batch_at`.
      batch_size: examples per batch; may exceed n.

    Returns:
      An iterator of `(batch, mask)`: the pytree with arrays `[batch_size, ...]`, and
      bool `[batch_size]`, true where a row counts.

    Raises:
      ValueError: the set is empty, `batch_size` is below 1, or the arrays differ in
        length.
      DataError: from the iterator, an example that is read only then cannot be used.

    Example:
      >>> [mask.sum() for _, mask in evaluation_batches(np.arange(5), 2)]
      [np.int64(2), np.int64(2), np.int64(1)]
    """
    count = num_examples(examples)
    _check_sizes(count, batch_size)
    if is_lazy(examples):
        return _read_padded(examples, count, int(batch_size))
    return _padded(examples, count, batch_size)


def _padded(
    arrays: Any, count: int, batch_size: int
) -> Generator[tuple[Any, np.ndarray], None, None]:
    for start in range(0, count, batch_size):
        rows = np.arange(start, start + batch_size)
        inside = np.minimum(rows, count - 1)
        # `inside` is bound now: the batch must not see the next one's rows.
        batch = jax.tree.map(lambda array, inside=inside: array[inside], arrays)
        yield batch, rows < count


def _read_padded(
    examples: Examples, count: int, batch_size: int
) -> Generator[tuple[Any, np.ndarray], None, None]:
    ahead = min(count, _BATCHES_AHEAD * batch_size)
    # Closed at once, not when the traceback of an error lets go of it.
    with closing(read_ahead(examples, int, count, ahead)) as elements:
        for chunk in _chunks(elements, batch_size):
            mask = np.arange(batch_size) < len(chunk)
            yield stack(chunk + chunk[-1:] * (batch_size - len(chunk))), mask


def _read_train(
    examples: Examples, batch_size: int, seed: int, start: int, stop: int | None
) -> Generator[Any, None, None]:
    count = len(examples)
    per_epoch = count // batch_size * batch_size

    def index(position: int) -> int:
        epoch, within = divmod(start * batch_size + position, per_epoch)
        return epoch * count + int(permutation(count, seed, epoch)[within])

    # For ever is as far as a length can count.
    total = sys.maxsize if stop is None else (stop - start) * batch_size
    ahead = _BATCHES_AHEAD * batch_size
    with closing(read_ahead(examples, index, total, ahead)) as elements:
        for chunk in _chunks(elements, batch_size):
            yield stack(chunk)


def _chunks(elements: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(elements, size)):
        yield chunk


def _check_sizes(num_examples: int, batch_size: int) -> None:
    if num_examples < 1:
        raise ValueError(
            f"the set must have at least one example, got {num_examples}; check the "
            "path or the filter that made it."
        )
    if batch_size < 1:
        raise ValueError(
            f"`batch_size` must be at least 1, got {batch_size}; 64 is a usual choice."
        )
