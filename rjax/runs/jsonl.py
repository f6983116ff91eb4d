"""Files of JSON lines that are whole at any moment."""

from pathlib import Path
from typing import Any

from rjax.runs.manifest import dumps


class JsonLines:
    """Appends rows, one line each, straight to the file.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: what was written is there, and closing has nothing left to fail.
        self._file = path.open("xb", buffering=0)

    def write(self, *rows: Any) -> None:
        """Append `rows`; where they do not fit, leave the lines before them.

        Raises:
            OSError: as the file system says.
        """
        start = self._file.tell()
        left = "".join(dumps(row) + "\n" for row in rows).encode()
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
