"""Colors against colorsys and numpy in float64; normalization."""

import colorsys
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.data import augment

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.uint8]
NAMES = ("brightness", "contrast", "saturation", "hue")
SHAPE = (4, 5, 6, 3)
BY = {
    "brightness": [0.5, 1.3, 1.0, 0.0],
    "contrast": [1.7, 0.5, 0.0, 1.2],
    "saturation": [0.0, 1.5, 0.7, 2.0],
    "hue": [0.1, -0.4, 0.5, 1 / 3],
}

_adjust = jax.jit(augment.adjust_color)
_normalize = jax.jit(augment.normalize, static_argnames=("mean", "std", "dtype"))


@functools.cache
def _images(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = rng.random(SHAPE)
    x[0, 0] = x[0, 0, :, :1]  # greys
    x[0, 1] = np.eye(3)[[0, 1, 2, 0, 1, 2]]  # pure colors
    x[0, 2, :3] = [[1, 1, 0], [0, 1, 1], [1, 0, 1]]  # two that are largest
    x[0, 3, :2] = [[0, 0, 0], [1, 1, 1]]
    x[0, 4, :3] = [[0.9, 0.1, 0.10001], [0.9, 0.10001, 0.1], [0.1, 0.9, 0.9]]
    return jnp.asarray(np.round(x * 255) if dtype == jnp.uint8 else x, dtype)


def _f64(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def _grey(x):
    return x @ np.array([0.299, 0.587, 0.114])


def _turned(pixel, turns):
    hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
    return colorsys.hsv_to_rgb((hue + turns) % 1.0, saturation, value)


def _reference(images, by):
    """Adjust one image after the other, in [0, 1] and float64."""
    out = np.array(images)
    for n, x in enumerate(out):
        if "brightness" in by:
            x[:] = np.clip(by["brightness"][n] * x, 0, 1)
        if "contrast" in by:
            f = by["contrast"][n]
            x[:] = np.clip(f * x + (1 - f) * _grey(x).mean(), 0, 1)
        if "saturation" in by:
            f = by["saturation"][n]
            x[:] = np.clip(f * x + (1 - f) * _grey(x)[..., None], 0, 1)
        if "hue" in by:
            for place in np.ndindex(x.shape[:2]):
                x[place] = _turned(x[place], by["hue"][n])
    return out


def _check(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    # Hue divides by the chroma and multiplies by it again: some ULP of 6 sixths.
    tolerance = 32 * float(np.finfo(np.float32).eps)
    if dtype == jnp.uint8:
        tolerance, want = 255 * tolerance + 0.5, 255 * want
    elif dtype != jnp.float32:
        tolerance += float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(_f64(got), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        *(((name,), jnp.float32) for name in NAMES),
        *((NAMES, dtype) for dtype in DTYPES),
    ],
)
def test_colors(names, dtype):
    by = {name: BY[name] for name in names}
    images = _images(dtype)
    got = _adjust(images, **{name: jnp.array(by[name]) for name in names})
    x = _f64(images) / (255 if dtype == jnp.uint8 else 1)
    _check(got, _reference(x, by), dtype)


def test_eager_equals_jitted():
    by = {name: jnp.array(BY[name]) for name in NAMES}
    eager = augment.adjust_color(_images(), **by)
    _check(eager, _f64(_adjust(_images(), **by)), jnp.float32)


@given(st.floats(-2, 2, width=32))
def test_any_hue(turns):
    got = _adjust(_images(), hue=jnp.full(4, turns, jnp.float32))
    want = _reference(_f64(_images()), {"hue": [turns] * 4})
    _check(got, want, jnp.float32)


def test_known_hues():
    pure = np.asarray(_images())[0, 1]
    turns = jnp.array([1 / 3, 0, 0, 0])
    third = _adjust(_images(), hue=turns)[0, 1]
    np.testing.assert_allclose(third, np.roll(pure, 1, axis=-1), atol=1e-6)
    opposite = _adjust(_images(), hue=0.5 + 0 * turns)[0, 1]
    np.testing.assert_allclose(opposite, 1 - pure, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_of_one_change_at_most_the_last_place(dtype):
    by = {name: jnp.full(4, float(name != "hue")) for name in NAMES}
    got = _adjust(_images(dtype), **by)
    images = _f64(_images(dtype))
    scale = 255 if dtype == jnp.uint8 else 1
    _check(got, images / scale, dtype)
    if dtype == jnp.uint8:
        np.testing.assert_array_equal(_f64(got), images)


def test_an_image_does_not_see_its_neighbours():
    factor = jnp.array(BY["contrast"])
    got = _adjust(_images(), contrast=factor)
    moved = _adjust(_images()[::-1], contrast=factor[::-1])
    np.testing.assert_array_equal(moved[::-1], got)


def test_jitter_applies_what_it_draws():
    change = augment.ColorJitter(0.4, 0.3, 0.2, 0.1)
    key = jax.random.key(5)
    by = jax.tree.map(_f64, change.draw(key, SHAPE))
    assert sorted(by) == sorted(NAMES)
    _check(change(key, _images()), _reference(_f64(_images()), by), jnp.float32)


@pytest.mark.parametrize(
    ("dtype", "into"),
    [
        *((dtype, None) for dtype in DTYPES),
        (jnp.uint8, jnp.float16),
        (jnp.float16, jnp.float32),
    ],
)
def test_normalize(dtype, into):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    got = _normalize(_images(dtype), mean, std, into)
    x = _f64(_images(dtype)) / (255 if dtype == jnp.uint8 else 1)
    want = (x - mean) / std
    kept = jnp.float32 if dtype == jnp.uint8 else dtype
    assert got.dtype == (kept if into is None else into)
    half = 0 if got.dtype == jnp.float32 else float(jnp.finfo(got.dtype).eps) / 2
    # Two constants, a product and a sum of at most 1 / std; then one rounding.
    tolerance = 2 * float(np.finfo(np.float32).eps) / min(std)
    np.testing.assert_allclose(_f64(got), want, rtol=half, atol=tolerance)


def test_normalize_with_one_number_for_all_channels():
    got = _normalize(jnp.full((1, 2, 2, 5), 0.75), 0.5, 0.25)
    np.testing.assert_array_equal(got, np.ones((1, 2, 2, 5)))


@pytest.mark.parametrize(
    ("name", "channels"), [("mnist", 1), ("cifar10", 3), ("imagenet", 3)]
)
def test_presets(name, channels):
    change = augment.Normalize.preset(name)
    mean, std = np.array(change.mean), np.array(change.std)
    assert mean.shape == std.shape == (channels,)
    images = jnp.broadcast_to(jnp.asarray(mean + std, jnp.float32), (2, 3, 3, channels))
    np.testing.assert_allclose(change(None, images), 1, rtol=1e-6)
    half = augment.Normalize.preset(name, jnp.float16)
    assert half(None, images).dtype == jnp.float16
    assert half == augment.Normalize.preset(name, "float16")
