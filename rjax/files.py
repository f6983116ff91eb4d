"""Files that are whole at any moment: replaced in one go, or grown by whole rows."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace `path` by `content`, so that a reader never sees a part of it.

    Raises:
        OSError: as the file system says; what lay there before stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    data = content.encode() if isinstance(content, str) else content
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class AppendOnly:
    """A file that takes bytes at its end, all of them or none.

    Args:
        path: a new file, unless `keep` is given.
        keep: how many bytes of an old file stay, to go on after them.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        # Unbuffered: what was written is there, and closing has nothing left to fail.
        self._file = path.open("xb" if keep is None else "r+b", buffering=0)
        if keep is not None:
            self._file.truncate(keep)
            self._file.seek(keep)

    def append(self, data: bytes) -> None:
        """Append `data`; where it does not fit, leave what lay before it.

        Raises:
            OSError: as the file system says.
        """
        start, left = self._file.tell(), memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()
