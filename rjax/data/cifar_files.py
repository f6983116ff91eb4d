"""The files of CIFAR-10 and CIFAR-100, in their binary and in their Python version.

The formats are those that the page of the CIFAR data sets by Krizhevsky describes. In
the binary version an image is a record: one byte with its label (CIFAR-100: two, coarse
and fine), then 3072 bytes, the red, green and blue plane of 32 rows of 32. In the
Python version a file is a pickled dict with the same 3072 bytes as rows of an array.
"""

import dataclasses
from typing import Any

import numpy as np

from rjax.data.archive import Place
from rjax.data.arrays import check_labels, to_float
from rjax.data.errors import DataError
from rjax.data.pickles import load_pickle

_PIXELS = 3 * 32 * 32


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where one version of a data set keeps what.

    Attributes:
      train: names of the files to train on.
      test: names of the files to test on.
      meta: name of the file with the names of the classes.
      archive: name of the archive, without what follows the first dot.
      folder: name of the folder in it.
      label_bytes: bytes of labels that begin a record; 0 where the files are pickles.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    archive: str
    folder: str
    label_bytes: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return (*self.train, *self.test, self.meta)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What to take from the files, whatever their version.

    Attributes:
      name: of the data set.
      num_classes: labels lie in `[0, num_classes)`.
      labels_key: entry of a pickle with the labels.
      names_key: entry of a pickle with the names of the classes.
      label_byte: which byte of a record is the label.
      class_names: what to take where there are no names.
    """

    name: str
    num_classes: int
    labels_key: str
    names_key: str
    label_byte: int
    class_names: tuple[str, ...] | None


def load_side(
    place: Place, layout: Layout, names: tuple[str, ...], kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 images `[n, 32, 32, 3]` and int32 labels `[n]` of some files.

    Raises:
      DataError: a file is missing, damaged, or not what `layout` says.
    """
    parts = [_load_file(place, layout, name, kind) for name in names]
    planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
    # To NHWC while they are bytes, which is a quarter of the work.
    images = to_float(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
    return images, np.concatenate([labels for _, labels in parts])


def _load_file(
    place: Place, layout: Layout, name: str, kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    content, path = place.content(name)
    if layout.label_bytes:
        pixels, labels = _parse_records(content, layout.label_bytes, kind, path)
    else:
        pixels, labels = _parse_pickle(content, kind, path)
    if not len(pixels):
        raise DataError(f"{path} is empty; download it again.")
    check_labels(labels, kind.num_classes, f"the labels of {path}")
    return pixels, labels.astype(np.int32)


def _parse_records(
    content: bytes, label_bytes: int, kind: Kind, path: str
) -> tuple[np.ndarray, np.ndarray]:
    size = label_bytes + _PIXELS
    if len(content) % size:
        raise DataError(
            f"{path} is truncated or no binary version of CIFAR, its {len(content)} "
            f"bytes are no multiple of the {size} of a record; download it again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:], records[:, kind.label_byte]


def _parse_pickle(
    content: bytes, kind: Kind, path: str
) -> tuple[np.ndarray, np.ndarray]:
    found = load_pickle(content, path)
    pixels = _entry(found, "data", path)
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (_PIXELS,)
    ):
        raise DataError(
            f"{path} must have uint8 [n, {_PIXELS}] as its data, got "
            f"{getattr(pixels, 'dtype', type(pixels).__name__)} "
            f"{getattr(pixels, 'shape', '')}; download it again."
        )
    labels = _entry(found, kind.labels_key, path)
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{path} must have a list of integers as its {kind.labels_key}; download "
            "it again."
        )
    if len(labels) != len(pixels):
        raise DataError(
            f"{path} has {len(labels)} labels for {len(pixels)} images; download it "
            "again."
        )
    return pixels, np.asarray(labels, object)  # of any size, until they are checked


def _entry(found: Any, key: str, path: str) -> Any:
    if isinstance(found, dict):
        for spelling in (key.encode(), key):
            if spelling in found:
                return found[spelling]
    raise DataError(
        f"{path} has no entry {key}; check that it is a file of this data set."
    )


def class_names(place: Place, layout: Layout, kind: Kind) -> tuple[str, ...]:
    """Return the names that the meta file gives to the classes.

    Raises:
      DataError: it cannot be read, or has not one name for each class.
    """
    content, path = place.content(layout.meta)
    try:
        if layout.label_bytes:
            names = content.decode().split("\n")
        else:
            listed = _entry(load_pickle(content, path), kind.names_key, path)
            names = [n.decode() if isinstance(n, bytes) else str(n) for n in listed]
    except (UnicodeDecodeError, TypeError) as error:
        raise DataError(
            f"{path} has no names of classes that can be read; delete or download it."
        ) from error
    names = tuple(name.strip() for name in names if name.strip())
    if len(names) != kind.num_classes:
        raise DataError(
            f"{path} has {len(names)} names for the {kind.num_classes} classes; delete "
            "or download it."
        )
    return names
