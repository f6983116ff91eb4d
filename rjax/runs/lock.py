"""Only one process at a time writes the folder of a run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rjax.runs.errors import UsageError

NAME = ".lock"


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder of a run; however the process ends, the system lets go of it.

    Where the system has no such locks nothing is held. A folder in which nothing else
    was left is empty afterwards.

    Raises:
        UsageError: if another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{folder} is being written by another process: wait for its end"
            ) from None
        except OSError:  # a network disk without locks, say
            pass
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [NAME]:
                (folder / NAME).unlink()
