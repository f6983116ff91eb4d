"""Files that grow by whole rows and are whole at any moment."""

from pathlib import Path


class AppendOnly:
    """A file that takes bytes at its end, all of them or none.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: what was written is there, and closing has nothing left to fail.
        self._file = path.open("xb", buffering=0)

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
