"""What a scan stacks as one row comes back bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits
from jax import lax

from rjax.programs.packing import pack, unpack

SMALL = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16",
    "bfloat16", "float32",
)  # fmt: skip


def drawn(dtype, shape, steps=5):
    """Return arrays of random bits, NaN of all kinds and subnormals among them."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, (steps, *shape)) == 1)
    size = jnp.dtype(dtype).itemsize
    raw = rng.integers(0, 256, (steps, *shape, size), np.uint8)
    return jnp.asarray(raw.view(jnp.dtype(dtype)).reshape(steps, *shape))


@jax.jit
def through_a_scan(trees):
    """Stack what each step packs, and unpack it."""
    _, packed = lax.scan(lambda _, tree: (0, pack(tree)), 0, trees)
    return unpack(packed, jax.tree.map(lambda x: x[0], trees)), packed


def test_every_dtype_and_shape_comes_back_bit_for_bit():
    tree = {dtype: drawn(dtype, (2, 3)) for dtype in SMALL}
    tree |= {"scalar": drawn("float32", ()), "empty": drawn("int32", (0, 4))}
    found, (row, rest) = through_a_scan({"b": tree, "a": (drawn("uint16", (7,)), None)})
    assert bits(found["b"]) == bits(tree) and found["a"][1] is None
    assert bits(found["a"][0]) == bits(drawn("uint16", (7,)))
    assert row.shape == (5, 10 * 6 + 1 + 7) and row.dtype == jnp.uint32 and rest == []


@pytest.mark.parametrize("size", [1024, 1025])
def test_what_is_large_or_has_no_words_is_left_as_it_is(size):
    keys = jax.random.split(jax.random.key(0), 5)
    tree = {"x": drawn("float32", (size,)), "key": keys, "n": drawn("int32", ())}
    found, (row, rest) = through_a_scan(tree)
    assert bits(found) == bits(tree)
    large = size > 1024
    assert row.shape == (5, 1 + (not large) * size) and len(rest) == 1 + large
