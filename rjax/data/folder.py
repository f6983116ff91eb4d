"""A data set from pictures in folders, one folder for each class."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from rjax.data.adapted import import_grain
from rjax.data.dataset import Dataset
from rjax.data.errors import DataError
from rjax.data.examples import from_source
from rjax.data.files import Folder, complaints
from rjax.data.order import check_fraction, split_rows
from rjax.data.pictures import Format, Pictures, import_pillow, picture_size

_TEST_NAMES = ("test", "val", "validation", "valid")
_EXTENSIONS = tuple(
    f".{name}" for name in "png jpg jpeg bmp gif webp ppm pgm tif tiff".split()
)


def load_image_folder(
    folder: str | os.PathLike[str],
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Make a data set from pictures in folders, decoded when a batch asks for them.

    The layout is `folder/train/<class>/…` and `folder/test/<class>/…`, where instead of
    `test` there may be `val`, `validation` or `valid` (the first of these that is
    there); or just `folder/<class>/…` or `folder/train/<class>/…`, of which a share is
    held out. Classes are numbered in the sorted order of their names; pictures are in
    the sorted order of their paths, from folders of any depth. Names that begin with a
    dot are passed over, as is whatever has no extension of a picture.

    A picture is turned as its EXIF orientation says, converted to gray or RGB of 8 bits
    (transparency is dropped, of several frames the first is taken) and, if a size is
    given, resized by Pillow's antialiasing bilinear filter until it just covers the
    size, and cropped in the middle. What a `SHA256SUMS` lists is verified whenever a
    picture is read.

    Args:
      folder: where the folders are.
      image_size: height and width, or one int for both; `None` demands that all
        pictures have the size of the first.
      channels: 3 for RGB, 1 for gray.
      test_fraction: share of pictures to hold out where there is no test folder, in
        (0, 1).
      seed: of the shuffle before that split, a non-negative int below 2**64.

    Returns:
      A `Dataset` of two `grain.MapDataset`s: images float32 `[height, width, channels]`
      in [0, 1], labels int32. `class_names` are the names of the folders.

    Raises:
      DataError: the folders do not have that layout, or no pictures. Later, from
        whoever reads: a picture cannot be decoded, or has another size.
      ImportError: grain or Pillow is not installed.
      ValueError: an argument is out of range, or a side would be empty.

    Example:
      >>> load_image_folder("no/such/folder", image_size=64)
      Traceback (most recent call last):
      ...
      rjax.data.errors.DataError: no/such/folder does not exist; give the folder ...
    """
    check_fraction(test_fraction, "test_fraction")
    _check_channels(channels)
    size = _check_size(image_size)
    import_pillow()
    import_grain("load_image_folder")
    files = Folder(folder)
    train_folder, test_folder = _sides(files.path)
    class_names = _class_names(train_folder)
    train = _list(train_folder, class_names)
    if test_folder is None:
        rows = split_rows(len(train), test_fraction, seed, "test_fraction")
        train, test = ([train[row] for row in side] for side in rows)
    else:
        _check_known(test_folder, class_names)
        test = _list(test_folder, class_names)
    resize = size is not None
    picture_format = Format(size or picture_size(files, train[0][0]), resize, channels)
    sources = [_source(files, listed, picture_format) for listed in (train, test)]
    return Dataset(
        name=files.path.resolve().name or "folder",
        train=from_source(sources[0]),
        test=from_source(sources[1]),
        num_classes=len(class_names),
        class_names=class_names,
    )


def _sides(root: Path) -> tuple[Path, Path | None]:
    """Return the folder to train on, and the one to test on if there is one."""
    names = _subfolders(root)
    test = next((name for name in _TEST_NAMES if name in names), None)
    # A class may be called "train": then there are others beside it.
    if "train" in names and (test or len(names) == 1):
        return root / "train", root / test if test else None
    if names and set(names) <= set(_TEST_NAMES):
        raise DataError(
            f"{root} has a folder {names[0]} and no folder train; add it, or give the "
            "folder that it lies in."
        )
    return root, None


def _class_names(folder: Path) -> tuple[str, ...]:
    names = _subfolders(folder)
    if not names:
        raise DataError(
            f"{folder} has no folders, of which each would be a class; sort the "
            "pictures into one folder per class."
        )
    return tuple(names)


def _check_known(folder: Path, class_names: tuple[str, ...]) -> None:
    for name in _subfolders(folder):
        if name not in class_names:
            raise DataError(
                f"{folder / name} is a class that has no folder to train on; the "
                f"classes are {', '.join(class_names)}: rename or remove it."
            )


def _list(folder: Path, class_names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return paths and labels of the pictures of one side, in order."""
    found = []
    for label, name in enumerate(class_names):
        if os.path.isdir(folder / name):  # a class may have nothing to test on
            with complaints(folder / name):
                found += [(path, label) for path in _pictures_below(folder / name)]
    if not found:
        raise DataError(
            f"{folder} has no pictures in its folders; their names end in one of "
            f"{', '.join(_EXTENSIONS)}."
        )
    return found


def _pictures_below(folder: Path) -> list[Path]:
    found = []

    def complain(error: OSError) -> None:
        raise error  # os.walk would pass over what it cannot read

    for base, folders, names in os.walk(folder, onerror=complain):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(base, name)
            for name in names
            if name.lower().endswith(_EXTENSIONS) and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: path.as_posix())


def _subfolders(folder: Path) -> list[str]:
    with complaints(folder), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and e.name[0] != ".")


def _source(
    files: Folder, listed: list[tuple[Path, int]], picture_format: Format
) -> Pictures:
    paths = [path for path, _ in listed]
    labels = np.array([label for _, label in listed], np.int32)
    fingerprint = _fingerprint(files.path, listed, picture_format)
    return Pictures(files, paths, labels, picture_format, fingerprint)


def _fingerprint(root: Path, listed: list[tuple[Path, int]], options: Any) -> str:
    digest = hashlib.sha256(repr(options).encode())
    for path, label in listed:
        name = os.fsencode(path.relative_to(root).as_posix())
        with complaints(path):
            size = path.stat().st_size
        digest.update(b"%s\0%d\0%d\n" % (name, size, label))
    return digest.hexdigest()


def _check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise ValueError(
            f"`channels` must be 1 or 3, got {channels}; 3 is RGB, 1 is gray."
        )


def _check_size(image_size: Any) -> tuple[int, int] | None:
    if image_size is None:
        return None
    size = (image_size, image_size) if np.ndim(image_size) == 0 else tuple(image_size)
    if len(size) != 2 or not all(_is_count(side) for side in size):
        raise ValueError(
            "`image_size` must be a positive int or a pair of them, height and width, "
            f"got {image_size}; 224 is a usual choice."
        )
    return int(size[0]), int(size[1])


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 1
