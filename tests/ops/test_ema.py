"""The moving average: every implementation steps from the average to the value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.range_kernels import (
    BLOCK,
    LENGTHS,
    implementations,
    lowers_for_cuda,
    needs_kernels,
    refuses_where_there_is_none,
)
from ops.range_kernels import run as run  # a fixture

from rjax.ops import ema, mosaic


def pair(n, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return [jax.random.normal(key, (n,)) for key in keys]


def within_two_ulp(found, average, value, decay):
    """Compare with float64: two ULP of the larger of the two arrays."""
    old, new = (np.asarray(x).astype(np.float64) for x in (average, value))
    wanted = old + np.float64(np.float32(1 - decay)) * (new - old)
    ulp = np.spacing(np.maximum(np.abs(average), np.abs(value)))
    assert np.all(np.abs(np.asarray(found) - wanted) <= 2 * ulp)


@implementations
class TestEma:
    @pytest.mark.parametrize("n", LENGTHS)
    def test_lengths_around_a_block(self, run, n):
        average, value = pair(n)
        within_two_ulp(run(ema, average, value, decay=0.9), average, value, 0.9)

    def test_jitted_it_has_the_bits_of_the_base(self, run):
        average, value = pair(3 * BLOCK + 135)
        base = jax.jit(functools.partial(ema, decay=0.999))(average, value)
        found = run(ema, average, value, decay=0.999)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(base))

    def test_the_value_is_a_fixed_point(self, run):
        x, _ = pair(391)
        np.testing.assert_array_equal(run(ema, x, x, decay=0.999), x)

    def test_decay_one_keeps_the_average(self, run):
        average, value = pair(135)
        np.testing.assert_array_equal(run(ema, average, value, decay=1.0), average)

    def test_the_arguments_keep_their_bits(self, run):
        average, value = pair(391)
        before = np.array(average), np.array(value)
        run(ema, average, value, decay=0.5)
        for old, now in zip(before, (average, value), strict=True):
            np.testing.assert_array_equal(old, np.asarray(now))

    def test_nothing_but_its_own_element_is_read(self, run):
        average, value = pair(391)
        found = run(
            ema, average.at[7].set(jnp.nan), value.at[390].set(jnp.inf), decay=0.5
        )
        bad = np.flatnonzero(~np.isfinite(np.asarray(found)))
        np.testing.assert_array_equal(bad, [7, 390])

    def test_any_shape(self, run):
        average, value = (x.reshape(5, 3, 2) for x in pair(30))
        found = run(ema, average, value, decay=0.5)
        within_two_ulp(found, average, value, 0.5)

    def test_twice_the_same_bits(self, run):
        first, second = (run(ema, *pair(391), decay=0.99) for _ in range(2))
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))

    def test_under_shard_map(self, run):
        average, value = pair(256)
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

        def sharded(average, value, implementation):
            local = functools.partial(ema, decay=0.5, implementation=implementation)
            spec = P("data")
            return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(
                average, value
            )

        within_two_ulp(run(sharded, average, value), average, value, 0.5)


def test_decay_zero_is_the_value_whatever_the_average():
    value = jnp.ones(3)
    assert ema(jnp.full(3, jnp.nan), value, 0.0).tolist() == [1, 1, 1]


@needs_kernels
@pytest.mark.parametrize("n", [1, 127, 128, 1 << 20, 1 << 28])
def test_the_kernel_lowers_for_cuda(n):
    op = functools.partial(ema, decay=0.999, implementation="mosaic_gpu")
    lowers_for_cuda("rjax_ema", op, *[((n,), jnp.float32)] * 2)


@needs_kernels
@pytest.mark.parametrize(("n", "in_place"), [(1 << 20, True), ((1 << 20) + 5, False)])
def test_the_kernel_moves_a_donated_average_in_place(n, in_place):
    """Not where single elements are left: all threads read and write those."""
    op = functools.partial(ema, decay=0.999, implementation="mosaic_gpu")
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    with mosaic.mode("lower"):
        traced = jax.jit(lambda *args: op(*args), donate_argnums=0).trace(shape, shape)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    alias = "output_operand_aliases = [#stablehlo.output_operand_alias"
    assert (alias in text) == in_place


def test_more_than_31_bits_of_elements_are_refused_before_allocation():
    shape = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    with pytest.raises(ValueError, match="`average` must have at most 2\\^31 - 1"):
        jax.eval_shape(functools.partial(ema, decay=0.9), shape, shape)


def test_other_types_and_shapes_are_refused():
    with pytest.raises(ValueError, match="`average` and `value` must be float32"):
        ema(jnp.ones(3), jnp.ones(4), 0.9)
    with pytest.raises(ValueError, match="float16"):
        ema(jnp.ones(3, jnp.float16), jnp.ones(3, jnp.float16), 0.9)


def test_where_no_kernel_can_run():
    op = functools.partial(ema, decay=0.9)
    refuses_where_there_is_none(op, jnp.ones(3), jnp.ones(3))
