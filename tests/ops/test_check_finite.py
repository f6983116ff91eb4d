"""The check: one exact flag, and a norm within the rounding of its sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.range_kernels import (
    BLOCK,
    LENGTHS,
    implementations,
    lowers_for_cuda,
    needs_kernels,
    refuses_where_there_is_none,
    surrounded,
)
from ops.range_kernels import run as run  # a fixture

from rjax.ops import check_finite, grid, mosaic
from rjax.ops.check_finite import mosaic_gpu, nonfinite_slots
from rjax.ops.slots import SlotTable

ONE = np.float32(1.0)
BAD = (np.nan, -np.inf)


def normal(n, seed=0):
    return jax.random.normal(jax.random.key(seed), (n,))


def assert_norm(found, x, scale=1.0, terms=128):
    """Compare with float64, within the bound of `terms` additions in a row."""
    wanted = np.linalg.norm(np.asarray(x).astype(np.float64)) / scale
    assert not bool(found.flag)
    smallest = 2.0**-149  # a subnormal norm is rounded to a multiple of it
    rtol = (terms / 2 + 2) * 2.0**-24
    np.testing.assert_allclose(found.norm, wanted, rtol=rtol, atol=smallest / 2)


@implementations
class TestCheckFinite:
    @pytest.mark.parametrize("n", LENGTHS)
    def test_lengths_around_a_block(self, run, n):
        x = normal(n)
        assert_norm(run(check_finite, x, np.float32(8192)), x, 8192.0)

    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("on_inf", ["skip", "clamp"])
    def test_each_part_of_the_range_sets_the_flag(self, run, bad, on_inf):
        """The last element of the blocks, of the piece and of the range."""
        n = BLOCK + 128 + 3
        places = (BLOCK - 1, BLOCK + 127, n - 1)
        x = normal(n)

        def each(x, scale, implementation):
            check = functools.partial(
                check_finite, on_inf=on_inf, implementation=implementation
            )
            return [check(x.at[at].set(bad), scale) for at in places]

        for at, found in zip(places, run(each, x, ONE), strict=True):
            assert bool(found.flag) == (np.isnan(bad) or on_inf == "skip"), at
            assert np.isnan(found.norm) if found.flag else np.isposinf(found.norm)

    @pytest.mark.parametrize("size", [1e30, 1e-30, 1e-42, 1e37, 0.0])
    def test_squares_that_overflow_or_underflow(self, run, size):
        x = jnp.sign(normal(391)) * np.float32(size)
        assert_norm(run(check_finite, x, ONE), x)

    def test_one_huge_and_one_tiny_value(self, run):
        x = jnp.zeros(391).at[5].set(1e-40).at[390].set(2e38)
        assert_norm(run(check_finite, x, ONE), x)

    @pytest.mark.parametrize("bounds", [(128, 128 + 647), (3, 3 + 647), (5, 6)])
    def test_a_range_inside_an_array(self, run, bounds):
        start, stop = bounds
        inner = normal(stop - start)
        for guard in (jnp.nan, jnp.inf):
            x = surrounded(inner, start, 9, guard)
            assert_norm(run(check_finite, x, ONE, bounds=bounds), inner)

    def test_programs_share_many_blocks(self, run, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)
        x = normal(5 * BLOCK + 131)
        assert_norm(run(check_finite, x, ONE), x, terms=256)
        assert bool(run(check_finite, x.at[5 * BLOCK - 1].set(jnp.nan), ONE).flag)

    def test_twice_the_same_bits(self, run):
        x = normal(3 * BLOCK + 7)
        first, second = (run(check_finite, x, ONE).norm for _ in range(2))
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


ROWS = (1, BLOCK // 128, 7, 1, BLOCK // 128 + 1)
TABLE = SlotTable(ROWS, (False,) * 5, (False,) * 5)
SLOT_STARTS = np.cumsum((0, *ROWS), dtype=np.int32) * 128


@implementations
class TestNonfiniteSlots:
    @pytest.mark.parametrize("on_inf", ["skip", "clamp"])
    @pytest.mark.parametrize("bad", BAD)
    def test_first_and_last_element_of_each_slot(self, run, bad, on_inf):
        def each(x, implementation):
            slots = functools.partial(
                nonfinite_slots, table=TABLE, on_inf=on_inf,
                implementation=implementation,
            )  # fmt: skip
            places = jnp.concatenate([SLOT_STARTS[:-1], SLOT_STARTS[1:] - 1])
            return jax.lax.map(lambda at: slots(x.at[at].set(bad)), places)

        found = run(each, 3e38 * jnp.sign(normal(SLOT_STARTS[-1])))
        marked = np.isnan(bad) or on_inf == "skip"
        np.testing.assert_array_equal(found, np.tile(marked * np.eye(5), (2, 1)))

    def test_only_if_wanted(self, run):
        def op(x, wanted, implementation):
            return nonfinite_slots(
                x, TABLE, wanted=wanted, implementation=implementation
            )

        x = jnp.full(SLOT_STARTS[-1], jnp.nan)
        assert run(op, x, jnp.bool_(True)).all()
        assert not run(op, x, jnp.bool_(False)).any()

    def test_a_slot_longer_than_a_chunk(self, run, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "_CHUNK", 2 * BLOCK)
        table = SlotTable((1, 5 * BLOCK // 128, 1), (False,) * 3, (False,) * 3)
        x = jnp.zeros(5 * BLOCK + 256).at[128 + 5 * BLOCK - 1].set(jnp.inf)
        found = run(functools.partial(nonfinite_slots, table=table), x)
        assert found.tolist() == [False, True, False]


def test_nothing_has_no_norm_and_no_flag():
    assert tuple(map(float, check_finite(jnp.zeros(0), jnp.float32(1)))) == (0, 0)


@needs_kernels
@pytest.mark.parametrize("n", [1, 127, 128, 1 << 20, (1 << 28) + 128 + 7])
@pytest.mark.parametrize("start", [0, 3])
def test_the_kernel_lowers_for_cuda(n, start):
    def op(x, scale):
        bounds = (start, start + n)
        return check_finite(x, scale, bounds=bounds, implementation="mosaic_gpu")

    shapes = ((start + n,), jnp.float32), ((), jnp.float32)
    lowers_for_cuda("rjax_check_finite", op, *shapes)


def test_more_than_31_bits_of_elements_are_refused_before_allocation():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2**31,), ())]
    with pytest.raises(ValueError, match="`grads` must have at most 2\\^31 - 1"):
        jax.eval_shape(check_finite, *shapes)


def test_bounds_that_do_not_fit():
    with pytest.raises(ValueError, match="`bounds` must be .* `grads`"):
        check_finite(jnp.zeros(5), jnp.float32(1), bounds=(2, 6))


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="float32 arena"):
        check_finite(jnp.zeros(5, jnp.float16), jnp.float32(1))


def test_where_no_kernel_can_run():
    refuses_where_there_is_none(check_finite, jnp.ones(3), ONE)


@pytest.mark.parametrize("n", [1, 127, 5000, 128 * 1056, 10**6, 2**31 - 1])
def test_parts_cover_a_range_exactly_once(n):
    for block in (128, 512, mosaic.block_size("cast", n)):
        parts = grid.split(n, block)
        at = parts.blocks * block
        for start, length in parts.pieces:
            assert start == at and block > length >= 128
            at += length
        assert at + parts.singles == n and parts.singles < 128


@pytest.mark.parametrize("compared", [0, 2**24])
def test_the_largest_of_each_slot(
    compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By comparing all and by a scatter; a slot without chunks has 0."""
    monkeypatch.setattr(mosaic_gpu, "_COMPARED", compared)
    largest = jnp.asarray([3, 9, 2, 5, 7], jnp.int32)
    owners = np.asarray([0, 0, 2, 3, 3], np.int32)
    found = jax.jit(lambda x: mosaic_gpu._largest_of_slots(x, owners, 4))(largest)
    assert jnp.maximum(found, 0).tolist() == [9, 0, 2, 7]
