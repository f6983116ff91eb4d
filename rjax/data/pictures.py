"""Pictures decoded by Pillow, as a source with random access for grain."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rjax.data.arrays import to_float
from rjax.data.errors import DataError
from rjax.data.files import Folder


class Format(NamedTuple):
    """What every decoded picture is like.

    Attributes:
      size: height and width.
      resize: whether to resize and crop to `size`, or to refuse other sizes.
      channels: 3 for RGB, 1 for gray.
    """

    size: tuple[int, int]
    resize: bool
    channels: int


class Pictures:
    """Random access to `(image, label)` pairs; safe to read from several threads.

    Args:
      files: reads and verifies the files.
      paths: of the pictures.
      labels: int32 `[n]`.
      picture_format: what to make of them.
      fingerprint: of all these, for `Dataset.fingerprint`.
    """

    def __init__(
        self,
        files: Folder,
        paths: Sequence[Path],
        labels: np.ndarray,
        picture_format: Format,
        fingerprint: str,
    ) -> None:
        self.fingerprint = fingerprint
        self._files = files
        self._paths = paths
        self._labels = labels
        self._format = picture_format

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        path = self._paths[index]
        with _opened(self._files, path) as picture:
            pixels = np.asarray(_fit(picture, path, self._format), np.uint8)
        image = pixels.reshape(*self._format.size, self._format.channels)
        return to_float(image), np.int32(self._labels[index])


def picture_size(files: Folder, path: Path) -> tuple[int, int]:
    """Return height and width of a picture, turned as its EXIF orientation says."""
    with _opened(files, path) as picture:
        return picture.height, picture.width


@contextmanager
def _opened(files: Folder, path: Path) -> Iterator[Any]:
    """Yield a picture, upright; turn whatever a decoder raises into `DataError`."""
    image_module, operations = import_pillow()
    content = files.read(path)
    try:
        with image_module.open(io.BytesIO(content)) as picture:
            operations.exif_transpose(picture, in_place=True)
            yield picture
    except DataError:
        raise
    except Exception as error:  # decoders raise whatever a damaged file leads to
        raise DataError(
            f"{path} cannot be decoded as a picture; replace or remove it."
        ) from error


def _fit(picture: Any, path: Path, wanted: Format) -> Any:
    if picture.mode in ("I", "F") or picture.mode.startswith("I;"):
        raise DataError(
            f"{path} has pixels of more than 8 bits (mode {picture.mode}), which would "
            "lose their range; convert it to 8 bits."
        )
    height, width = wanted.size
    if not wanted.resize and picture.size != (width, height):
        raise DataError(
            f"{path} is {picture.height}x{picture.width} (height x width), and the "
            f"first picture is {height}x{width}; give an image size to resize them to."
        )
    if picture.mode == "P":  # its transparency may be of a kind that only RGBA has
        picture = picture.convert("RGBA")
    picture = picture.convert("RGB" if wanted.channels == 3 else "L")
    if picture.size == (width, height):
        return picture
    scale = max(height / picture.height, width / picture.width)
    covering = (
        max(width, round(picture.width * scale)),
        max(height, round(picture.height * scale)),
    )
    image_module, _ = import_pillow()
    picture = picture.resize(covering, image_module.Resampling.BILINEAR)
    left, top = (covering[0] - width) // 2, (covering[1] - height) // 2
    return picture.crop((left, top, left + width, top + height))


def import_pillow() -> tuple[Any, Any]:
    """Import Pillow's `Image` and `ImageOps`, or say which extra brings them."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(
            "`load_image_folder` needs Pillow, which is not installed; "
            'run `pip install "rjax[data]"`.'
        ) from error
    return Image, ImageOps
