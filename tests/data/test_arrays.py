import jax.numpy as jnp
import numpy as np
import pytest

from rjax.data import from_arrays

LABELS = np.arange(10) % 3


def test_bytes_are_divided_by_255():
    images = np.arange(10 * 5 * 4 * 3, dtype=np.uint8).reshape(10, 5, 4, 3)
    dataset = from_arrays((images, LABELS), (images[:2], LABELS[:2]))
    assert dataset.train[0].dtype == np.float32 and dataset.train[1].dtype == np.int32
    want = images.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(dataset.train[0], want)
    np.testing.assert_array_equal(dataset.train[1], LABELS)
    np.testing.assert_array_equal(dataset.test[0], want[:2])
    assert dataset.num_classes == 3 and dataset.name == "arrays"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
def test_floats_are_taken_as_they_are(dtype):
    images = np.linspace(-2, 3, 10 * 4).reshape(10, 4).astype(dtype)
    dataset = from_arrays((images, LABELS), (images, LABELS))
    assert dataset.train[0].dtype == np.float32
    np.testing.assert_array_equal(dataset.train[0], images.astype(np.float32))


def test_jax_arrays_and_lists():
    images = jnp.ones((10, 4))
    dataset = from_arrays((images, LABELS.tolist()), (images, jnp.asarray(LABELS)))
    for side in (dataset.train, dataset.test):
        assert all(isinstance(array, np.ndarray) for array in side)
        assert side[1].dtype == np.int32


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((10, 7), (10, 7)),
        ((10, 4, 5), (10, 4, 5, 1)),
        ((10, 4, 5, 2), (10, 4, 5, 2)),
        ((10, 2, 4, 5, 1), (10, 2, 4, 5, 1)),
    ],
)
def test_shapes(shape, want):
    pair = np.zeros(shape, np.float32), LABELS
    assert from_arrays(pair, pair).train[0].shape == want


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.uint64])
def test_labels_of_any_integer_dtype(dtype):
    pair = np.zeros((10, 4), np.float32), LABELS.astype(dtype)
    labels = from_arrays(pair, pair).train[1]
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, LABELS)


def test_without_a_test_set_a_share_is_held_out():
    images = np.arange(10, dtype=np.float32)[:, None]
    dataset = from_arrays((images, np.arange(10)), test_fraction=0.3)
    assert dataset.train[0].shape == (7, 1) and dataset.test[0].shape == (3, 1)
    for x, y in (dataset.train, dataset.test):
        np.testing.assert_array_equal(x[:, 0], y)
    assert {*dataset.train[1], *dataset.test[1]} == set(range(10))
    other = from_arrays((images, np.arange(10)), test_fraction=0.3, seed=1)
    assert (other.test[1] != dataset.test[1]).any()


def test_number_of_classes_is_over_both_sets():
    images = np.zeros((10, 4), np.float32)
    assert from_arrays((images, LABELS), (images, LABELS * 4)).num_classes == 9
    assert from_arrays((images, LABELS * 4), (images, LABELS)).num_classes == 9
    dataset = from_arrays((images, LABELS), num_classes=5, class_names=tuple("abcde"))
    assert dataset.num_classes == 5 and dataset.class_names == tuple("abcde")


def test_the_caller_keeps_the_arrays():
    images, labels = np.zeros((10, 4), np.uint8), LABELS.astype(np.int32)
    dataset = from_arrays((images, labels), (images, labels))
    dataset.train[0][:] = 1.0
    dataset.train[1][:] = 7
    assert not images.any() and labels.max() == 2


IMAGES = np.zeros((10, 4), np.float32)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (IMAGES, r"`train` must be a pair \(images, labels\), got ndarray"),
        ((IMAGES, LABELS, LABELS), "`train` must be a pair"),
        ((IMAGES, LABELS[:-1]), "got 10 images and 9 labels"),
        ((IMAGES[:0], LABELS[:0]), r"must not be empty, got images of shape \(0, 4\)"),
        ((IMAGES[:, :0], LABELS), r"must not be empty, got images of shape \(10, 0\)"),
        ((IMAGES[:, 0], LABELS), r"\[n, features\], got shape \(10,\)"),
        ((IMAGES, np.eye(3)[LABELS]), "got float64 of shape .* argmax of one-hot"),
        ((IMAGES, np.eye(3, dtype=int)[LABELS]), r"got int64 of shape \(10, 3\)"),
        ((IMAGES, LABELS * 1.0), r"must be integers \[n\], got float64 .*astype"),
        ((IMAGES, LABELS > 1), r"must be integers \[n\], got bool"),
        ((IMAGES, LABELS[:, None]), r"got int64 of shape \(10, 1\)"),
        ((IMAGES, LABELS - 1), r"must lie in \[0, 2\), got -1 at index 0"),
        ((IMAGES.astype(np.int32), LABELS), "uint8 .* or floating, got int32; scale"),
        ((IMAGES.astype(bool), LABELS), "floating, got bool"),
        ((IMAGES.astype(complex), LABELS), "floating, got complex128"),
        ((np.array(["a"] * 10), LABELS), "floating, got <U1"),
    ],
)
def test_what_cannot_be_used(refuses, train, message):
    with refuses(message):
        from_arrays(train)
    with refuses(message.replace("`train`", "`test`")):
        from_arrays((IMAGES, LABELS % 1), train)


def test_labels_beyond_the_number_of_classes(refuses):
    pair = IMAGES, LABELS
    with refuses(r"the labels of `test` must lie in \[0, 3\), got 3 at index 2"):
        from_arrays(pair, (IMAGES, np.array([0, 2, 3, 9, 0, 0, 0, 0, 0, 0])), 3)
    with refuses(r"the labels of `train` must lie in \[0, 2\), got 2 at index 2"):
        from_arrays(pair, num_classes=2)
    huge = LABELS.astype(np.uint64) + np.uint64(2**63)
    with refuses(r"got 9223372036854775808 at index 0"):
        from_arrays((IMAGES, huge), num_classes=2)


def test_shapes_differ_between_the_sets(refuses):
    with refuses(r"must have one shape, got \(4,\) and \(3,\)"):
        from_arrays((IMAGES, LABELS), (IMAGES[:, :3], LABELS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_fraction": 1.5}, r"`test_fraction` must be in \(0, 1\), got 1.5"),
        ({"test_fraction": 0.01}, "`test_fraction` must leave examples on both sides"),
        ({"seed": -1}, "`seed` must be in"),
        ({"num_classes": 0}, "`num_classes` must be at least 1, got 0"),
        ({"class_names": ("a", "b")}, "`class_names` must have 3 names, .* got 2"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        from_arrays((IMAGES, LABELS), **options)
