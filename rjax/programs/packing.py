"""Many small arrays as one row of words, which a `lax.scan` stacks by one kernel."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

# More than that is stacked by itself: copying it into the row would cost a pass.
_FEW = 1024
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_PACKED = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 float16 bfloat16 float32".split()
)


def pack(tree: Any) -> tuple[UInt32[Array, " words"], list[jax.Array]]:
    """Return the bits of small arrays as one row, and the other arrays as they are.

    Into the row go arrays of at most 1024 elements of an ordinary dtype of at most 32
    bits, a word for each element. On a GPU every array that a scan stacks is one kernel
    more in each of its steps; a row is one for all.

    Args:
        tree: of arrays.
    """
    rows, rest = [jnp.zeros((0,), jnp.uint32)], []
    for leaf in jax.tree.leaves(tree):
        if _is_small(leaf):
            rows.append(_words(leaf).reshape(-1))
        else:
            rest.append(leaf)
    return jnp.concatenate(rows), rest


def unpack(
    packed: tuple[UInt32[Array, "steps words"], list[jax.Array]], like: Any
) -> Any:
    """Return the stacked tree, bit for bit, of what a scan has stacked of :func:`pack`.

    Args:
        packed: with a first axis of any length.
        like: the tree of one step, or its shapes.
    """
    (row, rest), leaves, start = packed, [], 0
    others = iter(rest)
    for leaf in jax.tree.leaves(like):
        if not _is_small(leaf):
            leaves.append(next(others))
            continue
        stop = start + math.prod(leaf.shape)
        words = row[:, start:stop].reshape(row.shape[0], *leaf.shape)
        leaves.append(_values(words, leaf.dtype))
        start = stop
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _is_small(leaf: Any) -> bool:
    return str(leaf.dtype) in _PACKED and math.prod(leaf.shape) <= _FEW


def _words(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)


def _values(words: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    return lax.bitcast_convert_type(
        words.astype(_UNSIGNED[jnp.dtype(dtype).itemsize]), dtype
    )
