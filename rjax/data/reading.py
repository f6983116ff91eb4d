"""Reading a `grain.MapDataset` ahead, in any order, in grain's threads."""

import os
from collections.abc import Callable, Generator
from typing import Any

from rjax.data.errors import DataError
from rjax.data.examples import Examples, read

# Decoding is bound by processors; more threads than that only wait for each other.
_MAX_THREADS = 16


def read_ahead(
    examples: Examples, index: Callable[[int], int], count: int, ahead: int
) -> Generator[Any, None, None]:
    """Yield `examples[index(i)]` for i = 0, 1, … below `count`, in this order.

    The threads start with the first element asked for. They end when the iterator is
    closed, is no longer referred to, raises, or is interrupted; what a thread raised
    is raised here, in its turn.

    Args:
      examples: a `grain.MapDataset`.
      index: from position to index, called by several threads.
      count: number of elements.
      ahead: how many elements may wait to be asked for.

    Returns:
      An iterator of elements.
    """
    import grain

    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    options = grain.ReadOptions(
        num_threads=threads, prefetch_buffer_size=max(threads, ahead)
    )
    ordered = grain.MapDataset.source(_Ordered(examples, index, count))
    elements = iter(ordered.to_iter_dataset(options))
    try:
        yield from elements
    except DataError as error:
        # Anew, without the note on its own frames that grain adds to the message.
        raise DataError(*error.args) from error.__cause__
    finally:
        elements.close()  # drops what was not asked for, and waits for nothing


class _Ordered:
    """A random-access source in an order of our own, over any number of epochs."""

    def __init__(
        self, examples: Examples, index: Callable[[int], int], count: int
    ) -> None:
        self._examples = examples
        self._index = index
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return read(self._examples, self._index(index))
