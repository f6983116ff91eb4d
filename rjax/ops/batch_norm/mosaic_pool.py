"""Pallas kernels of a batch norm whose result is pooled: nothing un-pooled is stored.

They serve windows that tile the image, such as 2x2 with strides of 2. A program reads
all elements of some neighbouring windows, some channels of each: one two-dimensional
access, pixels by channels, for every element of a window. So each thread holds whole
windows, and finds in its own registers which element is the largest.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops import mosaic
from rjax.ops.batch_norm.moments import column_sums
from rjax.ops.max_pool.window import Window

# Elements of an access at most, and at least: Mosaic wants 4 bytes a thread.
LARGEST, _LEAST, _THREADS = 1024, 256, 128
# Programs of the pass that keeps sums, and of those that write.
_SUMS, _WRITES = 528, 2112


class Tiles(NamedTuple):
    """How an image is read, window by window.

    Attributes:
        pixels: neighbouring windows of a tile, in one row of windows.
        channels: of a tile.
        across: tiles in a row of windows.
        strips: tiles in the channels.
        rows: rows of windows in the batch.
        size: rows and columns of a window.
    """

    pixels: int
    channels: int
    across: int
    strips: int
    rows: int
    size: tuple[int, int]

    @property
    def layout(self) -> Any:
        """Pixels by channels over the 128 threads, neighbouring channels in one."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        pixels, channels = self.pixels, self.channels
        # Four elements a thread: 16 bytes of float32, which vectors and sums have.
        while pixels * channels > 4 * _THREADS:
            pixels, channels = (
                (pixels // 2, channels) if pixels > 1 else (1, channels // 2)
            )
        shape, vector = (pixels, channels), pixels * channels // _THREADS
        threads = channels // vector  # that share a pixel
        if threads > 32:
            tiling = shape, (32 * vector,), (vector,)
            warps, lanes = (-4, -3) if pixels > 1 else (-3,), (-2,)
        elif pixels > 4:
            tiling = shape, (pixels // 4, channels), (vector,)
            warps, lanes = (-5,), (-3, -2)
        else:
            tiling = shape, (vector,)
            warps, lanes = (-3,), (-2,)
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiling), warp_dims=warps, lane_dims=lanes, vector_dim=-1
        )


def tiles(
    shape: tuple[int, ...], window: Window, largest: int = LARGEST
) -> Tiles | None:
    """Return how to read images, `None` if windows or tiles do not fill them.

    Args:
        shape: `[batch, height, width, channels]`.
        window: how images are pooled.
        largest: elements of a tile at most, a power of two.

    Example:
        >>> tiles((256, 224, 224, 64), Window(2))
        Tiles(pixels=16, channels=64, across=7, strips=1, rows=28672, size=(2, 2))
    """
    batch, height, width, channels = shape
    if window.strides != window.size or any(map(any, window.pads(height, width))):
        return None
    return tiling((batch, height, width, channels), window.size, largest)


