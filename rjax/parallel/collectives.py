"""What devices agree on, each as one collective where it can be one.

All functions run inside `shard_map` without varying types, on the part of one device;
`axes` are the mesh axes of all of them. Every result has the same bits on every device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Axes = tuple[str, ...]


def average(tree: Any, axes: Axes, bucket: Sequence[jax.Array] = ()) -> Any:
    """Average floats and bools over devices, in float32, and sum integers.

    As metrics of micro-batches are. What is averaged goes as one array.

    Args:
        tree: pytree of arrays; of a random key, that of the first device is taken.
        axes: of the mesh.
        bucket: more float32 arrays [k] to be averaged, end to end, with them.

    Returns:
        The tree, and the bucket as one array.
    """
    leaves, treedef = jax.tree.flatten(tree)
    joined = [*bucket, *(_wide(x) for x in leaves if _is_averaged(x))]
    found = lax.pmean(jnp.concatenate([jnp.zeros(0, jnp.float32), *joined]), axes)
    at = sum(part.size for part in bucket)
    averaged = found[:at]
    for i, x in enumerate(leaves):
        if _is_averaged(x):
            leaves[i] = found[at : at + x.size].reshape(x.shape)
            at += x.size
        else:
            leaves[i] = lax.psum(x, axes) if _is_integer(x) else of_first(x, axes)
    return treedef.unflatten(leaves), averaged


def reconcile(tree: Any, axes: Axes) -> Any:
    """Make statistics agree: the mean of floats, and the first device's of the rest.

    Where they agree already, as those of a norm over all devices do, no bit changes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    floats = [_wide(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    found, at = _mean(jnp.concatenate([jnp.zeros(0, jnp.float32), *floats]), axes), 0
    for i, x in enumerate(leaves):
        if jnp.issubdtype(x.dtype, jnp.floating):
            leaves[i] = found[at : at + x.size].reshape(x.shape).astype(x.dtype)
            at += x.size
        else:
            leaves[i] = of_first(x, axes)
    return treedef.unflatten(leaves)


def _mean(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the mean over devices of f32[k], which is x itself if all have the same.

    A sum divided by 3 or 5 is not.
    """
    if x.size == 0:
        return x
    each = lax.all_gather(x, axes)
    return each[0] + jnp.mean(each - each[:1], axis=0)


def anywhere(flags: jax.Array, axes: Axes) -> jax.Array:
    """Return bool[...]: whether a flag is set on any device."""
    return lax.pmax(flags.astype(jnp.int32), axes) > 0


def norm(part: jax.Array, axes: Axes) -> jax.Array:
    """Return f32[], the norm of a vector from those of its parts, f32[] each.

    Safe for parts whose squares overflow or underflow.
    """
    largest = lax.pmax(part, axes)
    share = jnp.where(part == largest, jnp.ones_like(part), part / largest)
    return largest * jnp.sqrt(lax.psum(jnp.square(share), axes))


def of_first(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the first device's array, of any dtype, bit for bit."""
    return _moved(x, lambda raw: lax.psum(_only(raw, lax.axis_index(axes) == 0), axes))


def gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Return every device's array [k], end to end, bit for bit."""
    return lax.all_gather(x, axes, tiled=True)


def prefix(x: jax.Array, size: int, axes: Axes) -> jax.Array:
    """Return the first `size` elements of all devices' arrays [k], end to end.

    Bit for bit; by a sum where that moves less than to gather all.
    """
    if 2 * size >= x.size * lax.axis_size(axes):
        return gather(x, axes)[:size]
    width = min(x.size, size)
    if width == 0:
        return x[:0]
    holders = -(-size // width)
    index = lax.axis_index(axes)

    def summed(raw: jax.Array) -> jax.Array:
        mine = _only(raw[:width], index < holders)
        start = jnp.minimum(index, holders - 1) * width
        zeros = jnp.zeros(holders * width, raw.dtype)
        return lax.psum(lax.dynamic_update_slice(zeros, mine, (start,))[:size], axes)

    return _moved(x, summed)


def _moved(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Move the bits of an array by a sum of which one term is not zero."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        moved = move(jax.random.key_data(x))
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_:
        return move(x.astype(jnp.uint32)) > 0
    raw = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, raw)), x.dtype)


def _only(raw: jax.Array, here: jax.Array) -> jax.Array:
    return jnp.where(here, raw, np.zeros((), raw.dtype))


def _is_averaged(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.bool_


def _is_integer(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).reshape(-1)
