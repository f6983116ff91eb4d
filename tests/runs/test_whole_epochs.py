"""Runs whose epochs are one program each: the bits of their steps, and all manners."""

import contextlib
import io
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("tyro")

from run_helpers import complaint, read_lines, read_manifest

import rjax
from rjax.cli import main
from rjax.repro.opened import open_record
from rjax.repro.scan import scan_digests, scan_steps
from rjax.runs import batches
from rjax.runs.errors import UsageError
from rjax.runs.evaluate import Evaluator
from rjax.runs.recorder import Recorder
from rjax.runs.replay import options_of, replay
from rjax.runs.setup import prepare_job

pytestmark = pytest.mark.standard_promotion

# Eleven steps an epoch, which ten do not divide.
WORDS = (
    "train --whole-epochs --batch-size 128 --hidden 8 --ema-decay 0 --crop-pad 1 "
    "--flip --no-plan --log-every 5 --seed 4 --epochs"
).split()


def train(folder: str | Path, epochs: int = 3, *more: str) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([*WORDS, str(epochs), "--out", str(folder), *more])
    return code, said.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of three epochs: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    code, said = train(folder)
    assert code == 0
    return folder, said


def test_a_run_leaves_and_says_what_others_do(finished: tuple[Path, str]) -> None:
    folder, said = finished
    rows, seen = read_lines(folder), read_lines(folder, "evaluations")
    assert [row["step"] for row in rows] == list(range(33))
    assert [row["epoch"] for row in rows] == [1] * 11 + [2] * 11 + [3] * 11
    assert [(row["epoch"], row["step"]) for row in seen] == [(1, 11), (2, 22), (3, 33)]
    results = read_manifest(folder)["results"]
    assert (results["steps"], results["ended_by"]) == (33, "epochs")
    # The last evaluation saw what the run's results are from.
    final = results["test"]["master"]
    assert {key: seen[-1][key] for key in final} == final and final["count"] == 359
    assert list(results["test"]) == ["master", "compute"]
    told = [line for line in said.splitlines() if line.startswith("epoch ")]
    for epoch, line in enumerate(told, start=1):
        losses = [row["loss"] for row in rows if row["epoch"] == epoch]
        assert line.startswith(f"epoch {epoch}/3  loss {np.mean(losses):.4f}  accuracy")
    assert len(told) == 3 and said.count("test set, 359 images, master") == 4


def test_digests_fall_due_where_they_can(finished: tuple[Path, str]) -> None:
    folder, said = finished
    assert said.startswith(
        "digests every 11 steps: --record-every 10 does not divide the 11 of an epoch\n"
    )
    assert read_manifest(folder)["options"]["record_every"] == 11
    assert open_record(folder).layout.every == 11


def test_every_step_is_that_of_a_loop(finished: tuple[Path, str]) -> None:
    """By the job's own batches and traced step, bit for bit."""
    job = prepare_job(options_of(finished[0]))
    step, state, rows = job.traced.compile(), job.initial_state(), []
    for batch in job.batches():
        state, report = step(state, batch)
        rows.append(report)
    losses = [float(report.loss) for report in rows]
    assert [row["loss"] for row in read_lines(finished[0])] == losses
    norms = [float(report.grad_norm) for report in rows]
    assert [row["grad_norm"] for row in read_lines(finished[0])] == norms
    # The evaluation, too, is that of images one batch after another.
    whole = Evaluator(job)(state, job.data.test, ["master"])["master"]
    object.__setattr__(job, "sampling", None)
    plain = Evaluator(job)(state, job.data.test, ["master"])["master"]
    assert whole == pytest.approx(plain, rel=1e-6)
    assert whole == read_manifest(finished[0])["results"]["test"]["master"]


