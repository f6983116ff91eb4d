import dataclasses
import functools
import itertools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rjax.ops.max_pool import Window, base, max_pool

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
ONE_AROUND = ((1, 1), (1, 1))
RESNET = (3, 2, ONE_AROUND)

# Shape of x, then size, strides and padding.
CASES = [
    ((2, 6, 4, 2), (2, None, "VALID")),
    ((1, 5, 7, 3), (2, None, "VALID")),
    ((2, 5, 8, 1), ((2, 3), None, "VALID")),
    ((2, 8, 9, 2), (2, 3, "VALID")),
    ((1, 7, 8, 2), (2, 3, "SAME")),
    ((1, 5, 4, 2), (2, 1, "SAME")),
    ((1, 4, 5, 2), (3, 1, "SAME")),
    ((1, 6, 7, 2), (3, 2, "SAME")),
    ((2, 7, 8, 3), RESNET),
    ((2, 4, 5, 1), (3, (1, 2), ((0, 2), (2, 1)))),
    ((1, 6, 5, 2), ((2, 3), (3, 1), ((1, 0), (0, 2)))),
    ((2, 1, 1, 2), (3, 1, ONE_AROUND)),
    ((2, 1, 2, 1), (3, 3, ((2, 2), (2, 1)))),
    ((2, 3, 4, 1), (1, 2, "VALID")),
]


def _padding(n, size, stride, padding, axis):
    if padding == "VALID":
        return 0, 0
    if padding == "SAME":
        total = max((math.ceil(n / stride) - 1) * stride + size - n, 0)
        return total // 2, total - total // 2
    return padding[axis]


def _windows(shape, size, strides, padding):
    """Return, for each row and column of y, where in x its window has elements."""
    places = []
    for axis in (0, 1):
        k = size if isinstance(size, int) else size[axis]
        s = k if strides is None else strides
        s = s if isinstance(s, int) else s[axis]
        n = shape[axis + 1]
        low, high = _padding(n, k, s, padding, axis)
        starts = range(-low, n + high - k + 1, s)
        places.append([[p for p in range(a, a + k) if 0 <= p < n] for a in starts])
    return places


def _reference(x, ct, size, strides, padding):
    """Return float64 y and dx, one window after the other."""
    rows, columns = _windows(x.shape, size, strides, padding)
    batch, _, _, channels = x.shape
    y = np.zeros((batch, len(rows), len(columns), channels))
    dx = np.zeros(x.shape)
    for b, r, c, f in np.ndindex(y.shape):
        best = None
        for i, j in itertools.product(rows[r], columns[c]):
            value = x[b, i, j, f]
            if best is None or value > x[best] or np.isnan(value) > np.isnan(x[best]):
                best = (b, i, j, f)
        assert best is not None
        y[b, r, c, f] = x[best]
        dx[best] += ct[b, r, c, f]
    return y, dx


def _f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def _case(shape, window, dtype, values=(-np.inf, -1.0, 0.0, 2.0)):
    """Return x with many ties, and ct: half of all sums of it are not in `dtype`."""
    rng = np.random.default_rng(0)
    rows, columns = _windows(shape, *window)
    out = (shape[0], len(rows), len(columns), shape[3])
    most = 2 ** min(jnp.finfo(dtype).nmant + 1, 20)
    ct = rng.integers(-most + 1, most, out) / 64
    x = rng.choice(values, shape)
    return jnp.asarray(x, dtype), jnp.asarray(ct, dtype)


@functools.partial(jax.jit, static_argnums=2)
def _both(x, ct, window=RESNET):
    y, pullback = jax.vjp(lambda x: max_pool(x, *window), x)
    return y, *pullback(ct)


def _check(x, ct, window):
    y, dx = _both(x, ct, window)
    want_y, want_dx = _reference(_f64(x), _f64(ct), *window)
    assert (y.dtype, dx.dtype) == (x.dtype, x.dtype)
    np.testing.assert_array_equal(_f64(y), want_y)
    # The sums are exact in float32, so this is one rounding.
    np.testing.assert_array_equal(_f64(dx), _f64(want_dx.astype(x.dtype)))
    return dx, want_dx


@pytest.mark.parametrize(("shape", "window"), CASES)
def test_value_and_gradient_match_float64(shape, window):
    _check(*_case(shape, window, jnp.float32), window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [(-np.inf, 1.0, 3.0), (np.nan, 0.0, 1.0, 1.5, 2.0)])
