"""Data sets from grain's, or from any source with random access."""

from typing import Any

import numpy as np

from rjax.data.arrays import check_images_dtype, check_num_classes, to_float
from rjax.data.dataset import Dataset
from rjax.data.errors import DataError
from rjax.data.examples import (
    Examples,
    fingerprint_of,
    from_source,
    is_lazy,
    take,
    with_fingerprint,
)
from rjax.data.order import check_fraction, split_rows


def from_grain(
    train: Any,
    test: Any = None,
    *,
    num_classes: int,
    name: str = "grain",
    test_fraction: float = 0.2,
    seed: int = 0,
    class_names: tuple[str, ...] | None = None,
) -> Dataset:
    """Make a data set from a `grain.MapDataset`, or any source with random access.

    Elements are `(image, label)` pairs, read and checked when a batch asks for them.
    Images are treated as in `from_arrays`, one by one: uint8 is divided by 255, a
    floating dtype becomes float32, `[height, width]` gets a channel.

    Args:
      train: a `grain.MapDataset`, or anything with `__len__` and `__getitem__(int)`
        that several threads may read at once, of `(image, label)` pairs. A string
        attribute `fingerprint`, where there is one, identifies the contents.
      test: the same for the examples held out; `None` splits them off `train` as
        `split` does, after which random transformations of grain's no longer differ
        from epoch to epoch: add them after a split of your own.
      num_classes: labels lie in `[0, num_classes)`. It has to be said: finding out
        would read every example.
      name: of the data set.
      test_fraction: share of `train` to hold out where `test` is `None`, in (0, 1).
      seed: of the shuffle before that split, a non-negative int below 2**64.
      class_names: what the labels mean, `num_classes` of them.

    Returns:
      A `Dataset` of two `grain.MapDataset`s.

    Raises:
      DataError: a source has no random access, or is empty. Later, from whoever reads:
        an element is no pair, has a label out of range, or an image of another dtype.
      ImportError: grain is not installed.
      ValueError: `num_classes`, `test_fraction` or `seed` is out of range, or a side
        would be empty.

    Example:
      >>> source = [(np.full((8, 8, 1), i, np.uint8), i % 2) for i in range(10)]
      >>> data = from_grain(source, num_classes=2)
      >>> len(data.train), len(data.test), data.train[0][0].shape
      (8, 2, (8, 8, 1))
    """
    check_num_classes(num_classes, class_names)
    check_fraction(test_fraction, "test_fraction")
    import_grain("from_grain")
    ready = [_adapt(train, "train", num_classes)]
    if test is None:
        rows = split_rows(len(ready[0]), test_fraction, seed, "test_fraction")
        ready = [take(ready[0], side) for side in rows]
    else:
        ready.append(_adapt(test, "test", num_classes))
    return Dataset(name, ready[0], ready[1], num_classes, class_names)


def import_grain(needed_by: str) -> None:
    """Import grain, or say which extra brings it."""
    try:
        import grain  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"`{needed_by}` needs grain, which is not installed; "
            'run `pip install "rjax[data]"`.'
        ) from error


def _adapt(source: Any, side: str, num_classes: int) -> Examples:
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise DataError(
            f"`{side}` has no random access, got {type(source).__name__}; build it "
            "from a `grain.MapDataset`, or iterate over it yourself and give the "
            "batches to the step."
        )
    if len(source) < 1:
        raise DataError(
            f"`{side}` must not be empty, got a source of length 0; check the path or "
            "the filter that made it."
        )
    examples = source if is_lazy(source) else from_source(source)
    adapted = examples.map_with_index(_Adapt(side, len(source), num_classes))
    return with_fingerprint(adapted, fingerprint_of(source))


class _Adapt:
    """Turns an element into float32 image and int32 label, or says why it cannot."""

    def __init__(self, side: str, count: int, num_classes: int) -> None:
        self._side = side
        self._count = count
        self._num_classes = num_classes

    def __call__(self, index: int, element: Any) -> tuple[np.ndarray, np.int32]:
        what = f"example {index % self._count} of `{self._side}`"
        if not isinstance(element, tuple | list) or len(element) != 2:
            raise DataError(
                f"{what} must be a pair (image, label), got {type(element).__name__}; "
                "map the elements to pairs."
            )
        image, label = map(np.asarray, element)
        check_images_dtype(image.dtype, f"the image of {what}")
        if not np.issubdtype(label.dtype, np.integer) or label.ndim:
            raise DataError(
                f"the label of {what} must be one integer, got {label.dtype} of shape "
                f"{label.shape}; take the argmax of a one-hot label."
            )
        if not 0 <= label < self._num_classes:
            raise DataError(
                f"the label of {what} must lie in [0, {self._num_classes}), got "
                f"{label}; number the classes from 0, or give more of them."
            )
        image = to_float(image[..., None] if image.ndim == 2 else image)
        return image, np.int32(label)
