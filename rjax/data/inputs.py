"""What the batches of one input have in common, as regions, and their copies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.data.errors import DataError
from rjax.regions import REGIONS, Region
from rjax.table import Row
from rjax.trees import flatten

# XLA's CPU backend takes memory of this alignment over as it is, without a copy.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Signature:
    """Structure, shapes and dtypes of a batch: what a compiled step depends on.

    Attributes:
      treedef: the structure of the pytree.
      leaves: path and abstract value of each leaf, dtypes as JAX has them.
    """

    treedef: Any
    leaves: tuple[tuple[str, Any], ...]

    def rows(self) -> tuple[Row, ...]:
        """Return regions 050 to 053: label and data of A, label and data of B.

        Integer leaves with one axis, a number for each example, are labels; all others
        are data. A leaf that is sharded or replicated counts once.
        """
        labels = [leaf for _, leaf in self.leaves if _is_label(leaf)]
        data = [leaf for _, leaf in self.leaves if not _is_label(leaf)]
        return (
            _row(Region.I_A_LABEL, labels),
            _row(Region.I_A_DATA, data),
            _row(Region.I_B_LABEL, labels),
            _row(Region.I_B_DATA, data),
        )

    def difference(self, other: "Signature") -> str | None:
        """Return the first leaf that `other` has otherwise, in words, if any."""
        if other.treedef != self.treedef:
            return f"is a {other.treedef}, the first one a {self.treedef}"
        pairs = zip(self.leaves, other.leaves, strict=True)
        for (path, ours), (_, theirs) in pairs:
            if ours != theirs:
                return f"has {_told(theirs)}{_at(path)}, the first one {_told(ours)}"
        return None


def signature_of(batch: Any, number: int) -> Signature:
    """Return the signature of a batch on the host.

    Args:
      batch: a pytree of NumPy arrays or numbers.
      number: which one it is, for messages.

    Raises:
      DataError: a leaf is on a device already, or is nothing that JAX computes with.
    """
    found, treedef = flatten(batch)
    for path, leaf in found:
        if isinstance(leaf, jax.Array):
            raise DataError(
                f"batch {number} has a jax.Array{_at(path)}: give NumPy arrays, or "
                "pass what lies on a device already to the step as it is."
            )
    return Signature(
        treedef, tuple((path, _abstract(path, leaf, number)) for path, leaf in found)
    )


def owned(batch: Any) -> Any:
    """Return a batch whose arrays are copies that no one else can write to.

    They are aligned, so that a CPU device keeps them in place of a copy of its own.

    Args:
      batch: a pytree of NumPy arrays or numbers.

    Returns:
      The same pytree, with the same bits.
    """
    return jax.tree.map(_owned, batch)


def _owned(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    room = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


def _abstract(path: str, leaf: Any, number: int) -> Any:
    try:
        return jax.typeof(leaf)
    except (TypeError, ValueError) as error:
        dtype = f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        raise DataError(
            f"batch {number} has a {type(leaf).__name__}{dtype}{_at(path)}, which JAX "
            "cannot hold: make it a plain NumPy array of numbers."
        ) from error


def _is_label(leaf: Any) -> bool:
    return leaf.ndim == 1 and jnp.issubdtype(leaf.dtype, jnp.integer)


def _row(region: Region, leaves: list[Any]) -> Row:
    info = REGIONS[region]
    dtypes = {leaf.dtype.name for leaf in leaves}
    dtype = dtypes.pop() if len(dtypes) == 1 else info.storage
    elements = sum(leaf.size for leaf in leaves)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return Row(region, info.owner, dtype, 0, elements, nbytes)


def _told(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _at(path: str) -> str:
    return f" in {path!r}" if path else ""
