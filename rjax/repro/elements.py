"""Single elements and whole regions of two snapshots."""

import math

import numpy as np

from rjax.digests import Tensor
from rjax.repro.bits import Bits, decode, is_float
from rjax.repro.comparison import Distance, Element
from rjax.repro.errors import RecordError
from rjax.repro.opened import Opened
from rjax.repro.snapshots import load_tensor

# Elements that are looked at in float64 at a time.
_BLOCK = 1 << 20


def first_element(a: Opened, b: Opened, step: int, tensor: Tensor) -> Element | None:
    """Return the first element of a tensor that differs between two snapshots.

    Args:
        a: first record.
        b: second record.
        step: after how many steps both have a snapshot.
        tensor: of both.

    Returns:
        `None` if the two snapshots hold equal bits.

    Raises:
        RecordError: if a snapshot cannot be read.
    """
    left, right = (_bits(record, step, tensor) for record in (a, b))
    at = np.flatnonzero(left != right)
    if not len(at):
        return None
    flat = int(at[0])
    dtype = "uint32" if _is_key(tensor) else tensor.dtype
    one, other = (Bits(int(x[flat]), dtype) for x in (left, right))
    size = math.prod(tensor.shape)
    # The words of a random key are one more axis.
    shape = tensor.shape if size == len(left) else (*tensor.shape, len(left) // size)
    index = tuple(int(i) for i in np.unravel_index(flat, shape))
    return Element(flat, index, one, other, len(at), len(left))


def distances(a: Opened, b: Opened, step: int) -> tuple[Distance, ...]:
    """Return how far the regions lie apart in two snapshots, one tensor at a time.

    Only floating tensors of one shape that both have are looked at; their dtypes may
    differ. Norms are float64.

    Raises:
        RecordError: if a snapshot cannot be read.
    """
    others = {tensor.name: tensor for tensor in b.layout.tensors}
    worst: dict[str, Distance] = {}
    for tensor in a.layout.tensors:
        other = others.get(tensor.name)
        if other is None or other.shape != tensor.shape:
            continue
        if not (_is_float(tensor) and _is_float(other)):
            continue
        left, right = _bits(a, step, tensor), _bits(b, step, other)
        far = _relative(left, tensor.dtype, right, other.dtype)
        region = tensor.region or tensor.field
        if region not in worst or far > worst[region].relative:
            worst[region] = Distance(region, tensor.name, far)
    return tuple(worst.values())


def _relative(a: np.ndarray, kind: str, b: np.ndarray, other: str) -> float:
    """Return ||a - b|| / ||a||: 0 between equal numbers, infinite beside no number."""
    norm = apart = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, len(a), _BLOCK):
            block = slice(start, start + _BLOCK)
            x = decode(a[block], kind).astype(np.float64)
            y = decode(b[block], other).astype(np.float64)
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            apart += float(np.sum(np.where(same, 0.0, x - y) ** 2))
            norm += float(np.sum(x**2, where=np.isfinite(x)))
    if apart == 0:
        return 0.0
    return math.sqrt(apart / norm) if math.isfinite(apart) and norm else math.inf


def _bits(record: Opened, step: int, tensor: Tensor) -> np.ndarray:
    """Return a tensor of a snapshot as unsigned integers."""
    path = record.snapshot(step)
    found, key = load_tensor(path, tensor.name), _is_key(tensor)
    size, itemsize = math.prod(tensor.shape), found.dtype.itemsize
    fits = len(found) % size == 0 if key and size else found.shape == (size,)
    if not fits or itemsize != (4 if key else np.dtype(tensor.dtype).itemsize):
        raise RecordError(
            f"{path} holds another tensor {tensor.name!r} than its record says; "
            "record the run again."
        )
    return found.view(f"u{itemsize}")


def _is_key(tensor: Tensor) -> bool:
    return tensor.dtype.startswith("key<")


def _is_float(tensor: Tensor) -> bool:
    return not _is_key(tensor) and is_float(tensor.dtype)
