"""MNIST and Fashion-MNIST from their four IDX files.

The format is the one that the MNIST page by LeCun, Cortes and Burges describes: a big-
endian 32-bit magic number, of which the third byte is the type (8: unsigned byte) and
the fourth the number of dimensions; the size of each dimension, 32 bits as well; then
the bytes, the last dimension running fastest.
"""

import math
import os
import struct

import numpy as np

from rjax.data.arrays import check_labels, to_float
from rjax.data.dataset import Dataset
from rjax.data.errors import DataError
from rjax.data.files import Folder, gunzip

_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_DIGITS = tuple("0123456789")


def load_mnist(folder: str | os.PathLike[str]) -> Dataset:
    """Load MNIST: handwritten digits, 60000 to train and 10000 to test.

    The folder has `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
    `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each as it is or with `.gz`
    (as it is, if both are there); a dot before `idx` will do as well. What a
    `SHA256SUMS` in the folder lists is verified; nothing is downloaded.

    Args:
      folder: where the files are.

    Returns:
      A `Dataset`: images float32 `[n, 28, 28, 1]` in [0, 1], or of whatever height and
      width the files have, labels int32 `[n]`.

    Raises:
      DataError: a file is missing, damaged, or does not fit the others.

    Example:
      >>> load_mnist("no/such/folder")
      Traceback (most recent call last):
      ...
      rjax.data.errors.DataError: no/such/folder does not exist; give the folder ...
    """
    return _load(folder, "mnist", _DIGITS)


def load_fashion_mnist(folder: str | os.PathLike[str]) -> Dataset:
    """Load Fashion-MNIST: articles of clothing, in the files and sizes of MNIST.

    Args:
      folder: where the files are, named as in `load_mnist`.

    Returns:
      A `Dataset` as from `load_mnist`, with names of the classes.

    Raises:
      DataError: as `load_mnist`.

    Example:
      >>> load_fashion_mnist("no/such/folder")
      Traceback (most recent call last):
      ...
      rjax.data.errors.DataError: no/such/folder does not exist; give the folder ...
    """
    return _load(folder, "fashion-mnist", _FASHION)


def _load(
    folder: str | os.PathLike[str], name: str, class_names: tuple[str, ...]
) -> Dataset:
    files = Folder(folder)
    train, test = (_load_side(files, side) for side in ("train", "t10k"))
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{folder} has images of {train[0].shape[1:3]} to train and of "
            f"{test[0].shape[1:3]} to test; take all files from one data set."
        )
    return Dataset(name, train, test, 10, class_names)


def _load_side(files: Folder, side: str) -> tuple[np.ndarray, np.ndarray]:
    images, images_path = _read_idx(files, f"{side}-images", 3)
    labels, labels_path = _read_idx(files, f"{side}-labels", 1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path} has {len(labels)} labels for the {len(images)} images of "
            f"{images_path}; take both from one data set."
        )
    check_labels(labels, 10, f"the labels of {labels_path}")
    return to_float(images)[..., None], labels.astype(np.int32)


def _read_idx(files: Folder, stem: str, dimensions: int) -> tuple[np.ndarray, str]:
    """Return the bytes of an IDX file as an array, and the path they are from."""
    names = [f"{stem}{sep}idx{dimensions}-ubyte" for sep in ("-", ".")]
    path = files.find([*names, *(f"{name}.gz" for name in names)])
    content = files.read(path)
    if path.suffix == ".gz":
        content = gunzip(content, path)
    return _parse(content, dimensions, str(path)), str(path)


def _parse(content: bytes, dimensions: int, path: str) -> np.ndarray:
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(
            f"{path} is truncated, its header has {header} bytes and the file "
            f"{len(content)}; download it again."
        )
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if magic != 0x0800 + dimensions:
        raise DataError(
            f"{path} is no IDX file of unsigned bytes in {dimensions} dimensions, its "
            f"magic number is 0x{magic:08x} instead of 0x{0x0800 + dimensions:08x}; "
            "check that the files did not change places, or download it again."
        )
    want = header + math.prod(shape)
    if len(content) != want:
        raise DataError(
            f"{path} is {'truncated' if len(content) < want else 'too long'}, its "
            f"header announces {want} bytes and it has {len(content)}; download it "
            "again."
        )
    if want == header:
        raise DataError(
            f"{path} is empty, its header announces the shape {tuple(shape)}; download "
            "it again."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
