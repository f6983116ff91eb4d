"""How kernels are launched: what does the same is one kernel of a program."""

import functools

import jax
import jax.numpy as jnp
import pytest
from ops.range_kernels import needs_kernels

from rjax.ops import mosaic
from rjax.ops.batch_norm import batch_norm
from rjax.ops.max_pool import Window

pytestmark = needs_kernels


def kernels(op, *arrays) -> int:
    """Return how many kernels a program for CUDA holds."""
    with mosaic.mode("lower"):
        text = jax.jit(op).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("kernel_hash")


def copy(x, y, *, extra):
    y[...] = x[...] + extra


def launch(x, extra):
    body = functools.partial(copy, extra=extra)
    return mosaic.launch(
        body, "rjax_copy", 1, jax.ShapeDtypeStruct((128,), "float32"), x
    )


def test_a_program_holds_a_kernel_once():
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    assert kernels(lambda x: launch(launch(x, 1.0), 1.0), x) == 1
    assert kernels(lambda x: launch(launch(x, 1.0), 2.0), x) == 2


@pytest.mark.parametrize("pool", [None, Window(2)])
def test_norms_of_one_shape_share_their_kernels(pool):
    def twice(x, scale, bias):
        def loss(x, y):
            norm = functools.partial(batch_norm, relu=True, pool=pool)
            norm = functools.partial(norm, implementation="mosaic_gpu")
            return sum(jnp.sum(norm(a, scale, bias)[0]) for a in (x, y))

        return jax.value_and_grad(loss, argnums=(0, 1))(x, x + 1.0)

    shape = (2, 8, 16, 256)
    vector = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    x = jax.ShapeDtypeStruct(shape, jnp.float16)
    assert kernels(twice, x, vector, vector) == 4


def test_a_kernel_does_what_the_mode_asks_for_now():
    x = jnp.ones(128)
    with mosaic.mode("interpret"):
        assert float(launch(x, 2.0)[0]) == 3.0
    assert kernels(lambda x: launch(x, 2.0), x) == 1
