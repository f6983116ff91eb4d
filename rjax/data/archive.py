"""Where the files of a data set are: in a folder, a folder below, or a tar archive."""

import dataclasses
import io
import os
import posixpath
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rjax.data.errors import DataError
from rjax.data.files import Folder, gunzip


@dataclasses.dataclass(frozen=True)
class Place:
    """Some place that has files by name.

    Attributes:
      where: the folder or archive, for messages.
      names: of the files there.
      read: from a name to the verified bytes of the file.
    """

    where: str
    names: frozenset[str]
    read: Callable[[str], bytes]

    def content(self, name: str) -> tuple[bytes, str]:
        """Return the bytes of a file, and its path for messages.

        Raises:
          DataError: it is not there, or cannot be read.
        """
        if name not in self.names:
            raise DataError(
                f"{self.where} has no file {name}; download or unpack it again."
            )
        return self.read(name), f"{self.where}/{name}"


def open_folder(files: Folder, folder: str, names: Sequence[str]) -> Place | None:
    """Return a folder below `files` as a place, if it has any of the files `names`."""
    path = files.path / folder
    found = frozenset(name for name in names if os.path.isfile(path / name))
    if not found:
        return None
    return Place(str(path), found, lambda name: files.read(path / name))


def open_archive(files: Folder, archive: str, folder: str) -> Place | None:
    """Return `folder` within a tar archive as a place, if the archive is there.

    Nothing is unpacked to disk. The format is that of POSIX `tar`, plain or in gzip.

    Raises:
      DataError: the archive is damaged, or lacks the folder.
    """
    path = files.path / archive
    if not os.path.isfile(path):
        return None
    content = files.read(path)
    if path.suffix == ".gz":
        content = gunzip(content, path)
    members = _members(content, path)
    inside = {
        posixpath.basename(name): member
        for name, member in members.items()
        if posixpath.dirname(name) == folder
    }
    if not inside:
        raise DataError(
            f"{path} has no folder {folder} inside; check that it is the archive that "
            "its name says."
        )
    return Place(f"{path}/{folder}", frozenset(inside), inside.__getitem__)


def _members(content: bytes, path: Path) -> dict[str, bytes]:
    members = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for info in archive:
                # Links are followed by none of this: what they name may be anywhere.
                if info.isreg() and (file := archive.extractfile(info)) is not None:
                    members[posixpath.normpath(info.name)] = file.read()
    except Exception as error:  # a damaged header leads to more than `TarError`
        raise DataError(
            f"{path} is truncated or no tar archive; download it again."
        ) from error
    return members
