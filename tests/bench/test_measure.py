"""Measuring: all figures asked for, and none of a kernel that is wrong."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import pytest
from ops.range_kernels import needs_kernels

from rjax.bench import measure, programs
from rjax.bench.cases import CASES, Case, draw
from rjax.bench.measure import BenchError, figures, sweep
from rjax.bench.programs import XLA, Variant, build, build_all
from rjax.ops import mosaic

INTERPRETED = Variant("mosaic_gpu", 256, "interpret")
OTHER = Variant("mosaic_gpu")


def case(wrong: Any, **changes: Any) -> Case:
    """Return a case whose result is 2 by XLA, and `wrong` by anything else."""

    def run(x, *, implementation):
        return jnp.full_like(x, 2.0 if implementation == "xla" else wrong)

    made = Case("two", lambda n, seed: (draw(n, seed), ()), run, 8)
    return dataclasses.replace(made, **changes)


def measured(*made: Case, sizes=(1024,), variants=(XLA,)) -> list[measure.Figure]:
    found = sweep(made, sizes, lambda case, n: variants, lambda line: None)
    return [figure for group in found for figure in group]


@pytest.mark.parametrize("op", ["copy", "ema", "digest_slots/16", "fused_update/adam"])
def test_every_size_has_positive_samples(op: str) -> None:
    found = measured(CASES[op], sizes=(1 << 10, 1 << 12))
    assert [(f.op, f.n) for f in found] == [(op, 1 << 10), (op, 1 << 12)]
    for figure in found:
        assert len(figure.samples) == 3 and min(figure.samples) > 0
        assert figure.seconds == sorted(figure.samples)[1]
        assert figure.bandwidth * figure.seconds == pytest.approx(
            CASES[op].nbytes * figure.n
        )


@needs_kernels
@pytest.mark.parametrize("op", ["cast/16-32", "fused_update/sgd"])
def test_a_kernel_is_verified_and_timed(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_SAMPLES", 1)
    found = measured(CASES[op], variants=(XLA, INTERPRETED))
    assert [(f.implementation, f.block) for f in found] == [
        ("xla", None),
        ("mosaic_gpu", 256),
    ]


@needs_kernels
def test_each_program_is_traced_under_its_own_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = []
    launch = mosaic.launch

    def record(body, name, programs, *rest):
        launched.append(programs)
        return launch(body, name, programs, *rest)

    monkeypatch.setattr(mosaic, "launch", record)
    jobs = [
        (CASES["cast/32-16"], 1024, dataclasses.replace(INTERPRETED, block=block))
        for block in (128, 256, 512)
    ]
    built = build_all(jobs)
    assert [program.variant.block for program in built] == [128, 256, 512]
    assert sorted(launched) == [2, 4, 8], "each op is traced once"


@pytest.mark.parametrize("wrong", [3.0, float("nan"), float("inf"), 2.0 + 2**-20])
def test_a_wrong_implementation_is_refused_before_it_is_timed(wrong: float) -> None:
    built = [build(case(wrong, ulps=2), 128, variant) for variant in (XLA, OTHER)]
    with pytest.raises(BenchError, match="two, 2\\^7, mosaic_gpu: a result"):
        next(figures(built))


@pytest.mark.parametrize("most", [0, 1024])
@pytest.mark.parametrize("op", ["ema", "copy"])
def test_programs_take_turns(
    op: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether arrays are made anew each time, or kept and moved in place."""
    monkeypatch.setattr(measure, "_KEPT", most)
    ran = []

    def noted(i: int) -> measure.Program:
        program = build(CASES[op], 1024, XLA)

        def run(*arguments: Any) -> Any:
            ran.append(i)
            return program.compiled(*arguments)

        return dataclasses.replace(program, compiled=run)

    found = measure.time_programs([noted(0), noted(1)])
    turns = [i for i, _ in itertools.groupby(ran)]
    assert turns == [0, 1] * measure._SAMPLES
    assert [len(samples) for samples in found] == [measure._SAMPLES] * 2


def test_a_difference_within_the_bound_is_none() -> None:
    near = case(2.0 + 2**-21, ulps=2)
    assert len(measured(near, variants=(XLA, OTHER))) == 2
    with pytest.raises(BenchError):
        measured(dataclasses.replace(near, ulps=0), variants=(XLA, OTHER))


def test_bits_have_to_be_the_same() -> None:
    def run(x, *, implementation):
        return (x > 0) if implementation == "xla" else (x > 0).at[7].set(x[7] <= 0)

    with pytest.raises(BenchError, match="differs from XLA's in its bits"):
        measured(case(0, run=run, ulps=64), variants=(XLA, OTHER))


def test_what_does_not_fit_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "memory", lambda: 10_000)
    said: list[str] = []
    groups = sweep([CASES["ema"]], [128, 4096], lambda case, n: [XLA], said.append)
    assert [figure.n for group in groups for figure in group] == [128]
    assert said[1] == "ema, 2^12: left out, needs 0.0 GB of memory"


@pytest.mark.parametrize(("n", "count"), [(1 << 20, 16), (1 << 24, 4), (1 << 28, 2)])
def test_fewer_runs_where_arrays_are_large(
    n: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_MANY", 16)
    monkeypatch.setattr(programs, "memory", lambda: int(140e9))
    assert programs.runs(CASES["fused_update/adam+ema"], n) == count
    assert count * programs.needed(CASES["fused_update/adam+ema"], n) < 40e9