def test_every_dtype(dtype, values):
    shape = (3, 9, 9, 2)
    dx, exact = _check(*_case(shape, RESNET, dtype, values), RESNET)
    if dtype != jnp.float32:
        assert (_f64(dx) != exact).any(), "nothing had to be rounded"


def test_nan_shows_and_takes_the_gradient():
    x = jnp.array([[jnp.inf, jnp.nan], [jnp.nan, 1.0]])[None, :, :, None]
    y, dx = _both(x, jnp.ones((1, 1, 1, 1)), (2,))
    assert np.isnan(y).all()
    np.testing.assert_array_equal(dx.ravel(), [0.0, 1.0, 0.0, 0.0])


def test_padding_gets_no_gradient_from_minus_infinity():
    x = jnp.full((1, 4, 4, 1), -jnp.inf)
    y, dx = _both(x, jnp.ones((1, 2, 2, 1)))
    assert (y == -jnp.inf).all()
    want = np.zeros((4, 4))
    want[:2, :2] = 1.0  # where in the image each window starts
    np.testing.assert_array_equal(dx[0, :, :, 0], want)
    oblong = ((2, 3), 1, ((1, 0), (2, 1)))
    _check(*_case((1, 3, 4, 1), oblong, jnp.float32, [-np.inf]), oblong)


@pytest.mark.parametrize("window", [(2, 2, "VALID"), RESNET, (3, 2, "SAME")])
def test_agrees_with_flax_where_nothing_ties(window):
    size, stride, padding = window
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.permutation(2 * 8 * 7 * 3).reshape(2, 8, 7, 3), jnp.float32)

    @jax.jit
    def run(x):
        def flax(x):
            return nn.max_pool(x, (size, size), (stride, stride), padding)

        want, pullback = jax.vjp(flax, x)
        ct = jnp.sin(want)
        return (want, *pullback(ct)), _both(x, ct, window)

    want, got = run(x)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], 0, 4 * float(jnp.finfo(x.dtype).eps))


def test_sums_are_in_the_order_of_the_offsets():
    x, ct = _case((2, 7, 8, 3), RESNET, jnp.float32)
    ct = jnp.asarray(np.random.default_rng(1).normal(size=ct.shape), jnp.float32)
    index = np.asarray(base.first_largest(x, Window(*RESNET)))
    want = np.zeros((2, 7 + 2, 8 + 2, 3), np.float32)
    for k, (i, j) in enumerate(itertools.product(range(3), range(3))):
        grid = want[:, i : i + 2 * 4 - 1 : 2, j : j + 2 * 4 - 1 : 2]
        grid += np.where(index == k, np.asarray(ct), np.float32(0))
    first, second = (np.asarray(_both(x, ct)[1]) for _ in range(2))
    np.testing.assert_array_equal(first, want[:, 1:-1, 1:-1])
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("window", [(2, 2, "VALID"), RESNET])
def test_nothing_but_elementwise_work(window):
    x, ct = _case((2, 8, 8, 2), window, jnp.float16)
    traced = _both.trace(x, ct, window)
    lowered = [traced.lower(lowering_platforms=(p,)) for p in ("cpu", "cuda")]
    texts = [each.as_text() for each in lowered]
    texts.append(str(traced.lower().compile().as_text()))
    for text in texts:
        assert "maximum" in text  # there is something to read
        found = re.search(r"reduce.?window|scatter|gather|dynamic|sort|while", text)
        assert found is None, found


def test_one_byte_a_window_is_kept():
    x, _ = _case((2, 6, 6, 3), RESNET, jnp.float16)
    y, pullback = jax.vjp(lambda x: max_pool(x, *RESNET), x)
    (kept,) = jax.tree.leaves(pullback)
    assert (kept.shape, kept.dtype) == (y.shape, jnp.int8)


