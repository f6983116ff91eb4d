"""The one form in which every loader returns its data."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np

from rjax.data.examples import Examples, fingerprint_of, is_lazy, num_examples, read

_SAMPLES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled set of images or feature vectors, split in two.

    Attributes:
      name: short name, as on the command line.
      train: either `(images, labels)`, float32 `[n, height, width, channels]` in [0, 1]
        and int32 `[n]`, or a `grain.MapDataset` whose elements are `(image, label)`,
        float32 `[height, width, channels]` and an int32 scalar. Feature vectors are
        float32 `[n, features]`.
      test: the same for the examples held out.
      num_classes: labels lie in `[0, num_classes)`.
      class_names: what the labels mean, `num_classes` of them, where known.

    Example:
      >>> some = (np.zeros((2, 8, 8, 1), np.float32), np.zeros(2, np.int32))
      >>> Dataset("zeros", train=some, test=some, num_classes=10).name
      'zeros'
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    class_names: tuple[str, ...] | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """The sha256, in hex, of what this set is made of: train, then test.

        - Arrays: dtype, shape and bytes of each. Equal fingerprints mean equal data.
        - A `grain.MapDataset` that has a string attribute `fingerprint`: that string.
          Folders of images have one, made from relative paths, file sizes, labels and
          how they are decoded; the contents are not read.
        - Any other `grain.MapDataset`: its length, and dtype, shape and bytes of 16
          elements spread evenly over it. A change elsewhere goes unseen.
        """
        digest = hashlib.sha256()
        for examples in (self.train, self.test):
            if not is_lazy(examples):
                leaves = jax.tree.leaves(examples)
            elif (told := fingerprint_of(examples)) is not None:
                digest.update(f"told{told}".encode())
                continue
            else:
                digest.update(f"sampled{len(examples)}".encode())
                leaves = _sampled_leaves(examples)
            for array in map(np.ascontiguousarray, leaves):
                digest.update(f"{array.dtype.str}{array.shape}".encode())
                digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def _sampled_leaves(examples: Examples) -> list[Any]:
    count = num_examples(examples)
    spread = np.linspace(0, count - 1, min(count, _SAMPLES)).astype(int)
    return jax.tree.leaves([read(examples, int(index)) for index in spread])
