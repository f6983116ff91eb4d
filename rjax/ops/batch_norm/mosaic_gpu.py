"""Pallas kernels: each pass of a batch norm reads every array once.

A program goes down one strip of columns (:mod:`rjax.ops.batch_norm.columns`). Sums over
rows stay in registers; each program writes one partial result, and XLA puts those
together in a fixed order: no atomics, the same bits every time.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops import mosaic
from rjax.ops.batch_norm import mosaic_overlap, mosaic_pool
from rjax.ops.batch_norm.columns import Shares, Walk, columns, repeated, share
from rjax.ops.batch_norm.moments import column_sums, median, merge
from rjax.ops.max_pool.window import Window

# Elements of an access at most: 16 bytes of half precision a thread.
_LARGEST = 1024
# Programs of each pass (`None`: one a row), and rows that each has in flight.
_STATISTICS, _REDUCE = (528, 8), (528, 4)
_APPLY, _GRADIENT = (8448, 4), (None, 1)


def why_not(name: str, x: jax.Array, window: Window | None = None) -> str | None:
    """Return the sentence that says why no kernel serves a pass, or `None`."""
    if x.size >= 2**31:
        return f"it has {x.size} elements, kernels index fewer than 2^31"
    if x.dtype.itemsize > 4:
        return f"it is {x.dtype}, kernels read 16 or 32 bits"
    if window is not None and window.overlaps:
        if name != "gradient":
            return f"windows {window.size} overlap, only the gradient has a kernel then"
        if mosaic_overlap.tiles(x.shape, window) is None:
            return f"strides {window.strides} do not tile {x.shape} in 256 elements"
    elif window is not None and mosaic_pool.tiles(x.shape, window) is None:
        return f"windows {window.size} do not tile {x.shape} in blocks of 256 elements"
    if columns(x.size, x.shape[-1]) is None:
        return f"shape {x.shape} does not fill whole rows of 128 elements or more"
    return mosaic.why_not()


def op_name(
    name: str,
    x: jax.Array,
    window: Window | None = None,
    image: jax.Array | None = None,
) -> str:
    """Return what a pass is called in tables of measurements.

    Args:
        name: of the pass.
        x: what is normalised. XLA sums few channels faster than many.
        window: how its result is pooled.
        image: what it reads of a residual.
    """
    rides = "" if image is None else "+residual"
    if window is not None:
        rides = "+overlap" if window.overlaps else "+pool"
    return f"batch_norm/{name}{rides}/{64 if x.shape[-1] < 128 else 256}"


def statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and sum of squared deviations, f32[channels] each."""
    shares = _shares(op_name("statistics", x), x, *_STATISTICS)
    rows = shares.columns.rows
    kernel = functools.partial(_statistics, shares=shares)
    near = jax.ShapeDtypeStruct((shares.columns.period,), jnp.float32)
    out = [_partials(shares, 2), near]
    parts = mosaic.launch(kernel, "rjax_bn_statistics", shares.programs, out, x.ravel())
    found, near = _joined(parts[0], shares), parts[1]
    offsets = found[0] * (1.0 / rows)
    squares = jnp.maximum(found[1] - found[0] * offsets, 0.0)
    near, offsets, squares = (_by_channel(part, x) for part in (near, offsets, squares))
    return merge(near, offsets, squares, np.full(len(near), rows))


