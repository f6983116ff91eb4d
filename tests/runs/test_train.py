"""Runs that end well: what they learn, leave and say."""

import contextlib
import io
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")

from run_helpers import SHORT, read_lines, read_manifest

from rjax.cli import main

# Stock Flax and Optax run here, as they do for a user.
pytestmark = pytest.mark.standard_promotion

METRICS = {
    "step", "epoch", "loss", "accuracy", "scale", "applied", "skipped",
    "consecutive_skips", "grad_norm", "learning_rate", "offender",
}  # fmt: skip
FEW = ["train", "--batch-size", "64", "--no-plan", "--out", "run"]


def test_the_default_run_learns_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    manifest = read_manifest("runs/digits-mlp-fp16-1")
    test = manifest["results"]["test"]
    assert list(test) == ["master", "compute", "ema"]
    assert test["master"]["accuracy"] >= 0.98
    assert test["ema"]["accuracy"] >= 0.98
    assert {seen["count"] for seen in test.values()} == {359}
    assert manifest["results"]["ended_by"] == "epochs"
    out = capsys.readouterr().out
    assert out.count("\nepoch ") == 20
    last = out.splitlines()[-1]
    assert last.startswith("test accuracy: 9") and last.endswith(" % from EMA")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One short run: its folder and what it printed."""
    folder = str(tmp_path_factory.mktemp("finished") / "here" / "run")
    words = [word for word in SHORT if word != "--no-plan"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*words[:-1], folder, "--seed", "5"]) == 0
    return folder, said.getvalue()


def test_a_run_leaves_a_manifest(finished: tuple[str, str]) -> None:
    folder, said = finished
    manifest = read_manifest(folder)
    assert manifest["status"] == "finished"
    assert manifest["command"].startswith("rjax train --epochs 2")
    assert manifest["command"].endswith(f"--out {folder} --seed 5")
    assert manifest["seed"] == manifest["options"]["seed"] == 5
    assert manifest["options"]["learning_rate"] == 0.1
    assert manifest["options"]["batch_size"] == 128
    assert manifest["config"]["precision"] == "fp16"
    assert manifest["config"]["scaling"]["initial"] == 8192.0
    assert manifest["data"]["name"] == "digits"
    assert len(manifest["data"]["fingerprint"]) == 64
    # The plan printed is the one that the manifest names.
    assert manifest["plan"]["fingerprint"][:12] in said


def test_a_run_leaves_a_line_of_metrics_per_step(finished: tuple[str, str]) -> None:
    rows = read_lines(finished[0])
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert read_manifest(finished[0])["results"]["steps"] == len(rows)
    assert {row["epoch"] for row in rows} == {1, 2}
    assert all(set(row) == METRICS for row in rows)
    assert rows[0]["learning_rate"] == pytest.approx(0.1)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_leaves_a_line_per_evaluation(finished: tuple[str, str]) -> None:
    rows = read_lines(finished[0], "evaluations")
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 11), (2, 22)]
    assert {(row["set"], row["which"], row["count"]) for row in rows} == {
        ("test", "ema", 359)
    }
    # The last one saw what the run's results are from.
    final = read_manifest(finished[0])["results"]["test"]["ema"]
    assert {key: rows[-1][key] for key in final} == final
    assert f"test set, 359 images, ema: loss {final['loss']:.4f}" in finished[1]


def test_pandas_reads_the_metrics(finished: tuple[str, str]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(Path(finished[0], "metrics.jsonl"), lines=True)
    assert set(frame.columns) == METRICS and len(frame) == 22
    assert frame["loss"].dtype == np.float64 and frame["applied"].dtype == bool
    frame = pandas.read_json(Path(finished[0], "evaluations.jsonl"), lines=True)
    assert list(frame["epoch"]) == [1, 2] and min(frame["accuracy"]) > 0.1


@pytest.mark.parametrize("seed", [5, 6])
def test_the_seed_decides_every_bit(finished: tuple[str, str], seed: int) -> None:
    assert main([*SHORT, "--seed", str(seed)]) == 0
    assert (read_lines(finished[0]) == read_lines()) == (seed == 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--precision bf16 --optimizer momentum --momentum 0.8 --clip-norm 1",
        "--precision fp32 --optimizer adamw --clip-value 0.1 --clip-on-inf clamp",
        "--optimizer lars --ema-decay 0 --schedule constant --scaling dynamic",
        "--optimizer adam --accumulation-steps 4 --weight-decay 0 --scaling static",
        "--hidden 64 32 16 --dropout 0.1 --label-smoothing 0.1 --scaling off",
    ],
)
def test_every_option_serves(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *options.split()]) == 0
    test = read_manifest()["results"]["test"]
    assert ("compute" in test) == ("fp32" not in options)
    assert ("ema" in test) == ("--ema-decay" not in options)
    rows = read_lines()
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "EMA" in capsys.readouterr().out or "ema" not in test
    told = read_manifest()["options"]
    words = options.split()
    for name, value in zip(words, words[1:], strict=False):
        if name.startswith("--") and name != "--hidden":
            assert str(told[name[2:].replace("-", "_")]).removesuffix(".0") == value


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--model cnn --width 4", "--model resnet --blocks 1 --width 4"]
)
def test_networks_with_batch_norm_train(options: str) -> None:
    words = "--limit-steps 30 --eval-every 0 --ema-batch-stats copy"
    assert main([*FEW, *options.split(), *words.split()]) == 0
    rows = read_lines()
    assert np.mean([row["loss"] for row in rows[-5:]]) < rows[0]["loss"]
    assert read_manifest()["results"]["test"]["ema"]["count"] == 359
    assert read_lines(name="evaluations") == []


def test_a_limit_on_steps_leaves_the_schedule_alone() -> None:
    assert main([*FEW, "--epochs", "4", "--limit-steps", "25"]) == 0
    limited = read_lines()
    assert main([*FEW[:-1], "whole", "--epochs", "4", "--eval-every", "3"]) == 0
    whole = read_lines("whole")
    assert (len(limited), len(whole)) == (25, 88)
    assert limited == whole[:25]
    results = read_manifest()["results"]
    assert (results["steps"], results["ended_by"]) == (25, "limit_steps")
    # At the end of an epoch that is due, and where the run ends.
    assert [row["step"] for row in read_lines(name="evaluations")] == [22, 25]
    assert [row["epoch"] for row in read_lines("whole", "evaluations")] == [3, 4]


def test_a_cache_that_cannot_be_is_told_and_missed_by_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def enable() -> None:
        calls.append(1)
        raise ValueError("`/x` cannot hold a compilation cache; give another folder.")

    monkeypatch.setattr("rjax.enable_compilation_cache", enable)
    assert main([*FEW, "--limit-steps", "1", "--no-compile-cache"]) == 0
    assert not calls and "cache" not in capsys.readouterr().out
    assert main([*FEW[:-1], "other", "--limit-steps", "1"]) == 0
    assert "compiling without a cache: `/x` cannot" in capsys.readouterr().out
    assert read_manifest("other")["options"]["compile_cache"] is True


def test_early_stopping_watches_held_out_images_and_keeps_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([3.0, 1.0, 2.0, float("nan")])
    seen: list[Any] = []
    from rjax.runs.evaluate import Evaluator

    real = Evaluator.__call__

    def scripted(self: Any, state: Any, examples: Any, views: Any) -> Any:
        found = real(self, state, examples, views)
        seen.append((int(state.step), float(state.master.sum()), len(examples[1])))
        if len(views) == 1:
            found[views[0]]["loss"] = next(losses)
        return found

    monkeypatch.setattr(Evaluator, "__call__", scripted)
    assert main([*FEW, "--epochs", "9", "--early-stop", "2"]) == 0
    results = read_manifest()["results"]
    assert (results["ended_by"], results["best_epoch"]) == ("early_stop", 2)
    # A tenth of 1438 images is held out; 20 steps of 64 an epoch are left.
    assert [count for *_, count in seen] == [144] * 4 + [359]
    assert [step for step, *_ in seen] == [20, 40, 60, 80, 40]
    # The last look is at the state of the second one.
    assert seen[-1][:2] == seen[1][:2]
    assert {row["set"] for row in read_lines(name="evaluations")} == {"validation"}
    assert read_lines(name="evaluations")[-1]["loss"] is None
    assert "stopped early; the best weights are those of epoch 2" in (
        capsys.readouterr().out
    )


def test_a_skip_is_told_and_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SHORT, "--loss-scale", str(2.0**24)]) == 0
    rows = read_lines()
    skips = [row for row in rows if not row["applied"]]
    assert skips and rows[-1]["applied"]
    assert rows[0]["scale"] == 2.0**24 and rows[0]["grad_norm"] is None
    assert rows[-1]["scale"] == 2.0 ** (24 - len(skips))
    said = capsys.readouterr().out.splitlines()
    told = [line for line in said if "skipped:" in line]
    assert len(told) == len(skips)
    assert skips[0]["offender"] in told[0] and "scale 16777216" in told[0]
    assert told[-1].endswith(f"{len(skips)} skipped so far")
    # A skipped step counts for no mean.
    (first,) = [line for line in said if line.startswith("epoch 1/2")]
    applied = [row["loss"] for row in rows if row["applied"] and row["epoch"] == 1]
    assert f"loss {np.mean(applied):.4f}" in first


class Writer:
    """Stands for tensorboardX's and clu's writers at once."""

    def __init__(self, folder: str) -> None:
        self.rows: dict[tuple[int, str], float] = {}
        self.folder = folder
        self.closed = False
        Writer.last = self

    last: "Writer"

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows[step, name] = value

    def write_scalars(self, step: int, values: dict[str, float]) -> None:
        self.rows |= {(step, name): value for name, value in values.items()}

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("installed", ["tensorboardX", "clu"])
def test_tensorboard_gets_means_and_evaluations(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.SimpleNamespace(SummaryWriter=Writer)
    if installed == "clu":
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
        monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
        monkeypatch.setitem(sys.modules, "clu", types.ModuleType("clu"))
        monkeypatch.setitem(sys.modules, "clu.metric_writers", fake)  # type: ignore[arg-type]
    else:
        monkeypatch.setitem(sys.modules, "tensorboardX", fake)  # type: ignore[arg-type]
    assert main([*SHORT, "--tensorboard", "--log-every", "5"]) == 0
    writer = Writer.last
    assert writer.closed and writer.folder == str(Path("run/tensorboard"))
    steps = {step for step, name in writer.rows if name == "train/loss"}
    assert steps == {5, 10, 11, 16, 21, 22}
    rows = read_lines()
    assert writer.rows[5, "train/loss"] == pytest.approx(
        np.mean([row["loss"] for row in rows[:5]])
    )
    assert writer.rows[22, "train/learning_rate"] == rows[-1]["learning_rate"]
    assert 0 < writer.rows[22, "test/ema/accuracy"] <= 1
