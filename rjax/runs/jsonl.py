"""Files of JSON lines that are whole at any moment."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rjax.files import AppendOnly
from rjax.plain import dumps


class JsonLines:
    """Appends rows, one line each, straight to the file.

    Args:
        path: a new file, unless `keep` is given.
        keep: how many bytes of an old file stay; see :func:`whole_lines`.
    """

    def __init__(self, path: Path, keep: int | None = None) -> None:
        self._file = AppendOnly(path, keep)

    def write(self, *rows: Any) -> None:
        """Append `rows`; where they do not fit, leave the lines before them.

        Raises:
            OSError: as the file system says.
        """
        self._file.append("".join(dumps(row) + "\n" for row in rows).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row of a file, and where its line ends, up to the first damage.

    A file that is not there has none.
    """
    end = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if not isinstance(row, dict):
                return
            end += len(line)
            yield row, end