def _statistics(x, out, typical, *, shares):
    walk = Walk(shares)
    rows = shares.columns.rows
    # Offsets from a value nearby are small where the mean is far above the spread. This
    # program's is among its own rows, or one value far away could spoil all sums.
    all_rows = [walk.row(j) for j in (0, rows // 2, rows - 1)]
    mine = [walk.mine(j) for j in (0, lax.div(walk.count, 2), walk.count - 1)]
    shared, near = (median(*(_load(x, at) for at in some)) for some in (all_rows, mine))

    def visit(where, carry):
        total, products = carry
        values = [_load(x, at) - near for at in where]
        return total + _sum(values), products + _sum([v * v for v in values])

    zero = jnp.zeros_like(near)
    total, products = walk((zero, zero), visit)
    count = walk.count.astype(jnp.float32)
    offset = total * (1.0 / count)
    squares = jnp.maximum(products - total * offset, 0.0)
    # The same sums about the value that all programs of this strip share.
    offset += near - shared
    out[walk.partial(0, 2)] = offset * count
    out[walk.partial(1, 2)] = squares + offset * offset * count

    def note(strip):
        typical[strip] = shared

    walk.first(note)


def apply(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    relu: bool,
    window: Window | None = None,
) -> jax.Array:
    """Return `(x - mean) * factor + bias`, plus `residual`, clamped at 0, pooled."""
    if window is not None:
        assert residual is None, "the API page does not let them meet"
        op = op_name("apply", x, window)
        return mosaic_pool.apply(x, mean, factor, bias, relu, window, op)
    limits = _APPLY if residual is None else _GRADIENT
    shares = _shares(op_name("apply", x, image=residual), x, *limits)
    table = repeated(shares.columns, mean, factor, bias)
    kernel = functools.partial(_apply, shares=shares, relu=relu)
    arrays = [x.ravel()] + ([] if residual is None else [residual.ravel()])
    out = jax.ShapeDtypeStruct((x.size,), x.dtype)
    y = mosaic.launch(kernel, "rjax_bn_apply", shares.programs, out, table, *arrays)
    return y.reshape(x.shape)


def _apply(table, x, *rest, shares, relu):
    *residual, y = rest
    walk = Walk(shares)
    mean, factor, bias = (walk.vector(table, k) for k in range(3))

    def visit(where, carry):
        values = [[_load(a, at) for a in (x, *residual)] for at in where]
        for at, (value, *added) in zip(where, values, strict=True):
            z = _sum([(value - mean) * factor + bias, *added])
            y[at] = (jnp.maximum(z, 0.0) if relu else z).astype(y.dtype)
        return carry

    walk((), visit)


def reduce(
    x: jax.Array,
    dys: tuple[jax.Array, ...],
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    y: jax.Array | None,
    relu: bool,
    window: Window | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the sums of dz and of `dz * (x - mean)`, and dz where y was needed for it.

    Args:
        x: what was normalised.
        dys: gradients of the uses of the result, of its shape and dtype.
        mean: f32[channels], and so are `factor` and `bias`, as in :func:`apply`.
        factor: as above.
        bias: as above.
        y: the result, where a residual was added, else `None`.
        relu: whether dz, their sum, is 0 where the result is not above zero.
        window: how the result was pooled, if it was.

    Returns:
        f32[channels] twice, and dz in the dtype of x, or `None`.
    """
    if window is not None:
        vectors, op = (mean, factor, bias), op_name("reduce", x, window)
        return *mosaic_pool.reduce(x, dys[0], *vectors, relu, window, op), None
    shares = _shares(op_name("reduce", x, image=y), x, *_REDUCE)
    arrays = [x, *dys] + ([] if y is None else [y])
    read = y is not None
    kernel = functools.partial(
        _reduce, shares=shares, relu=relu, read=read, uses=len(dys)
    )
    out = [_partials(shares, 2)]
    if y is not None:
        out.append(jax.ShapeDtypeStruct((x.size,), x.dtype))
    found, *dz = mosaic.launch(
        kernel, "rjax_bn_reduce", shares.programs, out,
        repeated(shares.columns, mean, factor, bias), *(a.ravel() for a in arrays),
    )  # fmt: skip
    sums = _joined(found, shares)
    total, product = (column_sums(_by_channel(each, x)) for each in sums)
    return total, product, dz[0].reshape(x.shape) if dz else None


def _reduce(table, x, *rest, shares, relu, read, uses):
    dys, rest = rest[:uses], rest[uses:]
    y, out, dz = rest if read else (None, *rest, None)
    walk = Walk(shares)
    mean, factor, bias = (walk.vector(table, k) for k in range(3))

    def visit(where, carry):
        total, product = carry
        arrays = [x, *dys] + ([] if y is None else [y])
        values = [[_load(a, at) for a in arrays] for at in where]
        for at, (value, *rest) in zip(where, values, strict=True):
            centred, gradient, result = value - mean, _sum(rest[:uses]), rest[uses:]
            if relu:
                z = result[0] if result else centred * factor + bias
                gradient = jnp.where(z > 0.0, gradient, 0.0)
            if dz is not None:
                dz[at] = gradient.astype(dz.dtype)
            total += gradient
            product += gradient * centred
        return total, product

    zero = jnp.zeros_like(mean)
    out[walk.partial(0, 2)], out[walk.partial(1, 2)] = walk((zero, zero), visit)


def gradient(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    dz_mean: jax.Array,
    slope: jax.Array,
    relu: bool,
    window: Window | None = None,
) -> jax.Array:
    """Return `factor * (dz - dz_mean - (x - mean) * slope)` in the dtype of x.

    Args:
        x: what was normalised.
        dy: gradient of the result, or dz where `relu` is false.
        mean: f32[channels], and so are the vectors that follow.
        factor: as in :func:`apply`.
        bias: as in :func:`apply`.
        dz_mean: mean of dz.
        slope: mean of `dz * (x - mean)`, over the variance.
        relu: whether dz is dy where `(x - mean) * factor + bias` is above zero.
        window: how the result was pooled, if it was.
    """
    if window is not None:
        vectors = mean, factor, bias, dz_mean, slope
        room = mosaic_overlap if window.overlaps else mosaic_pool
        op = op_name("gradient", x, window)
        return room.gradient(x, dy, *vectors, relu, window, op)
    shares = _shares(op_name("gradient", x), x, *_GRADIENT)
    table = repeated(shares.columns, mean, factor, bias, dz_mean, slope)
    kernel = functools.partial(_gradient, shares=shares, relu=relu)
    out = jax.ShapeDtypeStruct((x.size,), x.dtype)
    dx = mosaic.launch(
        kernel, "rjax_bn_gradient", shares.programs, out,
        table, x.ravel(), dy.ravel(),
    )  # fmt: skip
    return dx.reshape(x.shape)


def _gradient(table, x, dy, dx, *, shares, relu):
    walk = Walk(shares)
    mean, factor, bias, dz_mean, slope = (walk.vector(table, k) for k in range(5))

    def visit(where, carry):
        values = [(_load(x, at), _load(dy, at)) for at in where]
        for at, (value, dz) in zip(where, values, strict=True):
            centred = value - mean
            if relu:
                dz = jnp.where(centred * factor + bias > 0.0, dz, 0.0)
            dx[at] = (factor * (dz - dz_mean - centred * slope)).astype(dx.dtype)
        return carry

    walk((), visit)


def _shares(op: str, x: jax.Array, programs: int | None, unroll: int) -> Shares:
    found = columns(x.size, x.shape[-1], mosaic.block_size(op, x.size, _LARGEST))
    assert found is not None, "why_not comes first"
    return share(found, programs or found.rows * found.strips, unroll)


def _partials(shares: Shares, count: int) -> jax.ShapeDtypeStruct:
    """Return what holds `count` vectors of a row's length for each group."""
    length = shares.groups * count * shares.columns.period
    return jax.ShapeDtypeStruct((length,), jnp.float32)


def _joined(partials: jax.Array, shares: Shares) -> jax.Array:
    """Return the sums over all groups, f32[count, period]."""
    return partials.reshape(shares.groups, -1).sum(0).reshape(-1, shares.columns.period)


def _by_channel(partial: jax.Array, x: jax.Array) -> jax.Array:
    return partial.reshape(-1, x.shape[-1])


def _load(ref: Any, at: Any) -> jax.Array:
    return ref[at].astype(jnp.float32)


def _sum(values: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, values)
