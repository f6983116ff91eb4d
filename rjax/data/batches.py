"""Batches as pure functions: the same seed and step give the same examples.

There is no iterator state to save. A run that resumes at step 1000, or a comparison
that looks at step 1000 alone, asks for step 1000.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


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


def batch_at(arrays: Any, batch_size: int, seed: int, step: int) -> Any:
    """Return the rows of one training step.

    Equals `tree.map(lambda a: a[batch_indices(...)], arrays)`.

    Args:
      arrays: a pytree (a tuple of images and labels, a dict) of arrays `[n, ...]`.
      batch_size: examples per step.
      seed: of the shuffles, a non-negative int.
      step: number of the step, from 0.

    Returns:
      The same pytree with arrays `[batch_size, ...]`.

    Raises:
      ValueError: as `batch_indices`, or the arrays differ in length.

    Example:
      >>> images, labels = np.zeros((10, 8)), np.arange(10)
      >>> batch_at((images, labels), 4, seed=0, step=3)[0].shape
      (4, 8)
    """
    rows = batch_indices(_num_examples(arrays), batch_size, seed, step)
    return jax.tree.map(lambda array: array[rows], arrays)


def evaluation_batches(arrays: Any, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """Go through every example exactly once, in order, in batches of one shape.

    The last batch is filled up with copies of the last example, which the mask leaves
    out; so no shape changes and nothing recompiles.

    Args:
      arrays: a pytree of arrays `[n, ...]`.
      batch_size: examples per batch; may exceed n.

    Returns:
      An iterator of `(batch, mask)`: the pytree with arrays `[batch_size, ...]`, and
      bool `[batch_size]`, true where a row counts.

    Raises:
      ValueError: the set is empty, `batch_size` is below 1, or the arrays differ in
        length.

    Example:
      >>> [mask.sum() for _, mask in evaluation_batches(np.arange(5), 2)]
      [np.int64(2), np.int64(2), np.int64(1)]
    """
    num_examples = _num_examples(arrays)
    _check_sizes(num_examples, batch_size)
    return _padded(arrays, num_examples, batch_size)


def _padded(
    arrays: Any, num_examples: int, batch_size: int
) -> Iterator[tuple[Any, Any]]:
    for start in range(0, num_examples, batch_size):
        rows = np.arange(start, start + batch_size)
        inside = np.minimum(rows, num_examples - 1)
        # `inside` is bound now: the batch must not see the next one's rows.
        batch = jax.tree.map(lambda array, inside=inside: array[inside], arrays)
        yield batch, rows < num_examples


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


def _num_examples(arrays: Any) -> int:
    lengths = {len(array) for array in jax.tree.leaves(arrays)}
    if len(lengths) != 1:
        raise ValueError(
            "`arrays` must have one number of examples along the first axis, got "
            f"{sorted(lengths)}; every array needs one row per example."
        )
    return lengths.pop()
