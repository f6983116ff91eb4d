"""CIFAR-10 and CIFAR-100, from the archives on their page or from what is in them."""

import os
from typing import Literal

from rjax.data.archive import Place, open_archive, open_folder
from rjax.data.cifar_files import Kind, Layout, class_names, load_side
from rjax.data.dataset import Dataset
from rjax.data.errors import DataError
from rjax.data.files import Folder

_TEN = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


def load_cifar10(folder: str | os.PathLike[str]) -> Dataset:
    """Load CIFAR-10: photographs of ten kinds of things, 50000 and 10000 of them.

    The folder has one of the following; of several, the first in this order is read:

    - the files themselves, `data_batch_1.bin` … or `data_batch_1` …;
    - the folder `cifar-10-batches-bin` or `cifar-10-batches-py`;
    - the archive `cifar-10-binary.tar.gz` or `cifar-10-python.tar.gz`, or the same
      without `.gz`, which is read without unpacking it to disk.

    What a `SHA256SUMS` in the folder lists is verified; pickles can run no code;
    nothing is downloaded.

    Args:
      folder: where the files are.

    Returns:
      A `Dataset`: images float32 `[n, 32, 32, 3]` in [0, 1], red first, and labels
      int32 `[n]`. Names of the classes are from `batches.meta` where that is there.

    Raises:
      DataError: a file is missing, damaged, does not fit the others, or is a pickle
        that asks for more than arrays.

    Example:
      >>> load_cifar10("no/such/folder")
      Traceback (most recent call last):
      ...
      rjax.data.errors.DataError: no/such/folder does not exist; give the folder ...
    """
    binary = Layout(
        train=tuple(f"{name}.bin" for name in _BATCHES),
        test=("test_batch.bin",),
        meta="batches.meta.txt",
        archive="cifar-10-binary",
        folder="cifar-10-batches-bin",
        label_bytes=1,
    )
    pickled = Layout(
        train=_BATCHES,
        test=("test_batch",),
        meta="batches.meta",
        archive="cifar-10-python",
        folder="cifar-10-batches-py",
    )
    kind = Kind("cifar10", 10, "labels", "label_names", 0, _TEN)
    return _load(folder, (binary, pickled), kind)


def load_cifar100(
    folder: str | os.PathLike[str], labels: Literal["fine", "coarse"] = "fine"
) -> Dataset:
    """Load CIFAR-100: photographs of a hundred kinds of things in twenty groups.

    The folder has one of the following; of several, the first in this order is read:

    - the files themselves, `train.bin` … or `train` …;
    - the folder `cifar-100-binary` or `cifar-100-python`;
    - the archive `cifar-100-binary.tar.gz` or `cifar-100-python.tar.gz`, or the same
      without `.gz`.

    Args:
      folder: where the files are.
      labels: `"fine"` for the 100 classes, `"coarse"` for the 20 groups.

    Returns:
      A `Dataset` as from `load_cifar10`. Names of the classes are from `meta` or
      `fine_label_names.txt` and `coarse_label_names.txt`, and `None` without them.

    Raises:
      DataError: as `load_cifar10`.
      ValueError: `labels` is neither.

    Example:
      >>> load_cifar100("no/such/folder", labels="coarse")
      Traceback (most recent call last):
      ...
      rjax.data.errors.DataError: no/such/folder does not exist; give the folder ...
    """
    if labels not in ("fine", "coarse"):
        raise ValueError(
            f'`labels` must be "fine" or "coarse", got {labels!r}; "fine" has the 100 '
            "classes."
        )
    binary = Layout(
        train=("train.bin",),
        test=("test.bin",),
        meta=f"{labels}_label_names.txt",
        archive="cifar-100-binary",
        folder="cifar-100-binary",
        label_bytes=2,
    )
    pickled = Layout(
        train=("train",),
        test=("test",),
        meta="meta",
        archive="cifar-100-python",
        folder="cifar-100-python",
    )
    fine = labels == "fine"
    kind = Kind(
        name="cifar100" if fine else "cifar100-coarse",
        num_classes=100 if fine else 20,
        labels_key=f"{labels}_labels",
        names_key=f"{labels}_label_names",
        label_byte=1 if fine else 0,  # the coarse one comes first
        class_names=None,
    )
    return _load(folder, (binary, pickled), kind)


def _load(
    folder: str | os.PathLike[str], layouts: tuple[Layout, ...], kind: Kind
) -> Dataset:
    place, layout = _find(Folder(folder), layouts)
    train = load_side(place, layout, layout.train, kind)
    test = load_side(place, layout, layout.test, kind)
    names = kind.class_names
    if layout.meta in place.names:
        names = class_names(place, layout, kind)
    return Dataset(kind.name, train, test, kind.num_classes, names)


def _find(files: Folder, layouts: tuple[Layout, ...]) -> tuple[Place, Layout]:
    for layout in layouts:
        place = open_folder(files, ".", layout.names)
        if place and place.names != {layout.meta}:  # which alone is no data set
            return place, layout
    for layout in layouts:
        if place := open_folder(files, layout.folder, layout.names):
            return place, layout
    for layout in layouts:
        for suffix in (".tar.gz", ".tar"):
            archive = layout.archive + suffix
            if place := open_archive(files, archive, layout.folder):
                return place, layout
    looked = [
        *(f"{layout.archive}.tar.gz" for layout in layouts),
        *(f"{layout.archive}.tar" for layout in layouts),
        *(f"{layout.folder}/" for layout in layouts),
        *(layout.train[0] for layout in layouts),
    ]
    raise DataError(
        f"{files.path} has none of {', '.join(looked)}; download one of the archives, "
        "or give the folder that it lies in."
    )
