"""The folder of a run: claimed once, never shared with what lay there before."""

import itertools
from pathlib import Path

from rjax.runs.errors import UsageError


def claim_folder(out: str | None, name: str) -> Path:
    """Make the folder of a run and return it.

    Args:
        out: where the caller wants it, new or empty; `None` takes the first free one
            of `runs/NAME-1`, `runs/NAME-2`, ….
        name: what the run is called in that case.

    Raises:
        UsageError: if the folder holds something, or cannot be made or written to.
    """
    folder = Path("runs") if out is None else Path(out)
    try:
        if out is None:
            return _next_free(folder, name)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(
                f"--out {folder} is not empty: choose another folder or remove it"
            )
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot make a run in {folder} ({error.strerror}): "
            "give --out a folder that can be written to"
        ) from error
    return folder


def _next_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{name}-{number}"
        try:
            # Making it is the claim: two runs at once cannot both succeed.
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: itertools.count never ends")
