"""Pallas kernels for products of all rows with small matrices, by Hopper's `wgmma`.

Each reads and writes what has a row for every pixel once. Tiles of 64 rows come in by
TMA, products accumulate in float32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops import mosaic
from rjax.ops.batch_norm.moments import column_sums

MOMENTS, BACK, PULL = "rjax_moments", "rjax_pointwise_back", "rjax_masked_product"
# Rows and depth of a tile; the widest one; tiles in flight.
_ROWS, _DEPTH, _WIDTH, _STAGES = 64, 64, 128, 4
# Programs that share the rows of the moments.
_PROGRAMS = 264


def why_not(x: Any, *widths: int) -> str | None:
    """Return the sentence that says why no kernel serves, or `None`.

    Args:
        x: `[*batch, channels]`, of the dtype of all that has a row for every pixel; or
            its shape.
        *widths: channels of what else is multiplied.
    """
    if x.dtype.itemsize != 2:
        return f"it is {x.dtype}, kernels multiply 16 bits"
    rows, wrong = x.size // x.shape[-1], f"do not fill tiles of {_ROWS}"
    if rows % _ROWS or rows * max(x.shape[-1], *widths, 0) >= 2**31:
        return f"{rows} rows {wrong}, or have 2^31 elements or more"
    for width in (x.shape[-1], *widths):
        if width % _DEPTH or width % min(width, _WIDTH):
            return f"{width} channels {wrong} or {_WIDTH}"
    return mosaic.why_no_hopper()


def op_name(product: str, channels: int) -> str:
    """Return what a product is called in measurements, "moments", "back" or "pull"."""
    return f"pointwise_batch_norm/{product}/{channels}"


def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the pass of that name of `base`, about a value of each channel."""
    channels, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
    near, wide = _median(rows), _width("moments", x)
    tiles = (channels // _ROWS, channels // wide)
    blocks = len(rows) // _ROWS
    shares = _divisor(blocks, max(1, _PROGRAMS // math.prod(tiles)))
    body = functools.partial(_moments, wide=wide, steps=blocks // shares)
    out = [
        jax.ShapeDtypeStruct((shares, channels, channels), jnp.float32),
        jax.ShapeDtypeStruct((shares, tiles[0], channels), jnp.float32),
    ]
    grid = (("share", shares), ("i", tiles[0]), ("j", tiles[1]))
    squares, sums = mosaic.launch(body, MOMENTS, grid, out, rows, near)
    n = float(len(rows))
    offset = sums[:, 0].sum(0) / n
    mean = near.astype(jnp.float32) + offset
    return mean, squares.sum(0) / n - jnp.outer(offset, offset)


def _moments(x, near, squares, sums, *, wide, steps):
    plgpu = _mosaic()

    share, i, j = (lax.axis_index(axis) for axis in ("share", "i", "j"))
    rows, columns = _at(i, _ROWS), _at(j, wide)

    def scoped(left: Any, right: Any) -> None:
        body = functools.partial(accumulate, left, right)
        _scoped(body, plgpu.ACC((_ROWS, wide), jnp.float32))

    def accumulate(left: Any, right: Any, products: Any) -> None:
        about = _across(near, rows), _across(near, columns)

        def visit(_: Any, a: Any, b: Any, total: jax.Array) -> jax.Array:
            a, b = (
                tile[...].astype(jnp.float32) - _down(value.astype(jnp.float32))
                for tile, value in zip((a, b), about, strict=True)
            )
            # The last product has to have read what is overwritten now.
            plgpu.wgmma_wait(0)
            left[...] = a.astype(x.dtype)
            right[...] = b.astype(x.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(products, left.T, right)
            return total + b

        zero = jnp.zeros((_ROWS, wide), jnp.float32)
        total = plgpu.emit_pipeline(
            visit,
            grid=(steps,),
            in_specs=[
                _tile((_ROWS, _ROWS), lambda step: (share * steps + step, i)),
                _tile((_ROWS, wide), lambda step: (share * steps + step, j)),
            ],
            max_concurrent_steps=min(_STAGES, steps),
            init_carry=plgpu.layout_cast(zero, plgpu.Layout.WGMMA),
        )(x, x)
        plgpu.wgmma_wait(0)
        squares[share, rows, columns] = products[...]
        sums[share, i, columns] = total.sum(0)

    _scoped(scoped, _memory((_ROWS, _ROWS), x.dtype), _memory((_ROWS, wide), x.dtype))


def back(
    dz: jax.Array,
    kernel: jax.Array,
    x: jax.Array,
    steps: jax.Array,
    unit: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """Return `dz @ kernel.T - unit * (x @ steps) + bias`: the pass of `base`."""
    channels, wide = x.shape[-1], _width("back", x)
    flat, gradient = x.reshape(-1, channels), dz.reshape(-1, dz.shape[-1])
    body = functools.partial(_back, wide=wide)
    grid = (("rows", len(flat) // _ROWS), ("columns", channels // wide))
    out = jax.ShapeDtypeStruct(flat.shape, x.dtype)
    arrays = (gradient, kernel, flat, steps, unit.reshape(1), bias)
    return mosaic.launch(body, BACK, grid, out, *arrays).reshape(x.shape)


def _back(dz, kernel, x, steps, unit, bias, out, *, wide):
    plgpu = _mosaic()

    i, j = lax.axis_index("rows"), lax.axis_index("columns")

    def scoped(tile: Any) -> None:
        correction = _product(x, steps, i, j, wide, turned=False)
        start = _down(_across(bias, _at(j, wide))) - correction * unit[0]
        tile[...] = (start + _product(dz, kernel, i, j, wide)).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[_at(i, _ROWS), _at(j, wide)])
        plgpu.wait_smem_to_gmem(0)

    _scoped(scoped, _memory((_ROWS, wide), out.dtype))


def pull(
    dy: jax.Array, dafter: jax.Array, after: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the pass of that name of `training`."""
    channels, wide = y.shape[-1], _width("pull", y)
    flat = [a.reshape(-1, a.shape[-1]) for a in (dafter, y, dy)]
    blocks = len(flat[0]) // _ROWS
    out = [
        jax.ShapeDtypeStruct(flat[1].shape, y.dtype),
        jax.ShapeDtypeStruct((blocks, channels), jnp.float32),
    ]
    body = functools.partial(_pull, wide=wide)
    grid = (("rows", blocks), ("columns", channels // wide))
    arrays = (flat[0], after, *flat[1:])
    dz, sums = mosaic.launch(body, PULL, grid, out, *arrays)
    return column_sums(sums), dz.reshape(y.shape)


def _pull(dafter, after, y, dy, out, sums, *, wide):
    plgpu = _mosaic()

    i, j = lax.axis_index("rows"), lax.axis_index("columns")
    where = _at(i, _ROWS), _at(j, wide)

    def scoped(values: Any, tile: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(y.at[where], values, arrived.at[0])
        plgpu.copy_gmem_to_smem(dy.at[where], tile, arrived.at[1])
        total = _product(dafter, after, i, j, wide)
        plgpu.barrier_wait(arrived.at[0])
        plgpu.barrier_wait(arrived.at[1])
        total += tile[...].astype(jnp.float32)
        above = values[...].astype(jnp.float32) > 0.0
        total = jnp.where(above, total, jnp.zeros_like(total))
        tile[...] = total.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[where])
        sums[i, where[1]] = total.sum(0)
        plgpu.wait_smem_to_gmem(0)

    memory = _memory((_ROWS, wide), y.dtype)
    _scoped(scoped, memory, memory, plgpu.Barrier(num_barriers=2))


def _product(
    a: Any, b: Any, i: Any, j: Any, wide: int, *, turned: bool = True
) -> jax.Array:
    """Return tile (i, j) of `a @ b.T`, or of `a @ b`, in float32."""
    plgpu = _mosaic()

    depth = a.shape[-1] // _DEPTH
    shape = (wide, _DEPTH) if turned else (_DEPTH, wide)

    def accumulate(total: Any) -> jax.Array:
        def visit(_: Any, left: Any, right: Any) -> None:
            plgpu.wgmma(total, left, right.T if turned else right)
            plgpu.wgmma_wait(0)

        plgpu.emit_pipeline(
            visit,
            grid=(depth,),
            in_specs=[
                _tile((_ROWS, _DEPTH), lambda step: (i, step)),
                _tile(shape, lambda step: (j, step) if turned else (step, j)),
            ],
            max_concurrent_steps=min(_STAGES, depth),
        )(a, b)
        return total[...]

    return _scoped(accumulate, plgpu.ACC((_ROWS, wide), jnp.float32))


def _median(rows: jax.Array) -> jax.Array:
    """Return a value of each channel: of three the middle one."""
    a, b, c = rows[0], rows[len(rows) // 2], rows[-1]
    return jnp.maximum(jnp.minimum(a, b), jnp.minimum(jnp.maximum(a, b), c))


def _width(product: str, x: jax.Array) -> int:
    """Return how many columns a tile of the result has, which the table knows best."""
    channels = x.shape[-1]
    block = mosaic.block_size(op_name(product, channels), x.size, _WIDTH)
    return min(channels, _WIDTH, max(_DEPTH, block))


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is not above `most`."""
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


def _mosaic() -> Any:
    """Return the module of Pallas, of which jax 0.10 has less."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _at(index: Any, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(index * size, size)


def _scoped(body: Any, *types: Any) -> Any:
    from jax.experimental import pallas as pl

    return pl.run_scoped(body, *types)


def _swizzled(width: int) -> tuple[Any, ...]:
    plgpu = _mosaic()

    swizzle = plgpu.find_swizzle(width * 16)
    tiling = plgpu.TilingTransform((8, swizzle // 2))
    return (tiling, plgpu.SwizzleTransform(swizzle))


def _memory(shape: tuple[int, int], dtype: Any) -> Any:
    plgpu = _mosaic()

    return plgpu.SMEM(shape, dtype, transforms=_swizzled(shape[1]))


def _tile(shape: tuple[int, int], where: Any) -> Any:
    plgpu = _mosaic()

    return plgpu.BlockSpec(shape, where, transforms=_swizzled(shape[1]))


def _across(vector: Any, columns: Any) -> jax.Array:
    """Load a part of a vector, laid out as the columns of a product are."""
    plgpu = _mosaic()

    layout = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(vector.at[columns], layout=layout, optimized=False)


def _down(vector: jax.Array) -> jax.Array:
    """Return a vector once for every row of a tile."""
    return lax.broadcast_in_dim(vector, (_ROWS, *vector.shape), [1])
