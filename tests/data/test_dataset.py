import dataclasses
import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rjax.data import Dataset, from_grain, num_examples, split
from rjax.data.order import permutation

IMAGES = np.random.default_rng(0).random((10, 3, 2, 1)).astype(np.float32)
LABELS = np.arange(10, dtype=np.int32)


def make(images: Any = IMAGES, labels: Any = LABELS):
    return Dataset("made", (images, labels), (images[:4], labels[:4]), 10)


def test_fields():
    dataset = make()
    assert dataset.class_names is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_fingerprint_of_arrays_is_the_sha256_of_their_bytes():
    digest = hashlib.sha256()
    for array in (IMAGES, LABELS, IMAGES[:4], LABELS[:4]):
        digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    dataset = make()
    assert dataset.fingerprint == digest.hexdigest()
    assert dataset.fingerprint is dataset.fingerprint  # computed once
    assert make(np.asfortranarray(IMAGES)).fingerprint == digest.hexdigest()
    assert make(jnp.asarray(IMAGES)).fingerprint == digest.hexdigest()


def test_fingerprint_sees_every_change_of_arrays():
    other = IMAGES.copy()
    other[9, 2, 1, 0] = np.nextafter(other[9, 2, 1, 0], 2)
    dataset = make()
    prints = {
        dataset.fingerprint,
        make(other).fingerprint,
        make(labels=LABELS[::-1]).fingerprint,
        make(IMAGES.reshape(10, 2, 3, 1)).fingerprint,
        make(labels=LABELS.astype(np.int64)).fingerprint,
        make(IMAGES.astype(jnp.bfloat16)).fingerprint,
        dataclasses.replace(dataset, test=dataset.train).fingerprint,
        dataclasses.replace(dataset, train=(IMAGES[:0], LABELS[:0])).fingerprint,
    }
    assert len(prints) == 8


class Source:
    def __init__(self, length=100, changed=None, fingerprint=None):
        self.length, self.changed, self.fingerprint = length, changed, fingerprint
        self.read = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read += 1
        return np.full(3, index + (index == self.changed), np.float32), 0


def lazy(*arguments, **options):
    source = Source(*arguments, **options)
    return from_grain(source, source, num_classes=1), source


def test_fingerprint_of_a_lazy_set_looks_at_a_few_elements():
    pytest.importorskip("grain")
    dataset, source = lazy()
    prints = {
        dataset.fingerprint,
        lazy()[0].fingerprint,
        lazy(length=101)[0].fingerprint,
        lazy(changed=0)[0].fingerprint,
        lazy(changed=99)[0].fingerprint,
    }
    assert len(prints) == 4
    assert source.read == 2 * 16
    mixed = dataclasses.replace(dataset, train=(IMAGES, LABELS))
    assert mixed.fingerprint not in prints
    assert lazy(length=3)[0].fingerprint != lazy(length=3, changed=1)[0].fingerprint


def test_fingerprint_that_a_source_tells():
    pytest.importorskip("grain")
    prints = set()
    for told in ("a", "b"):
        dataset, source = lazy(fingerprint=told)
        prints |= {dataset.fingerprint, lazy(fingerprint=told)[0].fingerprint}
        assert source.read == 0
    assert len(prints) == 2
    # A split tells its own: of the whole, and of the rows.
    for seed in (0, 1):
        source = Source(fingerprint="a")
        held = from_grain(source, num_classes=1, seed=seed)
        prints.add(held.fingerprint)
        assert source.read == 0
    assert len(prints) == 4


@pytest.mark.parametrize("n", [2, 7, 20])
@pytest.mark.parametrize("fraction", [0.5, 0.3, np.float32(0.5)])
def test_split_of_arrays(n, fraction):
    arrays = {"x": np.arange(n) * 2.0, "y": jnp.arange(n)}
    rest, held_out = split(arrays, fraction, seed=4)
    assert num_examples(held_out) == round(n * fraction)
    for side in (rest, held_out):
        np.testing.assert_array_equal(side["x"], 2.0 * np.asarray(side["y"]))
    both = [int(i) for side in (rest, held_out) for i in side["y"]]
    assert sorted(both) == list(range(n))


def test_split_is_a_function_of_seed_and_fraction():
    rows = np.arange(1000)
    first, again, other = (split(rows, 0.2, seed)[1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    # Apart from the shuffles of training with the same seed.
    assert (first != permutation(1000, 0, 0)[:200]).any()
    np.testing.assert_array_equal(split(rows, 0.4)[1][:200], first)


def test_split_rows_are_pinned():
    # Runs of different machines must hold out the same examples.
    np.testing.assert_array_equal(split(np.arange(10), 0.4)[1], [7, 9, 8, 5])


@pytest.mark.parametrize(
    ("fraction", "seed", "message"),
    [
        (0.0, 0, r"`fraction` must be in \(0, 1\), got 0.0"),
        (float("nan"), 0, "`fraction` must be in"),
        (0.01, 0, "`fraction` must leave examples on both sides"),
        (0.99, 0, "`fraction` must leave examples on both sides"),
        (0.5, -1, "`seed` must be in"),
    ],
)
def test_wrong_splits(fraction, seed, message):
    with pytest.raises(ValueError, match=message):
        split(LABELS, fraction, seed)


def test_number_of_examples():
    assert num_examples((IMAGES, LABELS)) == 10
    with pytest.raises(ValueError, match=r"one number of examples .* got \[4, 10\]"):
        num_examples((IMAGES, LABELS[:4]))
