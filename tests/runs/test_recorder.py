"""Logging never waits for the step under way, and what it says is right."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from run_helpers import read_lines

import rjax
from rjax.repro import waiting
from rjax.repro.waiting import FETCH, IN_FLIGHT
from rjax.runs.console import Console
from rjax.runs.interrupts import Interrupts
from rjax.runs.recorder import Recorder

PLAN = rjax.make_plan({"w": jnp.ones((1, 1))}, rjax.Config())


def make_report(step: int, **fields: Any) -> rjax.Report:
    values: dict[str, Any] = {
        "loss": float(step), "applied": True, "scale": 8192.0, "grad_norm": 1.0,
        "learning_rate": 0.1, "step": step, "skipped": 0, "consecutive_skips": 0,
        "offender": -1, "bad_slots": [False], "bad_stats": False,
        "metrics": {"accuracy": 0.5},
    }  # fmt: skip
    arrays = jax.tree.map(
        jnp.asarray, values | fields, is_leaf=lambda x: isinstance(x, list)
    )
    return rjax.Report(**arrays)


def make_recorder(**options: Any) -> Recorder:
    Path("run").mkdir()
    settings: dict[str, Any] = {
        "epochs": 2, "steps_per_epoch": 1000, "batch_size": 10, "log_every": 100,
        "max_consecutive_skips": 50,
    }  # fmt: skip
    return Recorder(
        Path("run"), PLAN, Console(2000), Interrupts(), **(settings | options)
    )


@pytest.mark.parametrize("log_every", [1, 7, 100])
def test_the_newest_reports_are_never_fetched_while_steps_go_on(
    log_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logging at every step, too, looks only at steps that are long past."""
    fetched: list[int] = []
    begun, calls = 0, 0
    real = jax.device_get

    def watching(reports: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(reports)
        assert max(found.step) < begun - IN_FLIGHT
        fetched.extend(found.step)
        return found

    state: Any = None
    monkeypatch.setattr(waiting, "PATIENCE", math.inf)
    monkeypatch.setattr(jax, "device_get", watching)
    with make_recorder(log_every=log_every) as recorder:
        recorder.start_epoch()
        for step in range(130):
            begun = step + 1
            recorder.add(make_report(step), state)
        # They do not pile up, and do not come one by one.
        assert fetched == list(range(100)) and calls == 2
        begun = math.inf
        recorder.end_epoch(state)
    assert [row["step"] for row in read_lines()] == list(range(130))


def test_slow_steps_are_fetched_when_they_are_ready_and_waited_for_only_in_bulk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = 0
    queue = waiting.Waiting()
    monkeypatch.setattr(waiting, "_is_ready", lambda report: report < ready)
    monkeypatch.setattr(waiting, "PATIENCE", math.inf)
    for number in range(5):
        queue.add(number)  # type: ignore[arg-type]
    ready = 3
    assert queue.due() == 0  # the last fetch was just now
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    assert queue.due() == 3
    ready = 0
    assert queue.due() == 0
    for number in range(5, FETCH + IN_FLIGHT):
        assert queue.due() == 0
        queue.add(number)  # type: ignore[arg-type]
    assert queue.due() == FETCH


def test_fetching_is_one_program_whatever_the_count(compilations: list[str]) -> None:
    queue = waiting.Waiting()
    for step in range(90):
        queue.add(make_report(step))
    assert queue.fetch(1).step.tolist() == [0]
    compilations.clear()
    assert queue.fetch(50).step.tolist() == list(range(1, 51))
    assert queue.fetch(37).loss.tolist() == [float(s) for s in range(51, 88)]
    assert compilations == []
    assert len(queue) == 2


def test_lines_come_within_an_epoch_and_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state: Any = None
    with make_recorder(log_every=10, steps_per_epoch=20) as recorder:
        for epoch in range(2):
            recorder.start_epoch()
            for step in range(20):
                recorder.add(make_report(20 * epoch + step), state)
            recorder.end_epoch(state)
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split("  accuracy")[0] for line in lines]
    assert starts == [
        "epoch 1/2  step 10/20  loss 4.5000",
        "epoch 1/2  loss 9.5000",
        "epoch 2/2  step 10/20  loss 24.5000",
        "epoch 2/2  loss 29.5000",
    ]
    assert "lr 0.1  scale 8192  skipped 0" in lines[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"offender": 0}, "the gradient of w is"),
        ({"bad_stats": True}, "the new batch statistics are"),
        ({"learning_rate": math.inf}, "the learning rate is"),
    ],
)
def test_a_skip_says_what_was_not_finite(
    fields: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = make_report(
        3, loss=math.nan, applied=False, scale=64.0, skipped=7, grad_norm=math.nan,
        **fields,
    )  # fmt: skip
    state: Any = None
    with make_recorder() as recorder:
        recorder.start_epoch()
        recorder.add(skip, state)
        recorder.end_epoch(state)
        assert recorder.last is not None and math.isnan(recorder.last["loss"])
    assert capsys.readouterr().out.splitlines()[0] == (
        f"step 3 skipped: {words} not finite at scale 64, 7 skipped so far"
    )


def test_a_hopeless_run_is_noticed_while_it_goes_on() -> None:
    params = {"w": jnp.ones((1, 1))}
    state = rjax.init_state(PLAN, params)
    with make_recorder(max_consecutive_skips=3) as recorder:
        recorder.start_epoch()
        with pytest.raises(rjax.NonFiniteGradientsError, match="steps in a row"):
            for step in range(1000):
                report = make_report(
                    step, applied=False, skipped=step + 1, consecutive_skips=step + 1
                )
                recorder.add(report, state)
        # As many as are fetched at once, or fewer where a machine is slow.
        assert 3 <= recorder.steps <= 50
