"""A run that is broken off and taken up again is the unbroken run, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from helpers import bits
from run_helpers import assert_same_run, complaint, read_lines, read_manifest

import rjax
from rjax.checkpoint import files, load_weights
from rjax.cli import main
from rjax.repro import format as on_disk
from rjax.runs.recorder import Recorder

pytestmark = pytest.mark.standard_promotion

# Three epochs of eleven steps on digits; a scale that overflows at first.
BASE = (
    "train --epochs 3 --batch-size 128 --no-plan --hidden 16 --loss-scale 1073741824 "
    "--dropout 0.1"
).split()
KINDS = {
    "steps": [],
    "augmented": ["--crop-pad", "1", "--optimizer", "adamw", "--ema-decay", "0"],
    "whole": ["--whole-epochs"],
    "recorded": ["--record-grads", "--snapshot-every", "6", "--record-every", "4"],
    "stopped": ["--early-stop", "1", "--learning-rate", "1e-9", "--ema-decay", "0"],
    "stopped-whole": [
        "--early-stop", "1", "--whole-epochs", "--learning-rate", "1e-9",
        "--ema-decay", "0",
    ],
    "bf16": [
        "--precision", "bf16", "--scaling", "dynamic", "--loss-scale", "1048576",
        "--eval-every", "2",
    ],
}  # fmt: skip


class Plug(Exception):
    """What breaks a run off."""


def start(name, *words):
    """Train, and return the exit code."""
    return main([*BASE, "--out", name, *words])


def break_off(monkeypatch, step, name, *words):
    """Train until that many steps are begun, then pull the plug."""
    with monkeypatch.context() as patch:
        for method in ("add", "add_epoch"):
            taken = getattr(Recorder, method)

            def pulled(self, report, state, taken=taken):
                taken(self, report, state)
                if int(state.step) >= step:
                    raise Plug

            patch.setattr(Recorder, method, pulled)
        with pytest.raises(Plug):
            start(name, *words)


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *((kind, 4) for kind in ("steps", "whole", "recorded", "stopped")),
        ("whole", None),
        *(
            pytest.param(kind, every, marks=pytest.mark.slow)
            for kind, every in (
                ("augmented", 4),
                ("bf16", 4),
                ("stopped-whole", 4),
                ("stopped", None),
            )
        ),
    ],
)
def test_a_broken_run_goes_on_to_the_same_end(kind, every, monkeypatch, capsys):
    words = KINDS[kind]
    assert start("a", *words, "--checkpoint-every", "0") == 0
    assert not Path("a/checkpoints").exists()
    saves = [] if every is None else ["--checkpoint-every", str(every)]
    total = read_manifest("a")["results"]["steps"]
    break_off(monkeypatch, min(19, total - 1), "b", *words, *saves)
    assert read_manifest("b")["status"] == "failed"
    capsys.readouterr()
    assert main(["train", "--resume", "b"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "b has no checkpoint yet" in out or "going on in b after" in out
    assert_same_run("a", "b")


def test_the_best_of_early_stopping_is_saved_whatever_the_turn(monkeypatch, capsys):
    words = [*KINDS["stopped"], "--checkpoint-every", "1000"]
    assert start("a", *words) == 0
    break_off(monkeypatch, 19, "b", *words)
    capsys.readouterr()
    assert main(["train", "--resume", "b"]) == 0
    assert "going on in b after 10 of 30 steps" in capsys.readouterr().out
    assert_same_run("a", "b")


@pytest.mark.parametrize("kind", ["steps", "whole", "stopped-whole"])
def test_lines_are_written_before_a_checkpoint_is(kind, monkeypatch):
    seen, save = [], rjax.checkpoint.Checkpoints.save

    def watched(self, state, **named):
        step = int(state.step)
        layout = on_disk.read_layout(Path("a/record"))
        rows = on_disk.Rows(Path("a/record/steps.bin"), layout.step_row)
        seen.append((step, len(read_lines("a")) - step, rows.count - step))
        save(self, state, **named)

    monkeypatch.setattr(rjax.checkpoint.Checkpoints, "save", watched)
    assert start("a", *KINDS[kind], "--checkpoint-every", "4") == 0
    assert len(seen) >= 2 and seen[-1][0] == len(read_lines("a"))
    for step, lines, rows in seen:
        # Of whole epochs the next one may be under way, and in the record already.
        assert lines == 0 and rows >= 0, step


def test_lines_go_on_where_they_ended(monkeypatch, capsys):
    assert start("a", "--log-every", "5") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line]
    break_off(monkeypatch, 18, "b", "--log-every", "5", "--checkpoint-every", "3")
    capsys.readouterr()
    assert main(["train", "--resume", "b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "going on in b after 15 of 33 steps"
    again = [line for line in lines if line.startswith("epoch")]
    without_speed = [line.rpartition("skipped")[0] for line in told]
    assert len(again) > 3
    assert [x.rpartition("skipped")[0] for x in again] == without_speed[-len(again) :]
    [resumed] = read_manifest("b")["resumed"]
    assert (resumed["step"], resumed["changes"]) == (15, [])
    assert resumed["command"] == "rjax train --resume b"


def test_a_run_may_be_broken_more_than_once(monkeypatch):
    assert start("a") == 0
    break_off(monkeypatch, 9, "b", "--checkpoint-every", "4")
    for step in (14, 27, 33):
        with monkeypatch.context() as patch:
            taken = Recorder.add

            def pulled(self, report, state, step=step, taken=taken):
                taken(self, report, state)
                if int(state.step) == step:
                    raise Plug

            patch.setattr(Recorder, "add", pulled)
            with pytest.raises(Plug):
                main(["train", "--resume", "b"])
    assert main(["train", "--resume", "b"]) == 0
    assert_same_run("a", "b")
    steps = [again["step"] for again in read_manifest("b")["resumed"]]
    assert steps == [8, 12, 24, 32]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one epoch with checkpoints at steps 4, 8 and 11."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    words = ["--epochs", "1", "--out", str(folder), "--checkpoint-every", "4"]
    assert main([*BASE, *words]) == 0
    return folder


@pytest.fixture
def run(finished):
    """Such a run in the folder of the test, as its own options say."""
    shutil.copytree(finished, "run")
    manifest = read_manifest("run")
    manifest["options"]["out"] = "run"
    Path("run/manifest.json").write_text(json.dumps(manifest))
    return Path("run")


def unfinished(run):
    manifest = read_manifest(run)
    manifest["status"] = "running"
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_a_finished_run_goes_on_with_more_epochs(run, capsys):
    assert main(["train", "--resume", "run"]) == 2
    assert "has taken its 11 steps: give more, such as by --epochs" in complaint(capsys)
    assert main("train --resume run --epochs 2 --learning-rate 0.01".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "with --epochs 2 instead of 1" in lines
    assert "with --learning-rate 0.01 instead of 0.1" in lines
    rows = read_lines("run")
    assert [row["step"] for row in rows] == list(range(22))
    assert [row["epoch"] for row in rows] == [1] * 11 + [2] * 11
    assert rows[11]["learning_rate"] < 0.011
    assert [row["step"] for row in read_lines("run", "evaluations")] == [11, 22]
    manifest = read_manifest("run")
    assert manifest["options"]["epochs"] == 2
    assert manifest["resumed"][0]["changes"] == [
        "--learning-rate 0.01 instead of 0.1",
        "--epochs 2 instead of 1",
    ]
    assert main(["compare", "run", "run", "--replay", "12"]) in (0, 2)


def test_the_end_alone_may_be_what_is_left(run, finished):
    unfinished(run)
    for name in ("weights.npz", "weights_ema.npz"):
        (run / name).unlink()
    assert main(["train", "--resume", "run"]) == 0
    assert_same_run(finished, run)


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(run, finished, capsys):
    unfinished(run)
    (run / "checkpoints" / "11" / files.SEAL).write_text("")
    assert main(["train", "--resume", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not used: ") and "11 is damaged" in lines[0]
    assert lines[1] == "going on in run after 8 of 11 steps"
    assert_same_run(finished, run)


@pytest.mark.parametrize(
    ("name", "step"),
    [("metrics.jsonl", 4), ("evaluations.jsonl", 8), ("record/steps.bin", 4)],
)
def test_a_checkpoint_of_which_lines_are_lost_is_not_used(
    run, finished, name, step, capsys
):
    """As after a power cut: the file ends earlier, in the middle of a line."""
    unfinished(run)
    path = run / name
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 11])
    assert main(["train", "--resume", "run"]) == 0
    out = capsys.readouterr().out
    assert f"going on in run after {step} of 11 steps" in out
    assert_same_run(finished, run)


def test_a_run_without_checkpoints_begins_anew(run, finished, capsys):
    unfinished(run)
    shutil.rmtree(run / "checkpoints")
    assert main(["train", "--resume", "run"]) == 0
    assert "run has no checkpoint yet: from the start" in capsys.readouterr().out
    assert_same_run(finished, run)


def test_weights_in_the_other_format(run):
    assert main("train --resume run --epochs 2 --weights safetensors".split()) == 0
    master = load_weights(run / "weights.safetensors")
    assert bits(master) == bits(load_weights(run / "checkpoints"))
    assert bits(load_weights(run / "weights_ema.safetensors")) == bits(
        load_weights(run / "checkpoints", "ema")
    )


WRONG = {
    "--seed 1": "--seed was 0 and cannot change in a run that goes on",
    "--batch-size 64": "--batch-size was 128 and cannot change",
    "--record-every 5": "--record-every was 10 and cannot change",
    "--whole-epochs": "--whole-epochs was False and cannot change",
    "--early-stop 3": "--early-stop would hold other images out",
    "--out other": "--resume goes on in run: leave out --out",
    "--hidden 8 --epochs 2": "another layout than `plan`: hidden1/bias has shape [16]",
    "--precision bf16 --epochs 2": "another layout than `plan`",
    "--checkpoint-every -1": "--checkpoint-every must be a number from 0 up",
    "--keep-checkpoints 0": "--keep-checkpoints must be a number above 0",
    "--weights pickle": "invalid choice",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_change_is_refused(run, words, capsys):
    before = (run / "manifest.json").read_bytes()
    assert main(["train", "--resume", "run", *words.split()]) == 2
    assert WRONG[words] in complaint(capsys)
    assert (run / "manifest.json").read_bytes() == before
    assert len(read_lines("run")) == 11


def test_a_record_can_be_left(run):
    assert main("train --resume run --epochs 2 --record-every 0".split()) == 0
    assert len(read_lines("run")) == 22


def test_other_data_are_refused(run, capsys):
    manifest = read_manifest(run)
    manifest["data"]["fingerprint"] = "other"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main("train --resume run --epochs 2".split()) == 2
    assert "run was trained on other data than --data digits" in complaint(capsys)


def test_what_is_no_run_is_refused(capsys):
    assert main(["train", "--resume", "nowhere"]) == 2
    assert "nowhere/manifest.json names no options" in complaint(capsys)
    assert not Path("nowhere").exists()


def test_a_run_that_lost_all_it_wrote_is_refused(run, capsys):
    unfinished(run)
    (run / "metrics.jsonl").write_text("")
    assert main(["train", "--resume", "run"]) == 2
    assert "run has lost what it wrote of the steps before" in complaint(capsys)


def test_what_is_kept(run):
    found = rjax.checkpoint.Checkpoints(
        run / "checkpoints",
        # The plan is not looked at.
        rjax.make_plan({"w": [1.0]}, rjax.Config()),
        best="loss",
        mode="min",
    )
    assert found.steps() == (4, 8, 11) and found.best() == 11
    [row] = read_lines("run", "evaluations")
    seal = files.read_seal(run / "checkpoints" / "11")
    assert seal["metrics"] == {"loss": row["loss"]}
