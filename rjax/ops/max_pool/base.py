"""Max pooling in plain jnp: reference, fallback and documentation.

Everything is elementwise over strided slices and their padded copies, which XLA can
fuse: no reduce-window, no scatter, no order left open. The functions that take a
`Window` work on any array `[batch, height, width, channels]`, for others to build on.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.max_pool.window import Pair, Window


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: jax.Array, window: Window) -> jax.Array:
    """Return the largest element of each window; see the API page."""
    return pooled(x, window)


def _forward(
    x: jax.Array, window: Window
) -> tuple[jax.Array, tuple[jax.Array, tuple[int, ...]]]:
    # The barrier keeps XLA from finding every index again for each element it names.
    index = lax.optimization_barrier(first_largest(x, window))
    return pooled(x, window), (index, x.shape)


def _backward(
    window: Window, saved: tuple[jax.Array, tuple[int, ...]], dy: jax.Array
) -> tuple[jax.Array]:
    index, shape = saved
    wide = dy
    if window.overlaps and dy.dtype.itemsize < 4:
        wide = dy.astype(jnp.float32)
    return (spread(index, wide, window, shape).astype(dy.dtype),)


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
    if not window.overlaps:  # one window has it: the one around it
        named, gradient = (
            _stretched(a, f, window, shape) for a, f in ((index, -1), (dy, 0))
        )
        return jnp.where(named == _numbers(window, shape), gradient, zero)
    # Elements of one phase, as many steps past a stride, stand in the same places of
    # their windows: which those are is known before anything runs.
    strides = window.strides
    steps = [-(-shape[k + 1] // strides[k]) for k in (0, 1)]

    def phase(*at: int) -> jax.Array:
        held = [places(window, shape, k, at[k]) for k in (0, 1)]
        total = jnp.zeros((shape[0], *steps, shape[3]), dy.dtype)
        for (row, i), (column, j) in itertools.product(*held):
            named = _moved(index, -1, (i, j), steps)
            gradient = _moved(dy, 0, (i, j), steps)
            number = jnp.int8(row * window.size[1] + column)
            total += jnp.where(named == number, gradient, zero)
        return total

    rows = [
        jnp.stack([phase(i, j) for j in range(strides[1])], 3)
        for i in range(strides[0])
    ]
    whole = jnp.stack(rows, 2)
    several = [n * stride for n, stride in zip(steps, strides, strict=True)]
    whole = whole.reshape(shape[0], *several, shape[3])
    return lax.slice(whole, (0, 0, 0, 0), shape)


def _stretched(
    a: jax.Array, fill: int, window: Window, shape: tuple[int, ...]
) -> jax.Array:
    """Return for each element of the image what its window has, or `fill`."""
    for k in (0, 1):
        axis, length, stride = k + 1, shape[k + 1], window.strides[k]
        low = window.pads(*shape[1:3])[k][0]
        windows = -(-(low + length) // stride)  # that begin before the image ends
        config = [(0, 0, 0)] * a.ndim
        config[axis] = (0, windows - a.shape[axis], 0)
        a = lax.pad(a, jnp.array(fill, a.dtype), config)
        several = (*a.shape[: axis + 1], stride, *a.shape[axis + 1 :])
        a = jnp.broadcast_to(jnp.expand_dims(a, axis + 1), several)
        a = a.reshape(*several[:axis], windows * stride, *several[axis + 2 :])
        a = lax.slice_in_dim(a, low, low + length, axis=axis)
    return a


def _numbers(window: Window, shape: tuple[int, ...]) -> jax.Array:
    """Return which element of its window each is, int8[1, height, width, 1], or -2."""
    number, inside = jnp.int32(0), jnp.bool_(True)
    for k in (0, 1):
        size, low = window.size[k], window.pads(*shape[1:3])[k][0]
        at = lax.broadcasted_iota(jnp.int32, (1, *shape[1:3], 1), k + 1) + low
        offset = at % window.strides[k]
        number = number * size + offset
        inside &= offset < size
    return jnp.where(inside, number, -2).astype(jnp.int8)


def places(
    window: Window, shape: tuple[int, ...], k: int, phase: int
) -> list[tuple[int, int]]:
    """Return where elements of a phase of an axis lie in the windows that hold them.

    Returns:
      For each such window, in the order of `window.offsets`, the element's number in it
      along the axis, and which window that is, counted from the number of strides.
    """
    at = phase + window.pads(*shape[1:3])[k][0]
    size, stride = window.size[k], window.strides[k]
    return [(n, (at - n) // stride) for n in range(at % stride, size, stride)]


def _moved(a: jax.Array, fill: int, by: Pair, steps: list[int]) -> jax.Array:
    """Return the windows `by` steps on, as many as there are steps, or `fill`."""
    config = [(0, 0, 0)] * a.ndim
    for k in (0, 1):
        config[k + 1] = (-by[k], by[k] + steps[k] - a.shape[k + 1], 0)
    return lax.pad(a, jnp.array(fill, a.dtype), config)


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
