"""Mean and variance of channels, put together from those of parts.

Sums of squares about the mean of all, or about nothing, cancel where the mean is far
above the spread. Each part has squares about its own mean here, and the rule of Chan,
Golub and LeVeque (https://doi.org/10.1080/00031305.1983.10483115) joins them.
"""

import functools
import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Rows summed one after the other before partial sums are combined: a long running sum
# in float32 rounds every addend to its own large unit.
BLOCK = 1024
# Rows up to which a sum is written out: XLA makes it a part of what follows.
_FEW = 16
# Devices up to which each gets what all others have, in one exchange; more take two
# sums, which move less. Either way a norm costs what it takes to wait for the others.
_GATHERED = 8


def moments(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and sum of squared deviations of each channel, reading rows once.

    Args:
        rows: f32[n, channels].
    """
    n, channels = rows.shape
    length = min(n, BLOCK)
    blocks = n // length
    parts = [rows[: blocks * length].reshape(blocks, length, channels)]
    counts = [length] * blocks
    if n > blocks * length:
        parts.append(rows[None, blocks * length :])
        counts.append(n - blocks * length)
    found = zip(*map(_about_a_value, parts), strict=True)
    near, offsets, squares = map(jnp.concatenate, found)
    return merge(near, offsets, squares, np.array(counts))


def merge(
    near: jax.Array, offsets: jax.Array, squares: jax.Array, counts: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Return mean and sum of squared deviations of parts put together.

    The mean of a part is `near + offset`, which is not rounded: far above the spread,
    its last place would be worth a part of the variance.

    Args:
        near: f32[parts, channels].
        offsets: f32[parts, channels].
        squares: f32[parts, channels], each about its own mean.
        counts: [parts], how many values a channel has in each.
    """
    if len(counts) <= _FEW:
        return _merge_few(list(near), list(offsets), list(squares), counts)
    offsets += near - near[:1]
    shares = jnp.asarray(counts / counts.sum(), jnp.float32)[:, None]
    offset = column_sums(shares * offsets)
    between = jnp.asarray(counts, jnp.float32)[:, None] * (offsets - offset[None]) ** 2
    return near[0] + offset, column_sums(squares + between)


def _merge_few(
    near: list[jax.Array],
    offsets: list[jax.Array],
    squares: list[jax.Array],
    counts: np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """Return what :func:`merge` does, elementwise in the channels."""
    each = [float(n) for n in counts]
    shares = [n / sum(each) for n in each]
    offsets = [o + (value - near[0]) for o, value in zip(offsets, near, strict=True)]
    offset = _sum(o * share for o, share in zip(offsets, shares, strict=True))
    between = [n * (o - offset) ** 2 for n, o in zip(each, offsets, strict=True)]
    return near[0] + offset, _sum([*squares, *between])


def merge_devices(
    mean: jax.Array, squares: jax.Array, n: int, axis_name: str | tuple[str, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """Return mean and biased variance over devices that have n values a channel each.

    Args:
        mean: f32[channels], of this device.
        squares: f32[channels], about that mean.
        n: values per channel on this device.
        axis_name: mesh axes of the devices, `None` for this one alone.
    """
    if axis_name is None:
        return mean, squares / float(n)
    devices = lax.axis_size(axis_name)
    if devices <= _GATHERED:
        found = _gathered(jnp.stack([mean, squares]), axis_name)
        means, squares = found[:, 0], found[:, 1]
        counts = np.full(devices, n)
        mean, squares = merge(means, jnp.zeros_like(means), squares, counts)
        return mean, squares / (float(n) * devices)
    rough = lax.psum(mean, axis_name) / float(devices)
    rest = mean - rough
    parts = jnp.stack([rest, squares / float(n) + rest**2])
    # What the rounding of that mean has left over, and squares about it.
    near, spread = lax.psum(parts, axis_name) / float(devices)
    return rough + near, jnp.maximum(spread - near**2, 0.0)


def _gathered(x: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
    """Return what all devices have, in their order: [devices, ...].

    As a sum, the only exchange after which every device is known to have the same.
    """
    devices, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)
    here = jnp.arange(devices, dtype=mine.dtype).reshape(-1, *[1] * x.ndim) == mine
    return lax.psum(jnp.where(here, x[None], 0.0), axis_name)


def column_sums(rows: jax.Array) -> jax.Array:
    """Sum `[n, channels]` over n as a tree of blocks."""
    if rows.shape[0] <= _FEW:
        return _sum(rows)
    while rows.shape[0] > BLOCK:
        rows = jnp.pad(rows, ((0, -rows.shape[0] % BLOCK), (0, 0)))
        rows = rows.reshape(-1, BLOCK, rows.shape[-1]).sum(1)
        rows = lax.optimization_barrier(rows)  # or XLA merges the levels into one
    return rows.sum(0)


def _sum(values: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, values)


def typical(parts: jax.Array) -> jax.Array:
    """Return the median of the first, middle and last of `[parts, n, channels]`.

    Squares about it lose little: values that lie far from it are either many, and then
    so is the variance, or two of these three, and then it is n / 2 times less than
    what was summed.
    """
    n = parts.shape[1]
    return median(*(parts[:, i] for i in (0, n // 2, n - 1)))


def median(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Return elementwise the one of three that lies between the others."""
    return jnp.maximum(jnp.minimum(a, b), jnp.minimum(jnp.maximum(a, b), c))


def _about_a_value(parts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `merge` takes of `[parts, n, channels]`, reading each value once."""
    n = parts.shape[1]
    near = lax.optimization_barrier(typical(parts))  # or it is formed for every value
    offsets = parts - near[:, None]
    total, squares = offsets.sum(1), (offsets * offsets).sum(1)
    return near, total / n, jnp.maximum(squares - total * total / n, 0.0)
