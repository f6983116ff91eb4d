import sys

import numpy as np
import pytest

from rjax.data import load_digits

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def digits():
    return load_digits()


def test_shapes_dtypes_and_range(digits):
    for (images, labels), n in ((digits.train, 1438), (digits.test, 359)):
        assert images.shape == (n, 8, 8, 1) and images.dtype == np.float32
        assert labels.shape == (n,) and labels.dtype == np.int32
        assert images.min() == 0.0 and images.max() == 1.0
        assert set(labels) == set(range(10))
    assert digits.name == "digits" and digits.num_classes == 10


def test_split_keeps_every_image_and_its_label(digits):
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    want = np.column_stack([images / 16.0, labels])
    parts = (digits.train, digits.test)
    got = np.concatenate(
        [np.column_stack([x.reshape(len(x), -1), y]) for x, y in parts]
    )
    np.testing.assert_array_equal(
        got[np.lexsort(got.T)], want[np.lexsort(want.T)].astype(np.float64)
    )


def test_split_is_a_function_of_the_seed(digits):
    again, other = load_digits(), load_digits(seed=1)
    np.testing.assert_array_equal(again.test[1], digits.test[1])
    assert (other.test[1] != digits.test[1]).any()
    assert (digits.test[1][1:] != digits.test[1][:-1]).any()


def test_fraction(digits):
    half = load_digits(test_fraction=0.5)
    assert len(half.test[1]) == 898 and len(half.train[1]) == 899
    np.testing.assert_array_equal(half.test[1][:359], digits.test[1])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match=r"`test_fraction` must be in \(0, 1\)"):
        load_digits(test_fraction=fraction)


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
def test_fraction_that_leaves_a_side_empty(fraction):
    with pytest.raises(ValueError, match="must leave examples on both sides"):
        load_digits(test_fraction=fraction)


def test_negative_seed():
    with pytest.raises(ValueError, match="`seed` must be in"):
        load_digits(seed=-1)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"scikit-learn.*rjax\[data\]"):
        load_digits()