def test_vmap_and_scan():
    cases = [_case((2, 5, 6, 2), RESNET, jnp.float16, v) for v in ([0, 1], [3, 5, 7])]
    x, ct = (jnp.stack(a) for a in zip(*cases, strict=True))
    want = [_both(*case) for case in cases]
    mapped = jax.jit(jax.vmap(_both))(x, ct)
    _, scanned = lax.scan(lambda _, case: (None, _both(*case)), None, (x, ct))
    for got in (mapped, scanned):
        for k in (0, 1):
            np.testing.assert_array_equal(got[k], jnp.stack([w[k] for w in want]))


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_shard_map(spec):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x, ct = _case((2, 5, 6, 2), RESNET, jnp.float16)
    sharded = jax.shard_map(_both, mesh=mesh, in_specs=spec, out_specs=spec)
    for got, want in zip(jax.jit(sharded)(x, ct), _both(x, ct), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 4, 4, 0)])
def test_no_images_and_no_channels(shape):
    ct = jnp.zeros((shape[0], 2, 2, shape[3]))
    y, dx = _both(jnp.zeros(shape), ct)
    assert (y.shape, dx.shape) == (ct.shape, shape)


def test_parts_for_other_ops():
    window = Window(3, 2, "SAME")
    x, dy = _case((2, 6, 7, 2), (3, 2, "SAME"), jnp.float32)
    index = jax.jit(base.first_largest, static_argnums=1)(x, window)
    assert index.dtype == jnp.int8 and index.shape == base.pooled(x, window).shape
    none = jnp.full_like(index, -1)
    spread = jax.jit(lambda index, dy: base.spread(index, dy, window, x.shape))
    np.testing.assert_array_equal(spread(none, dy), 0.0)
    masked = jnp.where(dy > 0.0, index, none)
    got = spread(masked, dy)
    want = spread(index, jnp.maximum(dy, 0.0))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)


def test_window_is_a_normalised_value():
    same = Window(2), Window([2, 2], 2), Window(np.int64(2), (2, 2), "VALID")  # type: ignore[arg-type]
    assert len(set(same)) == 1
    assert Window(3, 2, [[1, 1], [0, 2]]).padding == ((1, 1), (0, 2))  # type: ignore[arg-type]
    assert Window((2, 1)).offsets == ((0, 0), (1, 0))
    overlaps = [Window(2, s).overlaps for s in ((2, 2), (3, 2), (1, 2), (2, 1))]
    assert overlaps == [False, False, True, True]
    with pytest.raises(dataclasses.FrozenInstanceError):
        same[0].size = (3, 3)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((4, 4, 3), {}, "`x` must have the axes .* got shape \\(4, 4, 3\\)"),
        ((1, 4, 4, 1), {"size": 0}, "`size` must be an integer of at least 1"),
        ((1, 4, 4, 1), {"size": (2, 2, 2)}, "`size` must be an integer"),
        ((1, 4, 4, 1), {"size": 2.0}, "`size` must be an integer"),
        ((1, 14, 14, 1), {"size": 14}, "`size` must have at most 127 elements"),
        ((1, 4, 4, 1), {"strides": (1, 0)}, "`strides` must be an integer"),
        ((1, 4, 4, 1), {"padding": "same"}, "`padding` must be .* got 'same'"),
        ((1, 4, 4, 1), {"padding": 1}, "`padding` must be .* got 1"),
        ((1, 4, 4, 1), {"padding": (1, 1)}, "`padding` must be .* got \\(1, 1\\)"),
        ((1, 4, 4, 1), {"padding": ((0, 1), (-1, 0))}, "`padding` must be .* got"),
        ((1, 4, 4, 1), {"padding": ((0, 0), (0, 2))}, "must be below `size` \\(2, 2"),
        ((1, 1, 4, 1), {}, "`size` must be at most the padded image, got \\(2, 2\\)"),
        ((1, 4, 0, 1), {"padding": ONE_AROUND}, "for an image of \\(4, 0\\)"),
        ((1, 0, 4, 1), {"padding": "SAME"}, "for an image of \\(0, 4\\)"),
    ],
)
def test_wrong_arguments(shape, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        max_pool(jnp.zeros(shape), **arguments)
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_wrong_dtypes(dtype):
    with pytest.raises(ValueError, match="`x` must be floating, of 16 bits or more"):
        max_pool(jnp.zeros((1, 4, 4, 1), dtype))


def test_no_kernel_yet():
    with pytest.raises(NotImplementedError, match="`max_pool` has no 'mosaic_gpu'"):
        max_pool(jnp.zeros((1, 4, 4, 1)), implementation="mosaic_gpu")
