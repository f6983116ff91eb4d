"""Snapshots: every tensor of a state on disk, to look at single elements."""

import io
import zipfile
from pathlib import Path

import numpy as np

from rjax.digests import tensors, values
from rjax.files import write_atomically
from rjax.plan import Plan
from rjax.repro.errors import RecordError
from rjax.state import RegionState


def save_snapshot(path: Path, plan: Plan, state: RegionState) -> None:
    """Write a state to `path`, whole or not at all; this waits for the device.

    An `.npz` file with one flat array a tensor, by the tensor's name; bfloat16 and
    random keys as their bits.

    Raises:
        OSError: if it cannot be written.
    """
    names = [tensor.name for tensor in tensors(plan, state)]
    arrays = dict(zip(names, values(plan, state), strict=True))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, buffer.getbuffer())


def load_tensor(path: Path, name: str) -> np.ndarray:
    """Return one tensor of a snapshot, flat.

    Raises:
        RecordError: if the snapshot is not there, damaged, or lacks the tensor.
    """
    try:
        # Opened here: NumPy leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            return found[name]
    except FileNotFoundError:
        raise RecordError(f"{path} is not there.") from None
    except KeyError:
        raise RecordError(f"{path} holds no tensor {name!r}.") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.error):
        raise RecordError(f"{path} is damaged; record the run again.") from None
