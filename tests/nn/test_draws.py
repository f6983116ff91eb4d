"""Kernels drawn at random: those of Flax, of any shape, and few programs for many."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.nn import MLP, ResNet50
from rjax.nn.draws import fan_in_uniform, he_normal, kaiming_normal, normal

KEY = jax.random.key(3)
SCALING = nn.initializers.variance_scaling
OF_FLAX = {
    "he_normal": (he_normal, nn.initializers.he_normal()),
    "kaiming_normal": (kaiming_normal, SCALING(2.0, "fan_out", "normal")),
    "normal": (normal(0.01), nn.initializers.normal(0.01)),
    "fan_in_uniform": (fan_in_uniform, SCALING(1 / 3, "fan_in", "uniform")),
}


@pytest.mark.parametrize("name", OF_FLAX)
@pytest.mark.parametrize("shape", [(5, 7), (3, 3, 2, 4), (64, 64), (65, 64), (1, 1)])
def test_kernels_are_those_of_flax(name: str, shape: tuple[int, ...]) -> None:
    ours, stock = OF_FLAX[name]
    got = ours(KEY, shape, jnp.float32)
    assert got.shape == shape and got.dtype == jnp.float32
    # The scale is rounded at another place, and XLA rounds the last place of some
    # otherwise in code for another shape.
    np.testing.assert_allclose(got, stock(KEY, shape, jnp.float32), 1e-6, 1e-9)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple))
def test_the_deviation_is_that_of_the_fans(shape: tuple[int, ...]) -> None:
    for draw, fan in (
        (he_normal, math.prod(shape[:-1])),
        (kaiming_normal, math.prod((*shape[:-2], shape[-1]))),
    ):
        kernel = np.asarray(draw(KEY, shape, jnp.float32))
        assert kernel.shape == shape
        if kernel.size >= 1000:
            np.testing.assert_allclose(kernel.std(), math.sqrt(2 / fan), rtol=0.15)


def test_other_keys_draw_other_kernels() -> None:
    kernels = [he_normal(jax.random.key(i), (8, 8), jnp.float32) for i in range(2)]
    assert (kernels[0] != kernels[1]).all()


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_every_kind_of_key_draws(implementation: str) -> None:
    kernel = he_normal(jax.random.key(0, impl=implementation), (64, 64), jnp.float32)
    np.testing.assert_allclose(kernel.std(), math.sqrt(2 / 64), rtol=0.05)


def test_many_keys_draw_at_once() -> None:
    keys = jax.random.split(KEY, 3)
    many = jax.vmap(lambda key: he_normal(key, (5, 7), jnp.float32))(keys)
    each = [he_normal(key, (5, 7), jnp.float32) for key in keys]
    np.testing.assert_allclose(many, each, 1e-6)


def test_a_network_is_drawn_by_few_programs() -> None:
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    made = jax.jit(ResNet50(1000).init).lower(KEY, image)
    sizes = re.findall(r"@_normal_real\w*\(.*?-> tensor<(\d+)xf32>", made.as_text())
    kernels = [
        x for x in jax.tree.leaves(jax.eval_shape(ResNet50(1000).init, KEY, image))
        if x.ndim > 1
    ]  # fmt: skip
    assert len(kernels) == 54 and 0 < len(set(sizes)) <= 11
    assert all(int(size).bit_count() == 1 for size in sizes)


def test_drawing_is_the_same_within_jit() -> None:
    x = jnp.ones((2, 12))
    alone = MLP((16,), 4).init(KEY, x)
    jitted = jax.jit(MLP((16,), 4).init)(KEY, x)
    jax.tree.map(np.testing.assert_array_equal, alone, jitted)
