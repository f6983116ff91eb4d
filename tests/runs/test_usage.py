"""Bad input is one line that says what to change, and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from run_helpers import SHORT, complaint

import rjax
from rjax.cli import main
from rjax.runs.options import PlanOptions, TrainOptions, flag, flat

pytestmark = pytest.mark.standard_promotion

BAD = {
    "--epochs 0": "--epochs must be a number above 0, got 0",
    "--epochs -3": "--epochs must be a number above 0, got -3",
    "--epochs many": "--epochs takes INT, got 'many'",
    "--epochs 1.5": "--epochs takes INT, got '1.5'",
    "--epochs": "missing value for argument '--epochs' (see",
    "--epoch 3": "did you mean --epochs?",
    "--learning-rate None": "--learning-rate takes FLOAT, got 'None'",
    "--batch-size 0": "--batch-size must be",
    "--batch-size 100000": "larger than the 1438 training images of digits",
    "--batch-size 1400 --validation-fraction 0.5": "larger than the 719 training",
    "--batch-size 30 --accumulation-steps 4": "does not split",
    "--accumulation-steps 0": "--accumulation-steps must be",
    "--learning-rate nan": "--learning-rate must be",
    "--learning-rate 0": "--learning-rate must be",
    "--learning-rate inf": "--learning-rate must be",
    "--weight-decay -1": "--weight-decay must be",
    "--momentum 1": "--momentum must be a number below 1",
    "--momentum 0.5 --optimizer adam": "--momentum means nothing with --optimizer adam",
    "--ema-decay 1": "--ema-decay must be a number below 1",
    "--ema-decay -0.5": "--ema-decay must be",
    "--ema-decay 0 --ema-batch-stats copy": "--ema-batch-stats needs an average",
    "--clip-norm 0": "--clip-norm must be",
    "--clip-value -1": "--clip-value must be",
    "--clip-norm 1 --clip-value 1": "exclude each other",
    "--clip-on-inf clamp": "--clip-on-inf needs --clip-value",
    "--clip-norm 1 --clip-on-inf clamp": "--clip-on-inf needs --clip-value",
    "--loss-scale 0": "--loss-scale must be a number above 0",
    "--loss-scale 0.25": "below the floor",
    "--loss-scale nan": "--loss-scale must be",
    "--scaling off --loss-scale 8": "--loss-scale means nothing with --scaling off",
    "--scaling quarter": "'quarter'",
    "--max-consecutive-skips 0": "--max-consecutive-skips must be",
    "--implementation mosaic_gpu": "--implementation mosaic_gpu cannot serve: Mosaic",
    "--implementation cuda": "'cuda'",
    "--seed -1": "--seed must be",
    "--seed 4294967296": "--seed must be below",
    "--data imagenet": "'imagenet'",
    "--data mnist": "--data mnist needs --data-dir",
    "--data-dir somewhere": "--data digits reads no files",
    "--data mnist --data-dir missing": "missing",
    "--data cifar10 --data-dir missing": "missing",
    "--data images --data-dir missing": "missing",
    "--image-size 32": "--image-size means nothing with --data digits",
    "--model transformer": "'transformer'",
    "--hidden 0": "--hidden must be",
    "--hidden": "--hidden needs a number",
    "--hidden wide": "--hidden takes INT, got 'wide'",
    "--hidden 64 --model cnn": "--hidden means nothing with --model cnn",
    "--dropout 1": "--dropout must be",
    "--width 8": "take --model cnn or resnet",
    "--blocks 2 --model cnn": "--blocks means nothing with --model cnn",
    "--precision fp8": "'fp8'",
    "--optimizer lion": "'lion'",
    "--schedule linear": "'linear'",
    "--milestones 1 2": "--milestones means nothing with --schedule cosine",
    "--schedule multistep": "needs --milestones",
    "--warmup-epochs 20": "leaves nothing of 20 epochs",
    "--label-smoothing 1": "--label-smoothing must be",
    "--limit-steps 0": "--limit-steps must be",
    "--log-every 0": "--log-every must be",
    "--eval-every -1": "--eval-every must be",
    "--early-stop 0": "--early-stop must be",
    "--early-stop 2 --eval-every 0": "--early-stop needs evaluations",
    "--early-stop 2 --validation-fraction 0": "must not watch the test set",
    "--validation-fraction 1": "--validation-fraction must be",
    "--validation-fraction 0.00001": "--validation-fraction 1e-05",
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
    assert main([*SHORT[:-1], out]) == 2
    line = complaint(capsys)
    assert out in line and "--out" in line
    assert Path("full/kept").read_text() == Path("file").read_text() == "kept"


def test_a_missing_package_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["train"]) == 2
    assert 'pip install "rjax[data]"' in complaint(capsys)


def test_tensorboard_without_a_writer_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert main([*SHORT, "--tensorboard"]) == 2
    assert "pip install tensorboardX" in complaint(capsys)
    assert not Path("run").exists()


def test_help_names_every_option_in_its_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    for command, options in (("train", TrainOptions()), ("plan", PlanOptions())):
        assert main([command, "--help"]) == 0
        said = capsys.readouterr().out
        for name in flat(options):
            assert f" {flag(name)}" in said or f", --no-{name}" in said
        for group in vars(options):
            assert f"{group} options" in said
        assert "None" not in said and "auto" in said
        assert max(map(len, said.splitlines())) <= 100


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("data", "parameters"),
    [("mnist", 235146), ("cifar10", 820874), ("cifar100", 832484)],
)
def test_plan_of_a_published_set_needs_no_files(
    data: str, parameters: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--data", data]) == 0
    assert capsys.readouterr().out.startswith(f"{parameters:,} parameters in 6 slots")


def test_the_module_ends_with_the_exit_code_and_no_traceback() -> None:
    command = [sys.executable, "-m", "rjax", "train", "--epochs", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("rjax train: --epochs")
    assert done.stderr.count("\n") == 1
