import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.data import batch_at, batch_indices, evaluation_batches, steps_per_epoch

PINNED = [[0, 2, 9, 1, 8, 5, 4, 3, 6, 7], [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]]
SIZES = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(1, n), st.integers(0, 2**64 - 1))
)


@given(SIZES, st.integers(0, 5))
def test_an_epoch_has_no_example_twice(sizes, epoch):
    n, batch, seed = sizes
    steps = steps_per_epoch(n, batch)
    rows = [batch_indices(n, batch, seed, epoch * steps + i) for i in range(steps)]
    seen = np.concatenate(rows)
    assert seen.dtype == np.int32 and len(seen) == steps * batch
    assert len(set(seen)) == len(seen) and seen.min() >= 0 and seen.max() < n


def test_pure_in_seed_and_step():
    steps = [7, 0, 123, 7, 3, 0]
    rows = {step: batch_indices(100, 9, 5, step) for step in steps}
    for step in steps:
        np.testing.assert_array_equal(batch_indices(100, 9, 5, step), rows[step])
    assert (rows[0] != rows[7]).any()
    assert (batch_indices(100, 9, 6, 0) != rows[0]).any()
    assert (batch_indices(100, 9, 5, 11) != rows[0]).any()  # next epoch


def test_numbers_are_pinned():
    # Philox words are guaranteed by NumPy: runs of different machines must agree.
    np.testing.assert_array_equal(batch_indices(10, 10, 0, 0), PINNED[0])
    np.testing.assert_array_equal(batch_indices(10, 10, 0, 1), PINNED[1])


def test_returned_rows_are_the_callers_own():
    first = batch_indices(10, 4, 0, 0)
    want = first.copy()
    first[:] = -1
    np.testing.assert_array_equal(batch_indices(10, 4, 0, 0), want)


def test_numpy_step_and_seed():
    seed, step = jnp.int32(3), np.int64(2)
    rows = batch_indices(10, 4, seed, step)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(rows, batch_indices(10, 4, 3, 2))


def test_batch_at_keeps_rows_together():
    images, labels = np.arange(20).reshape(10, 2), np.arange(10) * 2
    x, y = batch_at((images, labels), 4, 0, 1)
    np.testing.assert_array_equal(x[:, 0], y)
    batch = batch_at({"x": jnp.asarray(images), "y": labels}, 4, 0, 1)
    np.testing.assert_array_equal(batch["x"], x)
    np.testing.assert_array_equal(batch["y"], y)


@given(st.integers(1, 30), st.integers(1, 40))
def test_evaluation_covers_every_example_once(n, batch_size):
    arrays = {"x": np.arange(n) * 3, "y": np.arange(n)}
    seen = []
    for batch, mask in evaluation_batches(arrays, batch_size):
        assert mask.shape == (batch_size,) and mask.dtype == bool
        assert batch["x"].shape == (batch_size,)
        np.testing.assert_array_equal(batch["x"], 3 * batch["y"])
        seen.extend(batch["y"][mask])
    assert seen == list(range(n))


def test_evaluation_batches_are_independent_of_each_other():
    first, second = evaluation_batches(np.arange(4), 2)
    np.testing.assert_array_equal(first[0], [0, 1])
    np.testing.assert_array_equal(second[0], [2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: steps_per_epoch(10, 11), "`batch_size` must not exceed the 10 exam"),
        (lambda: steps_per_epoch(10, 0), "`batch_size` must be at least 1, got 0"),
        (lambda: steps_per_epoch(0, 1), "at least one example, got 0"),
        (lambda: batch_indices(10, 4, 0, -1), "`step` must not be negative, got -1"),
        (lambda: batch_indices(10, 4, -1, 0), "`seed` must be in"),
        (lambda: batch_at((np.ones(3), np.ones(4)), 2, 0, 0), r"got \[3, 4\]"),
        (lambda: batch_at((), 2, 0, 0), r"one number of examples .* got \[\]"),
        (lambda: evaluation_batches(np.ones((0, 2)), 2), "at least one example"),
        (lambda: evaluation_batches(np.ones(3), 0), "`batch_size` must be at least 1"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
