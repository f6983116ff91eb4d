"""The digest: every bit counts, and no order, platform or sharding does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
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

from rjax.ops import digest, digest_slots
from rjax.ops.digest import mosaic_gpu

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32)


def by_hand(words, start_index=0):
    """Digest uint32 words in Python integers."""
    lanes = [0, 0]
    for index, word in enumerate(np.asarray(words).tolist(), start_index):
        weyl = (index + 1) * 0x9E3779B9 % 2**32
        x = word ^ weyl
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x ^= x >> 15
        for lane, y in enumerate((x * 0x846CA68B, (x + weyl) * 0xC2B2AE35)):
            y %= 2**32
            lanes[lane] += y ^ y >> 16
    return [lane % 2**32 for lane in lanes]


def words(x):
    """Return raw bits as uint32, on the host."""
    return np.asarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint32)


def sample(n, dtype=jnp.float32, seed=0):
    return (100 * jax.random.normal(jax.random.key(seed), (n,))).astype(dtype)


@implementations
class TestDigest:
    @pytest.mark.parametrize("n", LENGTHS)
    def test_lengths_around_a_block(self, run, n):
        x = sample(n)
        assert run(digest, x).tolist() == by_hand(words(x))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_types(self, run, dtype):
        x = sample(391, dtype)
        assert run(digest, x).tolist() == by_hand(words(x))

    def test_known_answers(self, run):
        """Pinned: a change of these numbers breaks comparison with older records."""
        x = jnp.arange(391, dtype=jnp.int32)
        assert run(digest, x).tolist() == [1275715514, 134418858]
        half = jnp.array([1.0, -2.0], jnp.float16)
        assert run(digest, half).tolist() == [384589947, 3538718154]
        zero = jnp.zeros(1)
        assert run(digest, zero).tolist() == [33350994, 3930474073]

    @pytest.mark.parametrize("bounds", [(128, 128 + 647), (3, 3 + 647), (5, 6)])
    def test_a_range_inside_an_array(self, run, bounds):
        start, stop = bounds
        inner = sample(stop - start)
        wanted = by_hand(words(inner), start)
        for guard in (jnp.nan, 7.0):
            x = surrounded(inner, start, 9, guard)
            assert run(digest, x, bounds=bounds).tolist() == wanted

    def test_start_index_wraps_and_may_be_traced(self, run):
        x = sample(391)
        for first in (2**32 - 5, -5):
            assert run(digest, x, start_index=first).tolist() == by_hand(words(x), -5)

        def traced(x, first, implementation):
            return digest(x, start_index=first, implementation=implementation)

        found = run(traced, x, jnp.int32(77))
        assert found.tolist() == by_hand(words(x), 77)

    def test_programs_share_many_blocks(self, run, monkeypatch):
        monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)
        x = sample(5 * BLOCK + 131)
        assert run(digest, x).tolist() == by_hand(words(x))

    def test_any_shape_in_row_major_order(self, run):
        x = sample(30)
        assert run(digest, x.reshape(5, 3, 2)).tolist() == by_hand(words(x))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
    def test_slots(self, run, dtype, monkeypatch):
        """Slots longer than a chunk, of one element, of whole rows, and empty."""
        monkeypatch.setattr(mosaic_gpu, "_CHUNK", 2 * BLOCK)
        end = 3 * BLOCK + 128
        short = ((0, 1), (128, 128), (256, 0), (384, 255))
        table = ((0, 3 * BLOCK + 5), *((end + at, size) for at, size in short))
        x = jnp.full((end + 640,), jnp.nan, dtype)
        for start, size in table:
            x = x.at[start : start + size].set(sample(size, dtype, start))
        found = run(digest_slots, x, table=table)
        for (start, size), lanes in zip(table, found.tolist(), strict=True):
            assert lanes == by_hand(words(x[start : start + size])), (start, size)

    def test_shards_add_up(self, run):
        x = sample(256)
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

        def local(x, implementation):
            first = jax.lax.axis_index("data") * x.size
            found = digest(x, start_index=first, implementation=implementation)
            return jax.lax.psum(found, "data")

        def sharded(x, implementation):
            body = functools.partial(local, implementation=implementation)
            spec = P("data")
            return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=P())(x)

        assert run(sharded, x).tolist() == by_hand(words(x))


def test_every_single_bit_flip_changes_both_lanes():
    """Exhaustive over the bits of a few values at a few places."""
    x = np.array([0, 1, 0x3F800000, 0x7FC00001, 0xFFFFFFFF, 0x12345678], np.uint32)
    flips = x[None, None] ^ (
        np.eye(6, dtype=np.uint32)[:, None] << np.arange(32, dtype=np.uint32)[:, None]
    )
    found = np.asarray(jax.vmap(digest)(jnp.asarray(flips.reshape(-1, 6))))
    whole = np.asarray(digest(jnp.asarray(x)))
    assert (found != whole).all()
    assert len({tuple(lanes) for lanes in found.tolist()}) == 6 * 32


def test_every_half_number_at_an_index_gives_another_digest():
    words = jnp.arange(1 << 16, dtype=jnp.uint16)[:, None]
    for index in (0, 1, 12345):
        each = jax.vmap(functools.partial(digest, start_index=index))
        found = np.asarray(each(jax.lax.bitcast_convert_type(words, jnp.float16)))
        assert len(np.unique(found[:, 0])) == len(np.unique(found[:, 1])) == 1 << 16


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), st.data())
def test_swapping_two_different_elements_changes_both_lanes(values, data):
    i, j = data.draw(st.tuples(*[st.integers(0, len(values) - 1)] * 2))
    swapped = list(values)
    swapped[i], swapped[j] = values[j], values[i]
    a, b = (
        np.asarray(digest(jnp.asarray(np.array(v, np.uint32)))).tolist()
        for v in (values, swapped)
    )
    assert (a == b) == (values == swapped)
    assert values == swapped or (a[0] != b[0] and a[1] != b[1])


@settings(max_examples=6)  # every pair of lengths compiles
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_parts_add_up(first, second, start_index):
    x = sample(first + second)
    add = functools.partial(digest, x)
    whole = add(start_index=start_index)
    ranges = add(start_index=start_index, bounds=(0, first)) + add(
        start_index=start_index, bounds=(first, x.size)
    )
    split = digest(x[:first], start_index=start_index) + digest(
        x[first:], start_index=(start_index + first) % 2**32
    )
    assert whole.tolist() == ranges.tolist() == split.tolist()


def test_small_changes_of_two_elements_do_not_cancel():
    """Sign flips, steps of one ULP and swaps of neighbours, all pairs of 200 places.

    Were terms of such changes alike, some pair would cancel in a lane.
    """
    x = words(sample(201)).copy()
    base = np.asarray(digest(jnp.asarray(x)))

    def deltas(change):
        rows = np.tile(x, (200, 1))
        for i, row in enumerate(rows):
            change(row, i)
        found = np.asarray(jax.vmap(digest)(jnp.asarray(rows)))
        return (found - base).astype(np.uint32)

    def flip(row, i):
        row[i] ^= 1 << 31

    def up(row, i):
        row[i] += 1

    def swap(row, i):
        row[i], row[i + 1] = row[i + 1], row[i]

    every = np.concatenate([deltas(change) for change in (flip, up, swap)])
    for lane in range(2):
        one = every[:, lane]
        both = np.concatenate([one, (0 - one).astype(np.uint32)])
        assert len(np.unique(both)) == len(both)


def test_what_compares_equal_but_differs():
    nans = np.array([[0x7FC00000], [0x7FC00001], [0xFFC00000]], np.uint32)
    found = [digest(jnp.asarray(w.view(np.float32))).tolist() for w in nans]
    zeros = [digest(jnp.array([z])).tolist() for z in (0.0, -0.0)]
    assert len({tuple(lanes) for lanes in found + zeros}) == 5


def test_length_counts_and_nothing_is_zero():
    lengths = [tuple(digest(jnp.zeros(n)).tolist()) for n in (0, 1, 2, 128, 129)]
    assert lengths[0] == (0, 0) and len(set(lengths)) == len(lengths)


def test_jitted_it_is_the_same():
    x = sample(1000)
    assert digest(x).tolist() == jax.jit(digest)(x).tolist()


def test_slots_of_an_array_whose_last_row_is_cut_off():
    x = sample(300)
    found = digest_slots(x, [(0, 130), (256, 44)])
    assert found.tolist() == [by_hand(words(x[:130])), by_hand(words(x[256:]))]
    assert digest_slots(x, []).shape == (0, 2)


@pytest.mark.parametrize(
    "table",
    [[(1, 5)], [(128, 5), (0, 5)], [(0, 129), (128, 1)], [(256, 45)], [(0, -1)]],
)
def test_tables_that_do_not_fit(table):
    with pytest.raises(ValueError, match="`table` must hold"):
        digest_slots(sample(300), table)


@needs_kernels
@pytest.mark.parametrize("n", [1, 127, 128, 1 << 20, (1 << 28) + 128 + 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_lowers_for_cuda(n, dtype):
    op = functools.partial(digest, implementation="mosaic_gpu")
    lowers_for_cuda("rjax_digest", op, ((n,), dtype))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_over_slots_lowers_for_cuda(dtype):
    table = tuple((i << 14, (1 << 14) - i) for i in range(160))
    op = functools.partial(digest_slots, table=table, implementation="mosaic_gpu")
    lowers_for_cuda("rjax_digest_slots", op, ((160 << 14,), dtype))


@pytest.mark.parametrize("op", [digest, lambda x, **k: digest_slots(x, [(0, 5)], **k)])
def test_refusals(op):
    shape = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    with pytest.raises(ValueError, match="`x` must have at most 2\\^31 - 1"):
        jax.eval_shape(op, shape)
    with pytest.raises(ValueError, match="`x` must have one of the dtypes"):
        op(jnp.zeros(128, jnp.int8))
    refuses_where_there_is_none(op, jnp.zeros(128))
