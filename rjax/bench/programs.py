"""Programs that run an op several times, one after the other, on distinct arrays.

Each is traced under the block its kernel is to have, so it can be built in any thread:
all programs of a size are compiled side by side.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from rjax.bench.cases import Case
from rjax.ops import mosaic

# Operations of one program: from `_LARGE` elements on, launches no longer count.
_LARGE, _FEW, _MANY = 1 << 24, 4, 16
_BUDGET = 40e9  # bytes alive at a time


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run an op.

    Attributes:
        implementation: "xla" or "mosaic_gpu".
        block: elements a program of the kernel handles at a time, `None` to choose.
        target: where kernels run, as for :func:`rjax.ops.mosaic.mode`.
    """

    implementation: str
    block: int | None = None
    target: str = "device"

    def __str__(self) -> str:
        return self.implementation + (f" {self.block}" if self.block else "")


XLA = Variant("xla")


@dataclasses.dataclass(frozen=True)
class Program:
    """Several runs of one variant, compiled.

    Attributes:
        case: the op.
        n: number of elements.
        variant: how it runs.
        count: how many runs, each on arrays of its own.
        compiled: of the lists of first and of other arguments; gives the results.
    """

    case: Case
    n: int
    variant: Variant
    count: int
    compiled: Callable[..., list[Any]]

    def arguments(self) -> tuple[list[Any], list[Any]]:
        """Return fresh arrays, the same at every call."""
        made = [self.case.make(self.n, seed) for seed in range(self.count)]
        return [first for first, _ in made], [others for _, others in made]


def build(case: Case, n: int, variant: Variant) -> Program:
    """Trace, lower and compile the program of one variant; for any thread."""

    @jax.jit  # so that the op is traced and lowered once, however often it runs
    def op(first: Any, others: Any) -> Any:
        return case.run(first, *others, implementation=variant.implementation)

    def program(firsts: list[Any], rest: list[Any]) -> list[Any]:
        outs: list[Any] = []
        for one in zip(firsts, rest, strict=True):
            if outs:  # one after the other: XLA would fuse small ones side by side
                outs[-1], one = lax.optimization_barrier((outs[-1], one))
            outs.append(op(*one))
        return outs

    first, others = _shapes(case, n)
    count = runs(case, n)
    jitted = jax.jit(program, donate_argnums=0 if case.donated else ())
    with mosaic.mode(variant.target, variant.block):
        lowered = jitted.lower([first] * count, [others] * count)
    return Program(case, n, variant, count, lowered.compile())


def runs(case: Case, n: int) -> int:
    """Return how often a program runs its op: fewer times on large arrays."""
    room = int(min(_BUDGET, (memory() or math.inf) / 2))
    return max(1, min(_FEW if n >= _LARGE else _MANY, room // needed(case, n)))


@functools.cache
def needed(case: Case, n: int) -> int:
    """Return the bytes that one run needs: arguments, result, and XLA's result."""
    first, others = _shapes(case, n)
    run = lambda first, others: case.run(first, *others, implementation="xla")  # noqa: E731
    return _size((first, others)) + 2 * _size(jax.eval_shape(run, first, others))


def memory() -> int | None:
    """Return the bytes that arrays can have here, `None` if nobody says."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


@functools.cache
def _shapes(case: Case, n: int) -> tuple[Any, Any]:
    return jax.eval_shape(lambda: case.make(n, 0))


def _size(shapes: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def build_all(jobs: Sequence[tuple[Case, int, Variant]]) -> list[Program]:
    """Build the programs of many jobs side by side, in their order."""
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        return list(pool.map(lambda job: build(*job), jobs))
    finally:  # of an interrupt too: what has not begun need not be compiled
        pool.shutdown(wait=False, cancel_futures=True)
