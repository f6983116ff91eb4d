"""The one form in which every loader returns its data."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled image set in host memory, split in two.

    Attributes:
      name: short name, as on the command line.
      train: `(images, labels)`, float32 `[n, height, width, channels]` and int32 `[n]`.
      test: the same for the examples held out.
      num_classes: labels lie in `[0, num_classes)`.

    Example:
      >>> some = (np.zeros((2, 8, 8, 1), np.float32), np.zeros(2, np.int32))
      >>> Dataset("zeros", train=some, test=some, num_classes=10).name
      'zeros'
    """

    name: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    num_classes: int
