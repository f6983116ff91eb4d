"""The range cast: every implementation rounds once, to nearest even."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops.range_kernels import (
    LENGTHS,
    Runner,
    implementations,
    lowers_for_cuda,
    needs_kernels,
    refuses_where_there_is_none,
    surrounded,
)
from ops.range_kernels import run as run  # a fixture

from rjax.ops import cast

HALVES = (jnp.float16, jnp.bfloat16)


def bits(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(bits(a), bits(b))


@implementations
class TestCast:
    @pytest.mark.parametrize("n", LENGTHS)
    def test_lengths_around_a_block(self, run, n):
        x = jax.random.normal(jax.random.key(n), (n,))
        same_bits(run(cast, x, dtype=jnp.float16), x.astype(jnp.float16))

    @pytest.mark.parametrize("half", HALVES)
    def test_every_half_number_widens_exactly(self, run, half):
        step = 127 if run.kernel else 1
        words = jnp.arange(0, 1 << 16, step, dtype=jnp.uint16)
        x = jax.lax.bitcast_convert_type(words, half)
        found, wanted = run(cast, x, dtype=jnp.float32), x.astype(jnp.float32)
        nan = np.isnan(np.asarray(wanted))
        np.testing.assert_array_equal(np.isnan(np.asarray(found)), nan)
        np.testing.assert_array_equal(bits(found)[~nan], bits(wanted)[~nan])

    def test_what_is_special(self, run):
        tiny = 137 * 2.0**-24
        x = jnp.array([65519, 65520, -65520, tiny, -0.0, jnp.inf, 2**-25, 3 * 2**-25])
        found = run(cast, x.astype(jnp.float32), dtype=jnp.float16)
        wanted = [65504, np.inf, -np.inf, tiny, -0.0, np.inf, 0, 2**-23]
        same_bits(found, np.array(wanted, np.float16))
        assert np.isnan(run(cast, jnp.array([jnp.nan]), dtype=jnp.float16)[0])

    @pytest.mark.parametrize("half", HALVES)
    def test_ties_go_to_even(self, run, half):
        unit = float(jnp.finfo(half).eps)
        x = jnp.array([1 + unit / 2, 1 + 3 * unit / 2, 1 + unit / 2 + 2.0**-20])
        wanted = np.array([1, 1 + 2 * unit, 1 + unit], np.float32)
        same_bits(run(cast, x, dtype=half).astype(jnp.float32), wanted)

    def test_the_rounding_survives_compilation(self, run):
        def there_and_back(x, implementation):
            half = cast(x, jnp.float16, implementation=implementation)
            return cast(half, jnp.float32, implementation=implementation)

        x = jnp.array([65519.0, 65520.0, 137 * 2.0**-24, 1 + 2.0**-12])
        wanted = np.array([65504, np.inf, 137 * 2.0**-24, 1], np.float32)
        same_bits(run(there_and_back, x), wanted)

    @pytest.mark.parametrize("bounds", [(128, 128 + 391), (3, 3 + 519), (257, 258)])
    def test_a_range_inside_an_array(self, run, bounds):
        start, stop = bounds
        inner = jax.random.normal(jax.random.key(0), (stop - start,))
        x = surrounded(inner, start, 9, jnp.nan)
        found = run(cast, x, dtype=jnp.float16, bounds=bounds)
        same_bits(found, inner.astype(jnp.float16))

    def test_shapes_and_nothing(self, run):
        x = jnp.arange(12.0).reshape(3, 1, 4)
        same_bits(run(cast, x, dtype=jnp.bfloat16), x.astype(jnp.bfloat16))
        if not run.kernel:
            assert run(cast, jnp.zeros((0, 3)), dtype=jnp.float16).shape == (0, 3)
            assert run(cast, x[0, 0], dtype=jnp.float16, bounds=(2, 2)).shape == (0,)

    def test_twice_the_same_bits(self, run):
        x = jax.random.normal(jax.random.key(1), (391,))
        same_bits(*(run(cast, x, dtype=jnp.float16) for _ in range(2)))


@given(st.integers(0, 2**32 - 1))
def test_any_float32_rounds_as_numpy_says(word):
    x = np.array([word], np.uint32).view(np.float32)
    found = np.asarray(Runner("xla")(cast, jnp.asarray(x), dtype=jnp.float16))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, x.astype(np.float16))


@needs_kernels
@pytest.mark.parametrize("n", [1, 127, 128, 1 << 20, (1 << 28) + 128 + 7])
@pytest.mark.parametrize("half", HALVES)
def test_the_kernel_lowers_for_cuda(n, half):
    for source, to in ((jnp.float32, half), (half, jnp.float32)):
        op = functools.partial(cast, dtype=to, implementation="mosaic_gpu")
        lowers_for_cuda("rjax_cast", op, ((n,), source))


@needs_kernels
def test_the_kernel_lowers_for_an_unaligned_range():
    lowers_for_cuda(
        "rjax_cast",
        lambda x: cast(x, jnp.float16, bounds=(3, 4000), implementation="mosaic_gpu"),
        ((1 << 20,), jnp.float32),
    )


def test_more_than_31_bits_of_elements_are_refused_before_allocation():
    shape = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    with pytest.raises(ValueError, match="`x` must have at most 2\\^31 - 1"):
        jax.eval_shape(lambda x: cast(x, jnp.float16), shape)
    shape = jax.ShapeDtypeStruct((2**31 - 1,), jnp.float32)
    assert jax.eval_shape(lambda x: cast(x, jnp.float16), shape).size == 2**31 - 1


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 6)])
def test_bounds_that_do_not_fit(bounds):
    with pytest.raises(ValueError, match="`bounds` must be"):
        cast(jnp.zeros(5), jnp.float16, bounds=bounds)


def test_bounds_need_one_dimension():
    with pytest.raises(ValueError, match="one-dimensional `x`"):
        cast(jnp.zeros((5, 5)), jnp.float16, bounds=(0, 5))


def test_no_integers():
    with pytest.raises(ValueError, match="`x` must be a floating type"):
        cast(jnp.zeros(5, jnp.int32), jnp.float16)


def test_where_no_kernel_can_run():
    refuses_where_there_is_none(lambda x, **k: cast(x, jnp.float16, **k), jnp.ones(3))


@needs_kernels
def test_the_kernel_knows_no_pair_of_halves():
    with pytest.raises(NotImplementedError, match="between float32 and half"):
        Runner("interpret")(cast, jnp.ones(3, jnp.float16), dtype=jnp.bfloat16)
