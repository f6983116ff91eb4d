"""What a compiled program takes, and the sentence that refuses anything else."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GIVEN_AWAY = (
    "`{}` was given away to an earlier call: a captured step takes its state over; go "
    "on with the state that the call returned."
)
_TWICE = (
    "`{}` and `{}` are one array, which cannot be given away twice; copy one of them "
    "with `jnp.copy`."
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array that a program takes.

    Attributes:
        name: such as "state.master" or "batch['image']".
        shape: its extents.
        dtype: the name of its dtype; "key<fry>" of a random key.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return f"{self.dtype}[{extents}]"


def leaves_of(name: str, tree: Any) -> tuple[Leaf, ...]:
    """Return what a tree of arrays, or of their shapes, holds.

    Raises:
        ValueError: for a leaf that is neither an array nor a number.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(_leaf(name + jax.tree_util.keystr(path), x) for path, x in found)


def _leaf(name: str, x: Any) -> Leaf:
    if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
        raise ValueError(
            f"`{name}` must be an array, got {type(x).__name__}; make it one with "
            "`jnp.asarray`."
        )
    dtype = getattr(x, "dtype", None) or jnp.asarray(x).dtype
    if isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return Leaf(name, tuple(np.shape(x)), str(dtype))


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a compiled step takes.

    Attributes:
        state: the arrays of the state, in order.
        batch: those of the batch.
    """

    state: tuple[Leaf, ...]
    batch: tuple[Leaf, ...]

    def check(self, state: Any, batch: Any) -> None:
        """Refuse what the program was not compiled for.

        Raises:
            ValueError: naming the argument, what it is and what it must be.
        """
        for name, wanted, tree in (
            ("state", self.state, state),
            ("batch", self.batch, batch),
        ):
            _compare(name, wanted, leaves_of(name, tree))
        _check_owned(self.state, jax.tree.leaves(state))


def _compare(name: str, wanted: Sequence[Leaf], given: Sequence[Leaf]) -> None:
    names, known = {leaf.name for leaf in given}, {leaf.name for leaf in wanted}
    for leaf in given:
        if leaf.name not in known:
            raise ValueError(
                f"`{leaf.name}` is {leaf}, which the program was not compiled for: it "
                f"takes {_some(wanted, name)}; capture the step again with it."
            )
    for leaf in wanted:
        if leaf.name not in names:
            raise ValueError(
                f"`{leaf.name}` is missing: the program was compiled for {leaf} there; "
                "pass it, or capture the step again without it."
            )
    for old, new in zip(wanted, given, strict=True):
        if old != new:
            raise ValueError(
                f"`{new.name}` is {new}, the program was compiled for {old}; pass "
                "that, or capture the step again."
            )


def _some(leaves: Sequence[Leaf], name: str) -> str:
    first = ", ".join(f"`{leaf.name}`" for leaf in leaves[:4])
    more = f" and {len(leaves) - 4} more" if len(leaves) > 4 else ""
    return f"{first}{more}" if leaves else f"no array in `{name}`"


def _check_owned(wanted: Sequence[Leaf], arrays: Sequence[Any]) -> None:
    """Refuse arrays that are gone, or that stand in two places."""
    seen: dict[int, str] = {}
    for leaf, x in zip(wanted, arrays, strict=True):
        if not isinstance(x, jax.Array):
            continue
        if x.is_deleted():
            raise ValueError(_GIVEN_AWAY.format(leaf.name))
        for buffer in _buffers(x):
            if buffer in seen:
                raise ValueError(_TWICE.format(seen[buffer], leaf.name))
            seen[buffer] = leaf.name


def _buffers(x: jax.Array) -> list[int]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    shards = [shard.data for shard in x.addressable_shards]
    return [shard.unsafe_buffer_pointer() for shard in shards if shard.size]