def test_a_run_has_the_same_bits_again(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("again")[0] == 0
    assert main(["compare", str(finished[0]), "again"]) == 0
    assert capsys.readouterr().out.startswith("bit-identical")


def test_it_can_be_replayed(finished: tuple[Path, str], tmp_path: Path) -> None:
    """From within an epoch to within the next; digests of the end of the first."""
    replay(finished[0], 9, 14, tmp_path / "out")
    run, again = open_record(finished[0]), open_record(tmp_path / "out")
    assert (scan_digests(run, again).common, scan_digests(run, again).step) == (1, None)
    assert (scan_steps(run, again).common, scan_steps(run, again).columns) == (5, ())


def test_early_stopping_keeps_the_best_and_runs_no_epoch_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses, real, masters = iter([3.0, 1.0, 2.0]), Evaluator.end, []

    def scripted(self: Any, begun: Any) -> Any:
        found = real(self, begun)
        if len(found) == 1:
            found["master"]["loss"] = next(losses)
        return found

    begin = Evaluator.begin

    def watched(self: Any, state: Any, *rest: Any) -> Any:
        masters.append((int(state.step), float(state.master.sum())))
        return begin(self, state, *rest)

    monkeypatch.setattr(Evaluator, "end", scripted)
    monkeypatch.setattr(Evaluator, "begin", watched)
    more = ("--early-stop", "1", "--validation-fraction", "0.02")
    assert train("run", 9, *more)[0] == 0
    results = read_manifest()["results"]
    assert (results["ended_by"], results["best_epoch"]) == ("early_stop", 2)
    assert len(read_lines()) == 33
    assert [step for step, _ in masters] == [11, 22, 33, 22]
    assert masters[1] == masters[3]
    assert {row["set"] for row in read_lines(name="evaluations")} == {"validation"}


@pytest.mark.parametrize("when", ["a call", "a begin", "a write"])
def test_an_interrupt_loses_no_epoch_that_was_begun(
    when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the second call, once the third epoch has begun, as the first is written."""
    where, name, turn, steps = {
        "a call": (rjax.CapturedEpoch, "__call__", 2, 22),
        "a begin": (Recorder, "add_epoch", 3, 33),
        "a write": (Recorder, "_write", 1, 22),
    }[when]
    real, turns = getattr(where, name), []

    def interrupt(self: Any, *arguments: Any) -> Any:
        turns.append(real(self, *arguments))
        if len(turns) == turn:
            signal.raise_signal(signal.SIGINT)
        return turns[-1]

    monkeypatch.setattr(where, name, interrupt)
    assert train("run")[0] == 130
    manifest, rows = read_manifest(), read_lines()
    assert manifest["status"] == "interrupted"
    assert manifest["results"]["steps"] == len(rows) == steps
    assert [row["epoch"] for row in rows[::11]] == [*range(1, steps // 11 + 1)]
    assert open_record("run").last == steps - 1
    assert capsys.readouterr().err == ""


def test_a_hopeless_run_ends_in_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = rjax.data.load_digits()
    images = np.full_like(digits.train[0], np.nan)
    broken = rjax.data.Dataset("broken", (images, digits.train[1]), digits.test, 10)
    monkeypatch.setattr(rjax.data, "load_digits", lambda: broken)
    assert train("run", 3, "--max-consecutive-skips", "12")[0] == 1
    line = complaint(capsys)
    assert "22 steps in a row were skipped" in line and "the loss itself is nan" in line
    rows, manifest = read_lines(), read_manifest()
    assert manifest["status"] == "failed" and manifest["error"] in line
    # The third epoch had begun when the second was looked at.
    assert manifest["results"]["steps"] == len(rows) == 33
    assert not any(row["applied"] for row in rows)


class Full:
    """A device that says how much memory it has."""

    @staticmethod
    def memory_stats() -> dict[str, int]:
        return {"bytes_limit": 200_000_000, "bytes_in_use": 199_900_000}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--limit-steps", "12"], "--limit-steps 12 would end within an epoch of 11"),
        (
            ["--zoom", "1.2", "0.8"],
            "--zoom must be two numbers above 0, the lower first",
        ),
        (["--zoom", "0", "1"], "--zoom must be two numbers above 0"),
        (["--erase", "1.5"], "--erase must be a number of at most 1, got 1.5"),
        (["--rotate=-1"], "--rotate must be a number from 0 up, got -1"),
        (["--crop-pad=-1"], "--crop-pad must be a number from 0 up, got -1"),
        (["--recipe", "mnist"], "--recipe"),
    ],
)
def test_what_cannot_be_is_one_line(
    more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", 3, *more)[0] == 2
    assert sentence in complaint(capsys)
    assert not Path("run").exists()


def test_data_that_do_not_fit_or_lie_elsewhere_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [Full])
    assert train("run")[0] == 2
    line = complaint(capsys)
    assert "needs 0.0003 GB on the device, which has 0.0001 left" in line
    assert "--no-whole-epochs" in line and not Path("run").exists()
    with pytest.raises(UsageError, match="read one by one"):
        batches.resident(object(), np.float16)


def test_a_limit_of_whole_epochs_is_kept() -> None:
    assert train("run", 3, "--limit-steps", "22")[0] == 0
    results = read_manifest()["results"]
    assert (results["steps"], results["ended_by"]) == (22, "limit_steps")


@pytest.mark.parametrize(
    ("steps", "every", "nbytes", "ahead"),
    [
        (300, 10, 2**26 // 100, 100),
        (300, 0, 2**26 // 100, 100),
        (300, 10, 2**26 // 99, 60),
        (300, 7, 2**26 // 100, 1),
        (300, 150, 2**26 // 100, 1),
        (11, 11, 1, 11),
        (7, 1, 2**27, 1),
    ],
)
def test_as_many_batches_are_made_ahead_as_fit(
    steps: int, every: int, nbytes: int, ahead: int
) -> None:
    assert batches.steps_ahead(steps, every, nbytes) == ahead
