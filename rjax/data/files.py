"""Files of a folder that the caller named: read whole, verified, uncompressed."""

import gzip
import hashlib
import os
import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rjax.data.errors import DataError

_SUMS = "SHA256SUMS"
_SUMS_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


class Folder:
    """A folder whose files are verified before anything looks into them.

    A file named `SHA256SUMS`, as `sha256sum` writes it, may lie in the folder or in a
    folder below: every file that it lists, by its path relative to that `SHA256SUMS`,
    is compared with it whenever it is read.

    Args:
      path: of the folder, as the caller gave it.

    Raises:
      DataError: there is no such folder, or its `SHA256SUMS` cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # Of os.path, because these say no where pathlib raises PermissionError.
        if not os.path.exists(self.path):
            raise DataError(f"{path} does not exist; give the folder with the data.")
        if not os.path.isdir(self.path):
            raise DataError(f"{path} is no folder; give the folder that it lies in.")
        self._sums: dict[Path, dict[str, str]] = {}
        self._sums_of(self.path)

    def find(self, names: Iterable[str]) -> Path:
        """Return the first of `names` that is a file here.

        Raises:
          DataError: none of them is.
        """
        names = tuple(names)
        for name in names:
            if os.path.isfile(self.path / name):
                return self.path / name
        raise DataError(
            f"{self.path} has none of {', '.join(names)}; download the file, or give "
            "the folder that it lies in."
        )

    def read(self, path: Path) -> bytes:
        """Return the verified bytes of a file below this folder, as they are on disk.

        Raises:
          DataError: it cannot be read, or differs from what a `SHA256SUMS` says.
        """
        content = _read(path)
        for folder in path.parents:
            sums = self._sums_of(folder)
            want = sums and sums.get(path.relative_to(folder).as_posix())
            if want and hashlib.sha256(content).hexdigest() != want:
                raise DataError(
                    f"{path} does not have the sha256 that {folder / _SUMS} lists; "
                    "download it again."
                )
            if folder == self.path:
                break
        return content

    def _sums_of(self, folder: Path) -> dict[str, str]:
        if folder not in self._sums:
            path = folder / _SUMS
            self._sums[folder] = _parse_sums(path) if os.path.isfile(path) else {}
        return self._sums[folder]


def gunzip(content: bytes, path: Path) -> bytes:
    """Return what a gzip file holds; reading to its end verifies its CRC.

    The format is that of RFC 1952.

    Args:
      content: bytes of the file.
      path: of the file, for messages.

    Raises:
      DataError: it is no gzip file, is truncated, or does not match its checksum.
    """
    if content[:2] != b"\x1f\x8b":
        raise DataError(
            f"{path} is no gzip file, it begins with {_show(content[:2])} instead of "
            "0x1f8b; download it again."
        )
    try:
        return gzip.decompress(content)
    except EOFError as error:
        raise DataError(
            f"{path} is truncated, its gzip stream ends after {len(content)} bytes of "
            "the file; download it again."
        ) from error
    except (OSError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged, its gzip stream or its CRC is wrong; download it "
            "again."
        ) from error


@contextmanager
def complaints(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a path into `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read, {error.strerror or error}; check that it exists "
            "and that you may read it."
        ) from error


def _read(path: Path) -> bytes:
    with complaints(path):
        return path.read_bytes()


def _parse_sums(path: Path) -> dict[str, str]:
    sums = {}
    text = _read(path).decode("utf-8", "surrogateescape")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if (match := _SUMS_LINE.fullmatch(line)) is None:
            raise DataError(
                f"{path} is not as `sha256sum` writes it in line {number}; write it "
                "again, or delete it."
            )
        sums[posixpath.normpath(match[2])] = match[1].lower()
    return sums


def _show(content: bytes) -> str:
    return f"0x{content.hex()}" if content else "nothing"
