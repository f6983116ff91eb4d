"""How checkpoints lie on disk.

A folder of checkpoints has a folder for each, named by the number of its step::

    checkpoints.json       says that the folder is one of rjax's
    300/state/             the arrays, as Orbax writes them
    300/rjax.json          written last: what the checkpoint is of, and the SHA-256 of
                           every other file; without it there is no checkpoint

Orbax itself finds damage to its own indices but not to the numbers, so every byte is
verified before Orbax is given any.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rjax.checkpoint.errors import CheckpointError, DamagedError
from rjax.files import write_atomically
from rjax.plain import dumps

FORMAT = 1
MARKER, SEAL, STATE = "checkpoints.json", "rjax.json", "state"
_CHUNK = 1 << 24


def claim(folder: Path) -> None:
    """Make a folder one of checkpoints, unless it is.

    Raises:
        CheckpointError: if other things lie there.
        OSError: if it cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give a folder of its own.")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MARKER).exists():
        return
    if others := sorted(x.name for x in folder.iterdir() if not x.name.startswith(".")):
        raise CheckpointError(
            f"{folder} holds {others[0]} and no checkpoints of rjax: give a folder of "
            "its own."
        )
    text = dumps({"format": FORMAT, "about": "a folder of rjax.checkpoint"})
    write_atomically(folder / MARKER, text + "\n")


def located(path: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints, and the step if `path` is that of one.

    Raises:
        CheckpointError: if it is neither.
    """
    if (path / MARKER).exists():
        return path, None
    if path.name.isdecimal() and (path.parent / MARKER).exists():
        return path.parent, int(path.name)
    what = "is not there" if not path.exists() else "holds no checkpoints of rjax"
    raise CheckpointError(
        f"{path} {what}: give a folder that rjax.checkpoint.save or rjax train has "
        "written."
    )


def steps_in(folder: Path) -> list[int]:
    """Return the steps of which there is something, in order; it may not be whole."""
    found = [x.name for x in folder.iterdir() if x.name.isdecimal() and x.is_dir()]
    # Orbax writes numbers without leading zeros.
    return sorted(int(name) for name in found if name == str(int(name)))


def seal(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Finish a checkpoint: describe it, with the digests of all its files.

    Args:
        checkpoint: its folder.
        content: plain data.
    """
    files = {name: _described(checkpoint / name) for name in _files(checkpoint)}
    body = json.loads(dumps({**content, "files": files}))
    digest = _sha256_of(FORMAT, body)
    sealed = {"format": FORMAT, "sha256": digest, "content": body}
    write_atomically(checkpoint / SEAL, dumps(sealed, indent=1) + "\n")


def read_seal(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself.

    Raises:
        DamagedError: if that is damaged, or was never written.
        CheckpointError: if it is of another format.
    """
    path = checkpoint / SEAL
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(
            f"{checkpoint} was not written to its end: restore another step."
        ) from None
    except (OSError, ValueError, RecursionError):
        raise _damaged(checkpoint, path.name) from None
    if not isinstance(found, dict) or found.keys() < {"format", "sha256", "content"}:
        raise _damaged(checkpoint, path.name)
    # Later formats are to be sealed like this, too.
    if found["sha256"] != _sha256_of(found["format"], found["content"]):
        raise _damaged(checkpoint, path.name)
    if found["format"] != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has format {found['format']}, this version of rjax reads "
            f"{FORMAT}: restore it with the version that wrote it."
        )
    return found["content"]


def read_seal_if_whole(checkpoint: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says of itself, `None` where :func:`read_seal` cannot.

    Raises:
        CheckpointError: if it is of another format.
    """
    try:
        return read_seal(checkpoint)
    except DamagedError:
        return None


def verify(checkpoint: Path, content: Mapping[str, Any]) -> None:
    """Hold every file of a checkpoint against its digest.

    Args:
        checkpoint: its folder.
        content: from :func:`read_seal`.

    Raises:
        DamagedError: naming the first file that is not as it was written.
    """
    for name, (size, digest) in content["files"].items():
        path = checkpoint / name
        try:
            whole = path.stat().st_size == size and _described(path)[1] == digest
        except OSError:
            whole = False
        if not whole:
            raise _damaged(checkpoint, name)


def _damaged(checkpoint: Path, name: str) -> DamagedError:
    return DamagedError(
        f"{checkpoint} is damaged: {name} is not as it was written; restore another "
        "step."
    )


def _files(checkpoint: Path) -> Iterator[str]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name.lstrip(".") not in (SEAL, f"{SEAL}.partial"):
            yield path.relative_to(checkpoint).as_posix()


def _described(path: Path) -> tuple[int, str]:
    """Return the size of a file and the digest of its bytes."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _sha256_of(version: Any, body: Any) -> str:
    text = json.dumps([version, body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
