"""Crops, flips and resampling against one pixel after the other in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.data import augment

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.uint8]
SHAPE = (4, 7, 10, 3)
FILL = {"float": (0.25, 0.5, 1.0), "uint8": (64.0, 128.0, 255.0)}

_crop = jax.jit(augment.crop, static_argnames=("size", "fill"))
_flip = jax.jit(augment.horizontal_flip)
_affine = jax.jit(augment.affine, static_argnames="fill")
_resized = jax.jit(augment.resized_crop, static_argnames="size")


@functools.cache
def _images(dtype=jnp.float32, shape=SHAPE):
    rng = np.random.default_rng(0)
    if dtype == jnp.uint8:
        return jnp.asarray(rng.integers(0, 256, shape), dtype)
    return jnp.asarray(rng.random(shape), dtype)


def _fill(dtype):
    return FILL["uint8" if dtype == jnp.uint8 else "float"]


def _f64(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def _pixel(image, row, column, fill):
    height, width, _ = image.shape
    if 0 <= row < height and 0 <= column < width:
        return image[row, column]
    return np.broadcast_to(np.asarray(fill, np.float64), image.shape[2:])


def _bilinear(image, row, column, fill):
    top, left = math.floor(row), math.floor(column)
    down, right = row - top, column - left
    return (
        (1 - down) * (1 - right) * _pixel(image, top, left, fill)
        + (1 - down) * right * _pixel(image, top, left + 1, fill)
        + down * (1 - right) * _pixel(image, top + 1, left, fill)
        + down * right * _pixel(image, top + 1, left + 1, fill)
    )


def _reference_crop(images, corners, size, fill):
    out = np.zeros((len(images), *size, images.shape[3]))
    for n, i, j in np.ndindex(out.shape[:3]):
        top, left = corners[n]
        out[n, i, j] = _pixel(images[n], top + i, left + j, fill)
    return out


def _reference_affine(images, degrees, scale, shift, fill):
    """Invert, for each image, where its content goes: turned, zoomed, moved."""
    out = np.zeros(images.shape)
    middle = (np.array(images.shape[1:3]) - 1) / 2
    for n in range(len(images)):
        cosine, sine = (
            math.cos(math.radians(degrees[n])),
            math.sin(math.radians(degrees[n])),
        )
        # Of (down, right): a turn to the left takes what lies right upwards.
        forward = scale[n] * np.array([[cosine, -sine], [sine, cosine]])
        backward = np.linalg.inv(forward)
        for i, j in np.ndindex(images.shape[1:3]):
            row, column = middle + backward @ ((i, j) - middle - shift[n])
            out[n, i, j] = _bilinear(images[n], row, column, fill)
    return out


def _reference_resized(images, boxes, size):
    out = np.zeros((len(images), *size, images.shape[3]))
    for n, (top, left, height, width) in enumerate(boxes):
        box = images[n, top : top + height, left : left + width]
        for i, j in np.ndindex(size):
            row = min(max((i + 0.5) * height / size[0] - 0.5, 0), height - 1)
            column = min(max((j + 0.5) * width / size[1] - 0.5, 0), width - 1)
            out[n, i, j] = _bilinear(box, row, column, 0)
    return out


def _check_mixed(got, want, dtype):
    """Compare values in the units of the images; places are off by some float32 ULP."""
    assert got.dtype == dtype and got.shape == want.shape
    full = 255 if dtype == jnp.uint8 else 1
    tolerance = 4 * float(np.finfo(np.float32).eps) * sum(SHAPE[1:3]) * full
    # And one rounding, to the nearest.
    if dtype == jnp.uint8:
        tolerance += 0.5
    elif dtype != jnp.float32:
        tolerance += float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(_f64(got), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "size"), [*((dtype, (5, 12)) for dtype in DTYPES), (jnp.float32, (1, 1))]
)
def test_crop(dtype, size):
    images, fill = _images(dtype), _fill(dtype)
    corners = np.array([[0, 0], [-2, 3], [4, -5], [20, -30]])
    got = _crop(images, corners.astype(np.int32), size, fill)
    want = _reference_crop(_f64(images), corners, size, fill)
    assert got.dtype == dtype
    np.testing.assert_array_equal(_f64(got), want)


@given(st.data())
def test_crop_is_a_slice_of_the_padded_image(data):
    pad = 3
    places = st.tuples(st.integers(0, 2 * pad), st.integers(0, 2 * pad))
    corners = np.array(data.draw(st.lists(places, min_size=4, max_size=4)), np.int32)
    got = _crop(_images(), corners - pad, (7, 10))
    padded = np.pad(_f64(_images()), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    for n, (top, left) in enumerate(corners):
        want = padded[n, top : top + 7, left : left + 10]
        np.testing.assert_array_equal(got[n], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flip(dtype):
    flipped = np.array([True, False, False, True])
    got = _flip(_images(dtype), flipped)
    want = _f64(_images(dtype)).copy()
    for n, i, j in np.ndindex(SHAPE[:3]):
        if flipped[n]:
            want[n, i, j] = _f64(_images(dtype))[n, i, SHAPE[2] - 1 - j]
    assert got.dtype == dtype
    np.testing.assert_array_equal(_f64(got), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_affine(dtype):
    images, fill = _images(dtype), _fill(dtype)
    degrees = np.array([20.0, -35.0, 170.0, -100.0], np.float32)
    scale = np.array([0.8, 1.2, 0.5, 3.0], np.float32)
    shift = np.array([[0, 0], [1.5, -2], [-0.25, 3], [0, 1]], np.float32)
    got = _affine(images, degrees, scale, shift, fill=fill)
    want = _reference_affine(_f64(images), degrees, scale, shift, fill)
    _check_mixed(got, want, dtype)


@given(st.floats(-400, 400, width=32), st.floats(0.25, 4, width=32))
def test_any_angle_and_zoom(degrees, scale):
    angle = np.full(4, degrees, np.float32)
    zoom = np.full(4, scale, np.float32)
    got = _affine(_images(), angle, zoom, np.zeros((4, 2), np.float32), fill=0.5)
    want = _reference_affine(_f64(_images()), angle, zoom, np.zeros((4, 2)), 0.5)
    # A zoom out by 4 quadruples the slope; an angle of 400 has 32 ULP of one of 10.
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.uint8])
def test_quarter_turns_are_exact(dtype):
    images = _images(dtype, (4, 9, 9, 3))
    degrees = jnp.array([90.0, 180.0, -450.0, 0.0])
    got = _affine(images, degrees, fill=_fill(dtype))
    for n, turns in enumerate((1, 2, -1, 0)):
        np.testing.assert_array_equal(_f64(got)[n], np.rot90(_f64(images)[n], turns))


def test_whole_shifts_and_half_turns_of_an_oblong_image():
    images, angle = _images(), jnp.array([0.0, 0.0, 180.0, 180.0])
    shift = jnp.array([[0.0, 0.0], [2.0, -3.0], [0.0, 0.0], [-1.0, 0.0]])
    got = _affine(images, angle, jnp.ones(4), shift, fill=0.5)
    np.testing.assert_array_equal(got[0], images[0])
    np.testing.assert_array_equal(got[1, 2:, :7], images[1, :5, 3:])
    assert (got[1, :2] == 0.5).all() and (got[1, :, 7:] == 0.5).all()
    np.testing.assert_array_equal(got[2], images[2, ::-1, ::-1])
    np.testing.assert_array_equal(got[3, :6], images[3, 5::-1, ::-1])


def test_eager_equals_jitted():
    images, angle = _images(), jnp.array([20.0, -35.0, 170.0, 90.0])
    corners = jnp.array([[0, 0], [-2, 3], [4, -5], [1, 1]])
    want = _crop(images, corners, (5, 12))
    np.testing.assert_array_equal(augment.crop(images, corners, (5, 12)), want)
    # A compiler may contract a product and a sum into one rounding.
    _check_mixed(
        augment.affine(images, angle), _f64(_affine(images, angle)), jnp.float32
    )


def test_zoom_by_two_about_the_centre():
    # The centre of 3 by 3 stays, its neighbours come from half a pixel away.
    image = jnp.arange(9.0).reshape(1, 3, 3, 1)
    got = _affine(image, scale=2.0)[0, :, :, 0]
    np.testing.assert_array_equal(got, [[2, 2.5, 3], [3.5, 4, 4.5], [5, 5.5, 6]])


def test_the_ground_begins_at_the_edge():
    # Half a pixel beyond the last one, half of the value is that of the ground.
    got = _affine(jnp.ones((1, 1, 3, 1)), shift=jnp.array([0.0, 1.5]), fill=3.0)
    np.testing.assert_array_equal(got.ravel(), [3, 2, 1])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [*((dtype, (7, 10)) for dtype in DTYPES), (jnp.float32, (3, 13))],
)
def test_resized_crop(dtype, size):
    boxes = np.array([[0, 0, 7, 10], [2, 3, 4, 6], [6, 9, 1, 1], [1, 0, 5, 2]])
    got = _resized(_images(dtype), boxes.astype(np.int32), size)
    want = _reference_resized(_f64(_images(dtype)), boxes, size)
    _check_mixed(got, want, dtype)
    if size == SHAPE[1:3]:
        np.testing.assert_array_equal(_f64(got)[0], _f64(_images(dtype))[0])


def test_nothing_outside_a_box_is_seen():
    box = np.array([2, 3, 3, 4], np.int32)
    images = np.full(SHAPE, np.inf, np.float32)
    images[:, 2:5, 3:7] = 1
    # Infinity times a weight of zero would be NaN: keep the ring around it finite.
    images[:, [1, 5], 2:8], images[:, 1:6, [2, 7]] = 1e6, 1e6
    got = _resized(images, box, size=(8, 8))
    np.testing.assert_array_equal(got, np.ones((4, 8, 8, 3)))


def test_options_reach_the_function():
    images, fill = _images(), (1.0, 2.0, 3.0)
    far = jnp.full((4, 2), 100)

    @jax.jit
    def change(images):
        turn, zoom = jnp.full(4, 45.0), jnp.full(4, 0.5)
        moved = {"degrees": turn, "scale": zoom, "shift": jnp.full((4, 2), 9.0)}
        return (
            augment.RandomCrop(1, (5, 6), fill).apply(images, {"corners": far}),
            augment.RandomRotation(45, fill).apply(images, {"degrees": turn}),
            augment.RandomScale((0.5, 1.0), fill).apply(images, {"scale": zoom}),
            augment.RandomAffine(45, (0.5, 1.0), 1.0, fill).apply(images, moved),
            augment.RandomErasing(1.0, value=fill).apply(
                images, {"boxes": jnp.array([[0, 0, 1, 1]] * 4)}
            ),
        )

    cropped, *others = change(images)
    np.testing.assert_array_equal(cropped, np.broadcast_to(fill, (4, 5, 6, 3)))
    for other in others:
        np.testing.assert_array_equal(other[:, 0, 0], [fill] * 4)
