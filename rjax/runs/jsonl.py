"""Files of JSON lines that are whole at any moment."""

from pathlib import Path
from typing import Any

from rjax.files import AppendOnly
from rjax.plain import dumps


class JsonLines:
    """Appends rows, one line each, straight to the file.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendOnly(path)

    def write(self, *rows: Any) -> None:
        """Append `rows`; where they do not fit, leave the lines before them.

        Raises:
            OSError: as the file system says.
        """
        self._file.append("".join(dumps(row) + "\n" for row in rows).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
