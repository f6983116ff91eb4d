import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rjax
from rjax.cli import main
from rjax.runs.recorder import Recorder

# Stock Flax and Optax run here, as they do for a user.
pytestmark = pytest.mark.standard_promotion

SHORT = ["train", "--epochs", "2", "--batch-size", "128"]
METRICS = {
    "step",
    "epoch",
    "loss",
    "accuracy",
    "scale",
    "applied",
    "skipped",
    "consecutive_skips",
    "grad_norm",
    "learning_rate",
    "offender",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "manifest.json").read_text())


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def read_metrics(folder: str) -> list[dict[str, Any]]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on standard error."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    return error


def test_the_default_run_learns_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    manifest = read_manifest("runs/digits-mlp-fp16-1")
    test = manifest["results"]["test"]
    assert list(test) == ["master", "compute", "ema"]
    assert test["master"]["accuracy"] >= 0.98
    assert test["ema"]["accuracy"] >= 0.98
    out = capsys.readouterr().out
    assert out.count("\nepoch ") == 20
    last = out.splitlines()[-1]
    assert last.startswith("test accuracy: 9") and last.endswith(" % from EMA")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One short run: its folder and what it printed."""
    folder = str(tmp_path_factory.mktemp("finished") / "here" / "run")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*SHORT, "--seed", "5", "--out", folder]) == 0
    return folder, said.getvalue()


def test_a_run_leaves_a_manifest(finished: tuple[str, str]) -> None:
    folder, said = finished
    manifest = read_manifest(folder)
    assert manifest["status"] == "finished"
    assert manifest["command"] == f"rjax {' '.join(SHORT)} --seed 5 --out {folder}"
    assert manifest["seed"] == manifest["options"]["seed"] == 5
    assert manifest["options"]["learning_rate"] == 0.1
    assert manifest["config"]["precision"] == "fp16"
    assert manifest["config"]["scaling"]["initial"] == 8192.0
    assert manifest["data"]["name"] == "digits"
    assert len(manifest["data"]["sha256"]) == 64
    # The plan printed is the one that the manifest names.
    assert manifest["plan"]["fingerprint"][:12] in said


def test_a_run_leaves_a_line_of_metrics_per_step(finished: tuple[str, str]) -> None:
    rows = read_metrics(finished[0])
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert read_manifest(finished[0])["results"]["steps"] == len(rows)
    assert {row["epoch"] for row in rows} == {1, 2}
    assert all(set(row) == METRICS for row in rows)
    assert rows[0]["learning_rate"] == pytest.approx(0.1)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("seed", [5, 6])
def test_the_seed_decides_every_bit(finished: tuple[str, str], seed: int) -> None:
    assert main([*SHORT, "--no-plan", "--seed", str(seed), "--out", "run"]) == 0
    assert (read_metrics(finished[0]) == read_metrics("run")) == (seed == 5)


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "bf16", "--optimizer", "momentum", "--clip-norm", "1"],
        ["--precision", "fp32", "--optimizer", "adamw", "--clip-value", "0.1"],
        ["--optimizer", "lars", "--ema-decay", "0", "--schedule", "constant"],
        ["--optimizer", "adam", "--accumulation-steps", "4", "--weight-decay", "0"],
    ],
    ids=" ".join,
)
def test_every_option_serves(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "--no-plan", "--out", "run", *options]) == 0
    test = read_manifest("run")["results"]["test"]
    assert ("compute" in test) == ("fp32" not in options)
    assert ("ema" in test) == ("--ema-decay" not in options)
    rows = read_metrics("run")
    assert all(row["applied"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "EMA" in capsys.readouterr().out or "ema" not in test


@pytest.mark.slow
def test_the_cnn_trains() -> None:
    options = [
        "--epochs",
        "1",
        "--batch-size",
        "128",
        "--model",
        "cnn",
        "--no-plan",
        "--out",
        "run",
    ]
    assert main(["train", *options]) == 0
    rows = read_metrics("run")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_skip_is_told_and_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SHORT, "--loss-scale", str(2.0**24), "--out", "run"]) == 0
    rows = read_metrics("run")
    skips = [row for row in rows if not row["applied"]]
    assert skips and rows[-1]["applied"]
    assert rows[0]["scale"] == 2.0**24 and rows[0]["grad_norm"] is None
    assert rows[-1]["scale"] == 2.0 ** (24 - len(skips))
    told = [line for line in capsys.readouterr().out.splitlines() if "skipped:" in line]
    assert len(told) == len(skips)
    assert skips[0]["offender"] in told[0] and "scale 1.67772e+07" in told[0]
    assert told[-1].endswith(f"{len(skips)} skipped so far")


def test_a_hopeless_run_ends_in_the_diagnosis(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--learning-rate", "1e12", "--optimizer", "sgd", "--epochs", "20"]
    assert main(["train", "--no-plan", "--out", "run", *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("rjax train: ")
    assert "Traceback" not in captured.err
    manifest = read_manifest("run")
    assert manifest["status"] == "failed"
    assert manifest["error"] in captured.err
    assert read_metrics("run")[-1]["consecutive_skips"] >= 50


def test_an_interrupted_run_says_how_far_it_got(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = Recorder.add

    def interrupt(self: Recorder, report: Any) -> None:
        taken(self, report)
        if self.epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "add", interrupt)
    assert main([*SHORT, "--no-plan", "--out", "run"]) == 130
    steps = len(read_metrics("run"))
    manifest = read_manifest("run")
    assert (manifest["status"], manifest["results"]["steps"]) == ("interrupted", steps)
    assert manifest["ended"] is not None
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"interrupted after {steps} of {2 * (steps - 1)} steps")


def test_a_bug_marks_the_run_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("rjax.runs.train.evaluate", broken)
    with pytest.raises(ZeroDivisionError):
        main([*SHORT, "--no-plan", "--out", "run"])
    assert read_manifest("run")["status"] == "failed"


BAD = {
    "--epochs 0": "--epochs must be a number above 0, got 0",
    "--epochs -3": "--epochs must be a number above 0, got -3",
    "--epochs many": "--epochs",
    "--epochs": "--epochs",
    "--epoch 3": "did you mean --epochs?",
    "--batch-size 0": "--batch-size must be",
    "--batch-size 100000": "larger than the",
    "--batch-size 30 --accumulation-steps 4": "does not split",
    "--accumulation-steps 0": "--accumulation-steps must be",
    "--learning-rate nan": "--learning-rate must be",
    "--learning-rate 0": "--learning-rate must be",
    "--learning-rate inf": "--learning-rate must be",
    "--weight-decay -1": "--weight-decay must be",
    "--ema-decay 1": "--ema-decay must be below 1",
    "--ema-decay -0.5": "--ema-decay must be",
    "--clip-norm 0": "--clip-norm must be",
    "--clip-value -1": "--clip-value must be",
    "--clip-norm 1 --clip-value 1": "exclude each other",
    "--loss-scale 0": "`init` must be a finite number > 0",
    "--loss-scale 0.25": "below the floor",
    "--loss-scale nan": "`init` must be a finite number > 0",
    "--seed -1": "--seed must be",
    "--seed 4294967296": "--seed must be below",
    "--data imagenet": "'imagenet'",
    "--model transformer": "'transformer'",
    "--precision fp8": "'fp8'",
    "--optimizer lion": "'lion'",
    "--nonsense": "--nonsense",
    "stray": "stray",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_code_2(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words.split()]) == 2
    line = complaint(capsys)
    assert line.startswith("rjax train: ") and BAD[words] in line
    assert not Path("runs").exists()


@pytest.mark.parametrize("words", [[], ["trian"], ["--help-me"]], ids=repr)
def test_no_command_is_one_line_and_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert complaint(capsys).startswith("rjax: ")


def test_a_narrow_terminal_changes_no_complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["train", "--data", "imagenet"]) == 2
    assert "choice 'imagenet' for argument '--data'" in complaint(capsys)


@pytest.mark.parametrize("out", ["full", "file", "file/run"])
def test_an_unusable_folder_is_refused(
    out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/kept").write_text("kept")
    Path("file").write_text("kept")
    assert main([*SHORT, "--out", out]) == 2
    line = complaint(capsys)
    assert out in line and "--out" in line
    assert Path("full/kept").read_text() == Path("file").read_text() == "kept"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "--ema-decay" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rjax {rjax.__version__}\n"


def test_plan_prints_the_layout_and_trains_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--precision", "bf16", "--optimizer", "adam"]) == 0
    out = capsys.readouterr().out
    assert "V_FC_WEIGHT" in out and "bf" in out
    assert main(["plan", "--precision", "fp32", "--ema-decay", "0"]) == 0
    assert "V_FC_WEIGHT" not in capsys.readouterr().out
    assert os.listdir() == []


def test_the_module_ends_with_the_exit_code_and_no_traceback() -> None:
    command = [sys.executable, "-m", "rjax", "train", "--epochs", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("rjax train: --epochs")
    assert done.stderr.count("\n") == 1
