"""The cases: named as the ops name themselves, and counted in the bytes they move."""

from typing import Any

import jax
import pytest
from ops.range_kernels import needs_kernels

from rjax.bench.cases import CASES, Case, draw, slot_table
from rjax.ops import dispatch, mosaic

N = 1 << 16
KERNELS = [case for case in CASES.values() if case.kernel]


def name(case: Case) -> str:
    return case.name


def shapes(case: Case, n: int = N, implementation: str = "xla") -> tuple[Any, Any, Any]:
    """Return the first argument, the others and the result, as shapes."""
    first, others = jax.eval_shape(lambda: case.make(max(n, case.least), 0))
    run = lambda first, others: case.run(  # noqa: E731
        first, *others, implementation=implementation
    )
    return first, others, jax.eval_shape(run, first, others)


@pytest.mark.parametrize("case", KERNELS, ids=name)
def test_the_op_looks_itself_up_by_that_name(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def choose(op, implementation, available, size=None):
        found.append(size)
        return "xla"

    monkeypatch.setattr(dispatch, "choose", choose)
    shapes(case)
    # What XLA does may hold a pass that looks itself up in turn.
    assert found[0] == (case.name, max(N, case.least))


@needs_kernels
@pytest.mark.parametrize("case", KERNELS, ids=name)
def test_the_kernel_looks_its_block_up_by_that_name(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def block_size(op, n, *limits):
        found.append((op, n))
        return 1024

    monkeypatch.setattr(mosaic, "block_size", block_size)
    with mosaic.mode("interpret"):
        shapes(case, implementation="mosaic_gpu")
    assert found == [(case.name, max(N, case.least))]


@pytest.mark.parametrize("case", CASES.values(), ids=name)
def test_bytes_are_those_of_the_arrays_read_and_written(case: Case) -> None:
    def moved(n: int) -> int:
        first, others, out = shapes(case, n)
        read = jax.tree.leaves((first, others))
        if "fused" in case.name:  # both copies in half precision are only written
            read = [x for x in read if x.dtype.itemsize == 4]
        written = jax.tree.leaves(out)
        return sum(x.size * x.dtype.itemsize for x in (*read, *written))

    # Weights and results that do not grow with n are small where n is large.
    n = max(N, case.least)
    expected = moved(2 * n) - moved(n)
    if "lars" in case.name:
        expected += 8 * n  # gradients and masters once more, for the norms
    assert case.nbytes * n == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("case", CASES.values(), ids=name)
def test_a_result_can_take_the_place_of_a_donated_argument(case: Case) -> None:
    first, _, out = shapes(case, 1024)
    if case.donated:
        assert jax.tree.structure(first) == jax.tree.structure(out)
        assert jax.tree.leaves(first) == jax.tree.leaves(out)


@pytest.mark.parametrize("log", range(7, 29))
def test_slots_tile_the_arena(log: int) -> None:
    table = slot_table(1 << log)
    assert table.num_rows * 128 == 1 << log
    assert len(table.rows) == min(8, max(2, table.num_rows))
    assert table.decay[0] is False and all(table.decay[1:])
    assert table.num_rows == 1 or table.rows[0] == max(1, table.num_rows // 64)


def test_no_two_arguments_are_equal() -> None:
    drawn = [draw(256, seed) for seed in range(50)]
    assert len({x.tobytes() for x in map(jax.device_get, drawn)}) == 50
    assert all(-2 <= float(x.min()) < -1.5 < 1.5 < float(x.max()) < 2 for x in drawn)
