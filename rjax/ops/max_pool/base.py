"""Max pooling in plain jnp: reference, fallback and documentation.

Everything is elementwise over strided slices and their padded copies, which XLA can
fuse: no reduce-window, no scatter, no order left open. The functions that take a
`Window` work on any array `[batch, height, width, channels]`, for others to build on.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.max_pool.window import Window


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: jax.Array, window: Window) -> jax.Array:
    """Return the largest element of each window; see the API page."""
    return pooled(x, window)


def _forward(x: jax.Array, window: Window) -> tuple[jax.Array, jax.Array]:
    return pooled(x, window), x


def _backward(window: Window, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    index = first_largest(x, window)
    if window.overlaps and dy.dtype.itemsize < 4:
        dy = dy.astype(jnp.float32)
    return (spread(index, dy, window, x.shape).astype(x.dtype),)


max_pool.defvjp(_forward, _backward)


def pooled(x: jax.Array, window: Window) -> jax.Array:
    """Return the largest element of each window, NaN if it holds one."""
    return functools.reduce(lax.max, _elements(x, window))


def first_largest(x: jax.Array, window: Window) -> jax.Array:
    """Return where in each window its first NaN is, else its first largest element.

    Returns:
      int8, an index into `window.offsets` for each element of `pooled`. Padding is
      never the largest, not even among elements that are all -inf.
    """
    best, *others = _elements(x, window)
    index = _first_inside(best.shape, x.shape, window)
    for i, element in enumerate(others, 1):
        # Not `element > best`, which is false for a NaN.
        better = ~(element <= best) & (best == best)
        best = jnp.where(better, element, best)
        index = jnp.where(better, jnp.int8(i), index)
    return index


def spread(
    index: jax.Array, dy: jax.Array, window: Window, shape: tuple[int, ...]
) -> jax.Array:
    """Add each element of `dy` to the element of the image that `index` names.

    Args:
      index: int8 in the shape of `dy`, from `first_largest`; a value outside
        `window.offsets`, such as -1, adds nothing anywhere.
      dy: floating `[batch, rows, columns, channels]`, the gradient of `pooled`.
      window: where the windows lie.
      shape: of the image, `[batch, height, width, channels]`.

    Returns:
      An array of `shape` and of the dtype of `dy`, in which it is summed, in the order
      of `window.offsets`.
    """
    zero = jnp.zeros((), dy.dtype)

    def placed(i: int) -> jax.Array:
        named = jnp.where(index == i, dy, zero)
        config = [(0, 0, 0)] * 4
        for k, at in _positions(i, shape, dy.shape, window):
            config[k] = (at[0], shape[k] - 1 - at[-1], at.step - 1)
        return lax.pad(named, zero, config)

    return functools.reduce(operator.add, map(placed, range(len(window.offsets))))


def _elements(x: jax.Array, window: Window) -> list[jax.Array]:
    """Return the element of every window at each of `window.offsets`.

    Padding is put around each slice: a padded image, which all of them would share, is
    something that XLA may write to memory.
    """
    output = (x.shape[0], *window.output(*x.shape[1:3]), x.shape[3])
    lowest = jnp.array(-jnp.inf, x.dtype)

    def taken(i: int) -> jax.Array:
        start, limit, strides = [0] * 4, list(x.shape), [1] * 4
        config = [(0, 0, 0)] * 4
        for k, at in _positions(i, x.shape, output, window):
            inside = [p for p in at if 0 <= p < x.shape[k]]
            start[k], limit[k] = (inside[0], inside[-1] + 1) if inside else (0, 0)
            strides[k] = at.step
            before = sum(p < 0 for p in at)
            config[k] = (before, len(at) - before - len(inside), 0)
        return lax.pad(lax.slice(x, start, limit, strides), lowest, config)

    return [taken(i) for i in range(len(window.offsets))]


def _positions(
    i: int, shape: tuple[int, ...], output: tuple[int, ...], window: Window
) -> list[tuple[int, range]]:
    """Return where the i-th elements of all windows lie in the image.

    Returns:
      For the axes 1 and 2, the axis and the rows or columns of the image; those in
      padding are below 0, or at least the length of the axis.
    """
    found = []
    for k in (0, 1):
        first = window.offsets[i][k] - window.pads(*shape[1:3])[k][0]
        stride = window.strides[k]
        found.append((k + 1, range(first, first + output[k + 1] * stride, stride)))
    return found


def _first_inside(
    output: tuple[int, ...], shape: tuple[int, ...], window: Window
) -> jax.Array:
    """Return the index of the first element of each window that is not padding."""
    index = jnp.zeros(output, jnp.int32)
    for k, elements in ((0, window.size[1]), (1, 1)):  # elements from one to the next
        padding = window.pads(*shape[1:3])[k][0]
        if padding:
            window_number = lax.broadcasted_iota(jnp.int32, output, k + 1)
            outside = jnp.maximum(padding - window.strides[k] * window_number, 0)
            index += outside * elements
    return index.astype(jnp.int8)
