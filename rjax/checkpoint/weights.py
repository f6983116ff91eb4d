"""Weights on their own, as files that other programs read.

A file holds Flax's variables: "params/conv1/kernel", "batch_stats/bn1/mean".
"""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.checkpoint.arrays import nested
from rjax.checkpoint.errors import CheckpointError
from rjax.checkpoint.restoring import Read, read_newest
from rjax.files import write_atomically
from rjax.parallel import gather
from rjax.plan import Plan
from rjax.state import RegionState
from rjax.trees import flatten
from rjax.weights import Which, check_which, get_batch_stats, get_params

_SUFFIXES = (".npz", ".safetensors")
_DIGEST = "rjax.sha256"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


def export_weights(
    path: str | os.PathLike[str],
    plan: Plan,
    state: RegionState,
    which: Which = "master",
) -> None:
    """Write weights and running statistics to a file, whole or not at all.

    Args:
        path: ends in ".npz", which NumPy reads, or ".safetensors"
            (``pip install "rjax[safetensors]"``).
        plan: the static layout.
        state: the training state; over several processes all call this, and the first
            one writes.
        which: "master" or "ema" (float32), "compute" or "ema_compute" (kernels in
            compute precision). The averages come with the averaged statistics.

    Raises:
        ValueError: for another ending, an unknown name, or an average where the plan
            keeps none.
        NotImplementedError: for bfloat16 in ".npz", which NumPy does not know.
        OSError: if it cannot be written.

    Example:
        >>> import os, tempfile, jax.numpy as jnp, rjax
        >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
        >>> export_weights(path, plan, rjax.init_state(plan, params))
        >>> load_weights(path)["params"]["dense"]["kernel"].shape
        (3, 2)
    """
    path = Path(path)
    _check_suffix(path)
    check_which(plan, which)
    if any(not x.is_fully_addressable for x in jax.tree.leaves(state)):
        state = gather(plan, state)
    of = "ema" if which.startswith("ema") else "current"
    variables = {
        "params": get_params(plan, state, which),
        "batch_stats": get_batch_stats(plan, state, of),
    }
    named = {name: np.asarray(leaf) for name, leaf in flatten(variables)[0]}
    if jax.process_index() == 0:
        packed = _npz if path.suffix == ".npz" else _safetensors
        write_atomically(path, packed(named))


def load_weights(
    path: str | os.PathLike[str], which: Which = "master", *, step: int | None = None
) -> dict[str, Any]:
    """Load weights and running statistics as Flax's variables: nested dictionaries.

    Args:
        path: a file of :func:`export_weights`, or a folder of checkpoints (or that of
            one), of any configuration.
        which: as for `export_weights`, of a checkpoint; a file holds one kind.
        step: which checkpoint, the newest whole one if not given.

    Returns:
        ``{"params": {...}, "batch_stats": {...}}`` with NumPy arrays; for
        ``model.apply(variables, x)`` or ``rjax.replace_params(plan, state,
        variables["params"])``.

    Raises:
        CheckpointError: for what is not there, is damaged or holds something else.
        ValueError: for an ending or a name that is not known.

    Example:
        >>> import tempfile, jax.numpy as jnp, rjax
        >>> params, folder = {"w": jnp.ones((3, 2))}, tempfile.mkdtemp()
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> rjax.checkpoint.save(folder, plan, rjax.init_state(plan, params))
        >>> load_weights(folder)["params"]["w"].dtype
        dtype('float32')
    """
    path = Path(path)
    if path.is_dir():
        return _of_checkpoint(read_newest(path, step=step)[0], which)
    _check_suffix(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    unpacked = _from_npz if path.suffix == ".npz" else _from_safetensors
    named = unpacked(path, data)
    kinds = {name.partition("/")[0] for name in named}
    if "params" not in kinds or kinds - {"params", "batch_stats"}:
        raise CheckpointError(
            f"{path} holds no weights of rjax: names are to begin with params/ or "
            "batch_stats/."
        )
    return {"params": {}, "batch_stats": {}, **nested(named)}


def _check_suffix(path: Path) -> None:
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"`path` must end in {' or '.join(_SUFFIXES)}, got {str(path)!r}."
        )


def _npz(named: Mapping[str, np.ndarray]) -> memoryview:
    if any(x.dtype == jnp.bfloat16 for x in named.values()):
        raise NotImplementedError(
            "NumPy does not know bfloat16: write .safetensors, or which='master'."
        )
    buffer = io.BytesIO()
    np.savez(buffer, **named)  # pyright: ignore[reportArgumentType]
    return buffer.getbuffer()


def _from_npz(path: Path, data: bytes) -> dict[str, np.ndarray]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return dict(found)
    except Exception as error:  # an archive can be wrong in a dozen ways
        raise _damaged(path) from error


def _safetensors(named: Mapping[str, np.ndarray]) -> bytes:
    whole = {name: np.ascontiguousarray(x) for name, x in named.items()}
    return find_safetensors().save(whole, {_DIGEST: _sha256_of(whole)})


def _from_safetensors(path: Path, data: bytes) -> dict[str, np.ndarray]:
    find_safetensors()
    import safetensors

    try:
        found = {
            name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(
                entry["shape"]
            )
            for name, entry in safetensors.deserialize(data)
        }
        with safetensors.safe_open(path, "np") as header:
            metadata = header.metadata() or {}
    except Exception as error:
        raise _damaged(path) from error
    # Files of other programs have no digest.
    digest = metadata.get(_DIGEST)
    if digest is not None and digest != _sha256_of(found):
        raise _damaged(path)
    return found


def find_safetensors() -> Any:
    """Return the library's module for NumPy.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            'This needs safetensors: run pip install "rjax[safetensors]".'
        ) from error
    return safetensors.numpy


def _sha256_of(named: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(named):
        x = named[name]
        digest.update(f"{name} {x.dtype} {x.shape}\n".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or holds other data: export it again.")


def _of_checkpoint(read: Read, which: Which) -> dict[str, Any]:
    """Return the weights of a checkpoint, without any plan."""
    plan, arrays = read.content["plan"], read.arrays
    wide = "ema" if which.startswith("ema") else "master"
    half = which if which in ("compute", "ema_compute") else ""
    if which not in (wide, half) or wide not in arrays:
        raise ValueError(
            f"`which` must be a kind of weights that {read.path} holds, got {which!r}."
        )
    params = {}
    for slot in plan["slots"]:
        arena, start = arrays[wide], slot["offset"]
        if slot["half"] and half in arrays:
            arena, start = arrays[half], start - plan["bias_like"]
        size = int(np.prod(slot["shape"], dtype=np.int64))
        params[slot["path"]] = arena[start : start + size].reshape(slot["shape"])
    for leaf in plan["frozen"]:
        x = arrays[f"frozen/{leaf['path']}"]
        params[leaf["path"]] = x if half else x.astype(np.float32)
    prefix = "ema_batch_stats/" if wide == "ema" else "batch_stats/"
    stats = {
        name.removeprefix(prefix): x
        for name, x in arrays.items()
        if name.startswith(prefix)
    }
    return {"params": nested(params), "batch_stats": nested(stats)}
