"""Data sets from arrays that the caller has, and what images and labels must be."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from rjax.data.dataset import Dataset
from rjax.data.errors import DataError
from rjax.data.examples import take
from rjax.data.order import check_fraction, split_rows


def from_arrays(
    train: Any,
    test: Any = None,
    num_classes: int | None = None,
    name: str = "arrays",
    test_fraction: float = 0.2,
    seed: int = 0,
    class_names: tuple[str, ...] | None = None,
) -> Dataset:
    """Make a data set from arrays of images, or of feature vectors, and labels.

    Args:
      train: `(images, labels)`. Images are `[n, height, width, channels]`, `[n, height,
        width]`, which gets one channel, or `[n, features]`; uint8 is divided by 255,
        a floating dtype is taken as it is and becomes float32. Labels are integers
        `[n]` and become int32.
      test: the same for the examples held out; `None` splits them off `train`.
      num_classes: labels lie in `[0, num_classes)`; the largest label plus 1 if `None`.
      name: of the data set.
      test_fraction: share of `train` to hold out where `test` is `None`, in (0, 1).
      seed: of the shuffle before that split, a non-negative int below 2**64.
      class_names: what the labels mean, `num_classes` of them.

    Returns:
      A `Dataset` of arrays.

    Raises:
      DataError: images or labels cannot be used; the message says which and why.
      ValueError: `test_fraction` or `seed` is out of range, or a side would be empty.

    Example:
      >>> images, labels = np.zeros((10, 8, 8), np.uint8), np.arange(10) % 3
      >>> data = from_arrays((images, labels))
      >>> data.train[0].shape, data.test[0].shape, data.num_classes
      ((8, 8, 8, 1), (2, 8, 8, 1), 3)
    """
    check_fraction(test_fraction, "test_fraction")
    sides = [_pair(train, "train")] + ([] if test is None else [_pair(test, "test")])
    if num_classes is None:
        num_classes = 1 + max(int(labels.max()) for _, labels in sides)
    check_num_classes(num_classes, class_names)
    for (_, labels), side in zip(sides, ("train", "test"), strict=False):
        check_labels(labels, num_classes, f"the labels of `{side}`")
    shapes = {images.shape[1:] for images, _ in sides}
    if len(shapes) > 1:
        raise DataError(
            "the images of `train` and `test` must have one shape, got "
            f"{sides[0][0].shape[1:]} and {sides[1][0].shape[1:]}; resize one of them."
        )
    ready = [(to_float(images), labels.astype(np.int32)) for images, labels in sides]
    if test is None:
        rows = split_rows(len(ready[0][1]), test_fraction, seed, "test_fraction")
        ready = [take(ready[0], side) for side in rows]
    return Dataset(name, ready[0], ready[1], num_classes, class_names)


def to_float(images: np.ndarray) -> np.ndarray:
    """Return uint8 images divided by 255, others as they are, as float32."""
    if images.dtype == np.uint8:
        return np.divide(images, np.float32(255), dtype=np.float32)
    return np.asarray(images, np.float32)


def check_images_dtype(dtype: Any, what: str) -> None:
    """Raise `DataError` unless `dtype` is uint8 or floating."""
    if dtype != np.uint8 and not jnp.issubdtype(dtype, np.floating):
        raise DataError(
            f"{what} must be uint8 in [0, 255] or floating, got {dtype}; scale them to "
            "[0, 1] as float32."
        )


def check_labels(labels: np.ndarray, num_classes: int, what: str) -> None:
    """Raise `DataError`, naming the first of them, if labels are out of range."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{what} must lie in [0, {num_classes}), got {labels[index]} at index "
            f"{index}; number the classes from 0, or give more of them."
        )


def check_num_classes(num_classes: int, class_names: tuple[str, ...] | None) -> None:
    """Raise `ValueError` unless there is a class, and a name for each or none."""
    if num_classes < 1:
        raise ValueError(
            f"`num_classes` must be at least 1, got {num_classes}; count the classes."
        )
    if class_names is not None and len(class_names) != num_classes:
        raise ValueError(
            f"`class_names` must have {num_classes} names, one per class, got "
            f"{len(class_names)}; leave it out if they are not known."
        )


def _pair(examples: Any, side: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(examples, tuple | list) or len(examples) != 2:
        raise DataError(
            f"`{side}` must be a pair (images, labels), got "
            f"{type(examples).__name__}; put the two arrays into a tuple."
        )
    images, labels = map(np.asarray, examples)
    check_images_dtype(images.dtype, f"the images of `{side}`")
    if images.ndim < 2:
        raise DataError(
            f"the images of `{side}` must be [n, height, width, channels], [n, height, "
            f"width] or [n, features], got shape {images.shape}; give one row per "
            "example."
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise DataError(
            f"the labels of `{side}` must be integers [n], got {labels.dtype} of shape "
            f"{labels.shape}; take the argmax of one-hot labels, or cast with "
            "`.astype(np.int32)`."
        )
    if len(images) != len(labels):
        raise DataError(
            f"`{side}` must have one label per image, got {len(images)} images and "
            f"{len(labels)} labels; check that both come from the same file."
        )
    if not images.size:
        raise DataError(
            f"`{side}` must not be empty, got images of shape {images.shape}; check "
            "the filter that made it."
        )
    return (images[..., None] if images.ndim == 3 else images), labels
