"""Handwritten digits that come with scikit-learn: no download, 1797 images of 8x8."""

from typing import Any

import numpy as np

from rjax.data.dataset import Dataset
from rjax.data.order import check_fraction, split_rows


def load_digits(seed: int = 0, test_fraction: float = 0.2) -> Dataset:
    """Load scikit-learn's digits, shuffled and split.

    Equals `sklearn.datasets.load_digits()` with pixels divided by 16 and a split that
    depends on `seed` and `test_fraction` only.

    Args:
      seed: of the shuffle before the split, a non-negative int.
      test_fraction: share of examples held out, in (0, 1).

    Returns:
      A `Dataset`: images float32 `[n, 8, 8, 1]` in [0, 1], labels int32 `[n]`.

    Raises:
      ImportError: scikit-learn is not installed.
      ValueError: `seed` or `test_fraction` is out of range, or a side would be empty.

    Example:
      >>> digits = load_digits()
      >>> digits.train[0].shape, digits.test[0].shape
      ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    check_fraction(test_fraction, "test_fraction")  # before the import that may fail
    images, labels = _bundled()
    train, test = split_rows(len(labels), test_fraction, seed, "test_fraction")
    return Dataset(
        name="digits",
        train=(images[train], labels[train]),
        test=(images[test], labels[test]),
        num_classes=10,
    )


def _bundled() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "`load_digits` needs scikit-learn, which is not installed; "
            'run `pip install "rjax[data]"`.',
        ) from error
    bunch: Any = datasets.load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[..., None]
    return images, bunch.target.astype(np.int32)
