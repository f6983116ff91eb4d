"""What is drawn, over thousands of images, and boxes against a plain loop."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.data import augment
from rjax.data.augment.draws import BOX_DRAWS, random_boxes, whole

COUNT = 4096
SHAPE = (COUNT, 32, 24, 3)
SMALL = (4, 7, 10, 3)
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.uint8]
UNIT = st.floats(0, 1, exclude_max=True, width=32)

_boxes = jax.jit(random_boxes, static_argnums=(1, 2, 3))
_erase = jax.jit(augment.erase, static_argnames="value")


CHANGES = {
    "crop": augment.RandomCrop(1),
    "oblong crop": augment.RandomCrop(2, (34, 20)),
    "no pad": augment.RandomCrop(),
    "small crop": augment.RandomCrop(size=24),
    "flip": augment.RandomHorizontalFlip(0.25),
    "flip none": augment.RandomHorizontalFlip(0.0),
    "flip all": augment.RandomHorizontalFlip(1.0),
    "affine": augment.RandomAffine((-10, 30), (0.5, 2.0)),
    "shift": augment.RandomAffine(20, (0.8, 1.2), translate=(0.25, 0.5)),
    "rotation": augment.RandomRotation((-10, 30)),
    "scale": augment.RandomScale((0.5, 2.0)),
    "jitter": augment.ColorJitter(0.4, 1.5, (0.5, 0.75), 0.1),
    "hue": augment.ColorJitter(contrast=(1.0, 1.0), hue=(0.1, 0.2)),
    "erase": augment.RandomErasing(0.25),
    "resize": augment.RandomResizedCrop(8, area=(0.08, 1.0), aspect=(3 / 4, 4 / 3)),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draws(changes, shape, key):
    return [change.draw(key, shape) for change in changes]


@functools.cache
def _all_draws():
    draws = _draws(tuple(CHANGES.values()), SHAPE, jax.random.key(0))
    return dict(zip(CHANGES, jax.tree.map(np.asarray, draws), strict=True))


def _check_uniform(values, low, high, slack=0.0):
    """Check bounds, and the empirical distribution (Kolmogorov-Smirnov, 1 in 10^4)."""
    slack = max(slack, 1e-6 * max(abs(low), abs(high)))
    assert values.min() >= low - slack and values.max() <= high + slack
    ranks = (np.arange(len(values)) + 0.5) / len(values)
    distance = np.abs((np.sort(values) - low) / (high - low) - ranks).max()
    assert distance < 2.3 / math.sqrt(len(values))


def _check_share(hits, probability):
    sigma = math.sqrt(probability * (1 - probability) / hits.size)
    assert abs(hits.mean() - probability) <= 5 * sigma


def _plain_box(u, shape, area, aspect):
    """Return the box that torchvision would make of these uniform numbers."""
    _, height, width, _ = shape
    tries = (BOX_DRAWS - 2) // 2
    for i in range(tries):
        pixels = height * width * (area[0] + float(u[i]) * (area[1] - area[0]))
        low, high = math.log(aspect[0]), math.log(aspect[1])
        ratio = math.exp(low + float(u[tries + i]) * (high - low))
        columns = round(math.sqrt(pixels * ratio))
        rows = round(math.sqrt(pixels / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(float(u[-2]) * (height - rows + 1))
            left = int(float(u[-1]) * (width - columns + 1))
            return [top, left, rows, columns]
    return None


@pytest.mark.parametrize(
    ("shape", "area", "aspect"),
    [
        ((500, 32, 24, 3), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((500, 5, 40, 1), (0.3, 0.9), (0.5, 4.0)),  # many do not fit
    ],
)
def test_boxes_match_a_plain_loop(shape, area, aspect):
    u = np.random.default_rng(0).random((500, BOX_DRAWS), np.float32)
    boxes, fit = _boxes(u, shape, area, aspect)
    want = [_plain_box(row, shape, area, aspect) for row in u]
    assert [box is not None for box in want] == fit.tolist()
    assert 0.1 < fit.mean() and (shape[1] > 5) == bool(fit.all())
    found = [box for box, fits in zip(boxes.tolist(), fit, strict=True) if fits]
    assert found == [box for box in want if box is not None]


@pytest.mark.parametrize("name", ["erase", "resize"])
def test_boxes_keep_their_ranges(name):
    change, boxes = CHANGES[name], _all_draws()[name]["boxes"]
    top, left, rows, columns = boxes[boxes[:, 2] > 0].T
    _, height, width, _ = SHAPE
    assert len(rows) > 0.2 * COUNT and boxes.dtype == np.int32
    assert top.min() >= 0 and (top + rows).max() <= height
    assert left.min() >= 0 and (left + columns).max() <= width
    # Sides were rounded: the true ones are half a pixel away at most.
    pixels = height * width
    assert ((rows - 0.5) * (columns - 0.5) <= change.area[1] * pixels).all()
    assert ((rows + 0.5) * (columns + 0.5) >= change.area[0] * pixels).all()
    assert ((columns - 0.5) / (rows + 0.5) <= change.aspect[1]).all()
    assert ((columns + 0.5) / (rows - 0.5) >= change.aspect[0]).all()
    # And use them whole: what erases a box tells nothing of its size.
    shares = rows * columns / pixels
    assert shares.min() < change.area[0] + 0.02
    assert shares.max() > 0.9 * change.area[1]


def test_areas_are_uniform_where_every_box_fits():
    u = np.random.default_rng(0).random((COUNT, BOX_DRAWS), np.float32)
    # Only boxes of such images: none is made.
    boxes, fit = _boxes(u, (COUNT, 1000, 1000, 1), (0.1, 0.5), (0.9, 1.1))
    assert fit.all()
    top, left, rows, columns = np.asarray(boxes, np.float64).T
    _check_uniform(rows * columns / 1e6, 0.1, 0.5, slack=1e-3)
    _check_uniform(np.log(columns / rows), math.log(0.9), math.log(1.1), slack=4e-3)
    _check_uniform(top / (1000 - rows), 0, 1, slack=4e-3)
    _check_uniform(left / (1000 - columns), 0, 1, slack=4e-3)


def test_probabilities():
    _check_share(_all_draws()["flip"]["flipped"], 0.25)
    boxes = _all_draws()["erase"]["boxes"]
    _check_share(boxes[:, 2] > 0, 0.25)
    assert (boxes[boxes[:, 2] == 0] == 0).all()
    certain = [_all_draws()[name]["flipped"] for name in ("flip none", "flip all")]
    assert [flipped.mean() for flipped in certain] == [0, 1]


@pytest.mark.parametrize(
    ("name", "pad", "places"),
    [
        ("crop", 1, (3, 3)),
        ("oblong crop", 2, (3, 9)),
        ("no pad", 0, (1, 1)),
        ("small crop", 0, (9, 1)),
    ],
)
def test_crops_reach_every_place_alike(name, pad, places):
    corners = _all_draws()[name]["corners"] + pad
    assert corners.dtype == np.int32 and corners.min() == 0
    counts = np.zeros(places)
    np.add.at(counts, tuple(corners.T), 1)
    expected = COUNT / counts.size
    assert (abs(counts - expected) <= 5 * math.sqrt(expected)).all()


def test_affine_draws():
    drawn = _all_draws()["shift"]
    _check_uniform(drawn["degrees"], -20, 20)
    _check_uniform(drawn["scale"], 0.8, 1.2)
    _check_uniform(drawn["shift"][:, 0], -8, 8)
    _check_uniform(drawn["shift"][:, 1], -12, 12)
    columns = [drawn["degrees"], drawn["scale"], *drawn["shift"].T]
    correlation = np.corrcoef(columns) - np.eye(4)
    assert abs(correlation).max() < 5 / math.sqrt(COUNT)


def test_an_option_left_out_moves_no_other_draw():
    both, turn, zoom = (_all_draws()[name] for name in ("affine", "rotation", "scale"))
    np.testing.assert_array_equal(turn["degrees"], both["degrees"])
    np.testing.assert_array_equal(zoom["scale"], both["scale"])
    _check_uniform(both["degrees"], -10, 30)
    _check_uniform(both["scale"], 0.5, 2)
    assert (both["shift"] == 0).all()


def test_jitter_draws():
    drawn = _all_draws()["jitter"]
    _check_uniform(drawn["brightness"], 0.6, 1.4)
    _check_uniform(drawn["contrast"], 0, 2.5)
    _check_uniform(drawn["saturation"], 0.5, 0.75)
    _check_uniform(drawn["hue"], -0.1, 0.1)
    only = _all_draws()["hue"]
    assert list(only) == ["hue"]
    _check_uniform(only["hue"], 0.1, 0.2)
    assert augment.ColorJitter().draw(jax.random.key(0), SHAPE) == {}


@given(UNIT, st.integers(1, 2**22))
def test_whole_stays_below_its_count(u, count):
    got = int(whole(jnp.float32(u), count))
    assert 0 <= got < count
    last = int(whole(jnp.float32(1 - 2**-23), count))
    assert last == count - 1 or count > 2**21


@pytest.mark.parametrize("dtype", DTYPES)
def test_erase_changes_the_inside_only(dtype):
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, SMALL), dtype)
    boxes = np.array([[0, 0, 7, 10], [2, 3, 4, 6], [6, 9, 1, 1], [3, 4, 0, 5]])
    value = (1.0, 2.0, 3.0)
    got = _erase(images, boxes.astype(np.int32), value)
    want = np.array(images)
    for n, (top, left, rows, columns) in enumerate(boxes):
        want[n, top : top + rows, left : left + columns] = value
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), want)


def test_boxes_that_never_fit():
    flat, high, area = (2.0, 3.0), (0.25, 0.5), (0.9, 1.0)
    tower, plain = (3, 20, 9, 1), (3, 9, 20, 1)

    @jax.jit
    def draw(key):
        return (
            augment.RandomErasing(1.0, area, flat).draw(key, tower)["boxes"],
            augment.RandomResizedCrop(4, area, flat).draw(key, tower)["boxes"],
            augment.RandomResizedCrop(4, area, high).draw(key, plain)["boxes"],
        )

    erased, lying, standing = draw(jax.random.key(0))
    assert not erased.any()
    # The largest box about the centre that is flat, or high, enough.
    assert lying.tolist() == [[8, 0, 4, 9]] * 3
    assert standing.tolist() == [[0, 8, 9, 4]] * 3
