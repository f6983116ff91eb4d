"""What tests of range kernels share: both implementations, on whatever is here."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rjax.ops import mosaic

HAS_KERNELS = jax.__version_info__ >= (0, 11)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="kernels need jax 0.11")

# Four rows, so that a range has blocks, which folds read in several accesses, pieces
# and single elements.
BLOCK = 512
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 3 * BLOCK + 128 + 7)

implementations = pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("interpret", marks=needs_kernels),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)


class Runner:
    """Runs an op jitted, and knows whether its kernel is in the program.

    `name` is the name of the kernel that has to be there.
    """

    def __init__(self, implementation: str):
        self.kernel = implementation != "xla"
        self.name = "mosaic_gpu" if self.kernel else "xla"
        self.target = "interpret" if implementation == "interpret" else "device"

    def __call__(self, op: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
        run = functools.partial(op, **options, implementation=self.name)
        with mosaic.mode(self.target, BLOCK):
            traced = jax.jit(lambda *args: run(*args)).trace(*arrays)
            ran = "rjax_" in str(traced.jaxpr)
            assert ran == self.kernel, "the kernel ran where it should not, or did not"
            return traced.lower().compile()(*arrays)


@pytest.fixture
def run(implementation: str) -> Iterator[Runner]:
    yield Runner(implementation)


def lowers_for_cuda(kernel: str, op: Callable[..., Any], *shapes: Any) -> None:
    """Assert that the kernel of that name passes Mosaic's inference and checks.

    Arguments are described by (shape, dtype) or by a pytree of `ShapeDtypeStruct`.
    """
    shapes = tuple(
        jax.ShapeDtypeStruct(*shape) if type(shape) is tuple else shape
        for shape in shapes
    )
    with mosaic.mode("lower"):
        traced = jax.jit(lambda *args: op(*args)).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and kernel in text


def refuses_where_there_is_none(op: Callable[..., Any], *arrays: Any) -> None:
    """Assert that naming the kernel says what is missing."""
    wanted = "need an NVIDIA GPU" if HAS_KERNELS else "need jax 0.11 or newer"
    if jax.default_backend() == "gpu":
        return
    with pytest.raises(NotImplementedError, match=wanted):
        op(*arrays, implementation="mosaic_gpu")


def surrounded(inner: jax.Array, before: int, after: int, guard: Any) -> jax.Array:
    """Return `inner` with that many elements `guard` on either side."""
    fill = lambda n: jnp.full((n,), guard, inner.dtype)  # noqa: E731
    return jnp.concatenate([fill(before), inner, fill(after)])