def tiling(
    shape: tuple[int, int, int, int], size: tuple[int, int], largest: int = LARGEST
) -> Tiles | None:
    """Return how to read images in blocks of `size` pixels, `None` if it cannot be."""
    batch, height, width, channels = shape
    rows, columns = height // size[0], width // size[1]
    some = math.gcd(channels, largest)
    pixels = math.gcd(columns, largest // some)
    if (rows * size[0], columns * size[1]) != (height, width) or not rows * columns:
        return None
    if some * pixels < _LEAST:
        return None
    return Tiles(pixels, some, columns // pixels, channels // some, batch * rows, size)


class Walk:
    """The way of one program over its tiles, inside a kernel.

    Attributes:
        tiles: how the image is read.
        layout: of every array it reads.
    """

    def __init__(self, tiles: Tiles, groups: int) -> None:
        i, strips = mosaic.program_index(), jnp.int32(tiles.strips)
        self.tiles, self.layout, self._groups = tiles, tiles.layout, groups
        self._channel = lax.rem(i, strips) * tiles.channels
        self._group = lax.div(i, strips)

    def vector(self, ref: Any, k: int) -> jax.Array:
        """Return the channels of this strip from f32[vectors, pixels, channels]."""
        return self.load(ref, k, slice(None), self._channels())

    def __call__(self, carry: Any, visit: Any) -> Any:
        """Go from tile to tile; `visit(tile, carry)` returns the next carry."""
        count = self.tiles.rows * self.tiles.across
        groups = jnp.int32(self._groups)
        steps = lax.div(count - self._group + (groups - 1), groups)

        def one(j: Any, carry: Any) -> Any:
            return visit(self._group + j * groups, carry)

        return lax.fori_loop(0, steps, one, carry)

    def elements(self, ref: Any, tile: Any) -> list[jax.Array]:
        """Return the elements of the windows of a tile, in row-major order."""
        return [self.load(ref, *at) for at in self.places(tile)]

    def places(self, tile: Any) -> list[tuple[Any, ...]]:
        """Return where those lie in what `folded` returns."""
        row, pixels = self._at(tile)
        down, right = self.tiles.size
        all_channels = self.tiles.strips * self.tiles.channels
        return [
            (row * down + i, pixels, self._channels(j * all_channels))
            for i in range(down)
            for j in range(right)
        ]

    def pooled(self, ref: Any, tile: Any) -> jax.Array:
        """Return one value for each window of a tile."""
        return self.load(ref, *self.place(tile))

    def place(self, tile: Any) -> tuple[Any, ...]:
        """Return where those lie, in `[rows, columns of windows, channels]`."""
        return *self._at(tile), self._channels()

    def moved(self, tile: Any, rows: int, padded: int, by: tuple[int, int]) -> Any:
        """Return where the values `by` rows and columns on lie.

        Args:
            tile: the tile.
            rows: of windows in an image.
            padded: as many and what was put around them.
            by: rows and columns, counted from the first that was put there.
        """
        row, pixels = self._at(tile)
        image = lax.div(row, jnp.int32(rows))
        at = image * padded + lax.rem(row, jnp.int32(rows)) + by[0]
        return at, _slice(pixels.start + by[1], pixels.size), self._channels()

    def _at(self, tile: Any) -> tuple[Any, Any]:
        from jax.experimental import pallas as pl

        across, pixels = jnp.int32(self.tiles.across), self.tiles.pixels
        return lax.div(tile, across), pl.ds(lax.rem(tile, across) * pixels, pixels)

    def _channels(self, start: int = 0) -> Any:
        from jax.experimental import pallas as pl

        return pl.ds(self._channel + start, self.tiles.channels)

    def load(self, ref: Any, *at: Any) -> jax.Array:
        """Return what lies in one place, in float32."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        load: Any = plgpu.load  # jax 0.10 has another one
        found = load(ref.at[at], layout=self.layout, optimized=False)
        return found.astype(jnp.float32)


def _slice(start: Any, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(start, size)


def apply(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    relu: bool,
    window: Window,
    op: str,
) -> jax.Array:
    """Return the pass of that name of `base`."""
    found = measured(tiles, op, x, window)
    columns = found.across * found.pixels
    out = jax.ShapeDtypeStruct((found.rows, columns, x.shape[-1]), x.dtype)
    kernel = functools.partial(_apply, relu=relu)
    vectors = mean, factor, bias
    y = launch(
        kernel, "rjax_bn_apply_pool", found, _WRITES, out, vectors, folded(x, found)
    )
    return y.reshape(x.shape[0], -1, columns, x.shape[-1])


def _apply(walk, vectors, x, y, *, relu):
    mean, factor, bias = vectors

    def visit(tile, carry):
        largest = _largest(walk.elements(x, tile), factor)
        z = (largest - mean) * factor + bias
        y[walk.place(tile)] = (jnp.maximum(z, 0.0) if relu else z).astype(y.dtype)
        return carry

    walk((), visit)


def reduce(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    relu: bool,
    window: Window,
    op: str,
) -> tuple[jax.Array, jax.Array]:
    """Return both sums of the pass of that name of `base`."""
    found = measured(tiles, op, x, window)
    groups = _groups(found, _SUMS)
    shape = groups, found.strips, 2, found.pixels, found.channels
    out = jax.ShapeDtypeStruct((groups * found.strips, *shape[2:]), jnp.float32)
    kernel = functools.partial(_reduce, relu=relu)
    vectors = mean, factor, bias
    arrays = folded(x, found), dy.reshape(found.rows, -1, x.shape[-1])
    sums = launch(kernel, "rjax_bn_reduce_pool", found, _SUMS, out, vectors, *arrays)
    by_pixel = sums.reshape(shape).sum(0).transpose(1, 2, 0, 3)
    total, product = by_pixel.reshape(2, found.pixels, -1)
    return column_sums(total), column_sums(product)


def _reduce(walk, vectors, x, dy, sums, *, relu):
    mean, factor, bias = vectors

    def visit(tile, carry):
        total, product = carry
        largest = _largest(walk.elements(x, tile), factor)
        dz = _clamped(walk.pooled(dy, tile), largest - mean, factor, bias, relu)
        return total + dz, product + dz * (largest - mean)

    zero = jnp.zeros_like(mean)
    program = mosaic.program_index()
    sums[program, 0], sums[program, 1] = walk((zero, zero), visit)


def gradient(
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    dz_mean: jax.Array,
    slope: jax.Array,
    relu: bool,
    window: Window,
    op: str,
) -> jax.Array:
    """Return the pass of that name of `base`."""
    found = measured(tiles, op, x, window)
    image = folded(x, found)
    out = jax.ShapeDtypeStruct(image.shape, x.dtype)
    kernel = functools.partial(_gradient, relu=relu)
    vectors = mean, factor, bias, dz_mean, slope
    arrays = image, dy.reshape(found.rows, -1, x.shape[-1])
    dx = launch(kernel, "rjax_bn_gradient_pool", found, _WRITES, out, vectors, *arrays)
    return dx.reshape(x.shape)


def _gradient(walk, vectors, x, dy, dx, *, relu):
    mean, factor, bias, dz_mean, slope = vectors

    def visit(tile, carry):
        values = walk.elements(x, tile)
        largest = _largest(values, factor)
        left = _clamped(walk.pooled(dy, tile), largest - mean, factor, bias, relu)
        for at, value in zip(walk.places(tile), values, strict=True):
            dz = jnp.where(value == largest, left, 0.0)
            left = jnp.where(value == largest, 0.0, left)
            dx[at] = (factor * (dz - dz_mean - (value - mean) * slope)).astype(dx.dtype)
        return carry

    walk((), visit)


def _largest(values, factor):
    """Return the value of each window whose result is the largest."""
    up, down = (functools.reduce(f, values) for f in (jnp.maximum, jnp.minimum))
    return jnp.where(factor < 0.0, down, up)


def _clamped(dy, centred, factor, bias, relu):
    """Return dy where the clamp lets it through."""
    return jnp.where(centred * factor + bias > 0.0, dy, 0.0) if relu else dy


def measured(find: Any, op: str, x: jax.Array, window: Window) -> Tiles:
    """Return the tiles of the size that was measured to be best, or of any."""
    block = mosaic.block_size(op, x.size, LARGEST)
    found = find(x.shape, window, max(block, _LEAST)) or find(x.shape, window)
    assert found is not None, "why_not comes first"
    return found


def folded(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Return x with the columns of a window in its channels."""
    height, across = tiles.rows * tiles.size[0], tiles.across * tiles.pixels
    return x.reshape(height, across, -1)


def _groups(tiles: Tiles, programs: int) -> int:
    return max(1, min(tiles.rows * tiles.across, programs // tiles.strips))


def launch(
    body: Any,
    name: str,
    tiles: Tiles,
    programs: int,
    out: Any,
    vectors: tuple[jax.Array, ...],
    *arrays: jax.Array,
) -> Any:
    """Run `body(walk, vectors, *arrays, *outputs)` over the tiles of an image."""
    groups, count = _groups(tiles, programs), len(vectors)
    kernel = functools.partial(
        _walked, body=body, tiles=tiles, groups=groups, count=count
    )
    table = jnp.stack(vectors)[:, None]
    table = jnp.broadcast_to(table, (count, tiles.pixels, table.shape[-1]))
    return mosaic.launch(kernel, name, groups * tiles.strips, out, table, *arrays)


def _walked(table, *refs, body, tiles, groups, count):
    walk = Walk(tiles, groups)
    body(walk, [walk.vector(table, k) for k in range(count)], *refs)
