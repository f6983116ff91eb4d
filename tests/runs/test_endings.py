"""Runs that end badly: what is left of them, and what they say."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")

from run_helpers import SHORT, complaint, read_lines, read_manifest

import rjax
from rjax.cli import main
from rjax.repro.manifest import Manifest
from rjax.runs.interrupts import Interrupted, Interrupts
from rjax.runs.jsonl import JsonLines
from rjax.runs.recorder import Recorder

pytestmark = pytest.mark.standard_promotion


def test_a_hopeless_run_ends_in_the_diagnosis(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--learning-rate 1e12 --optimizer sgd --max-consecutive-skips 5"
    assert main([*SHORT, *options.split(), "--log-every", "5"]) == 1
    line = complaint(capsys)
    assert line.startswith("rjax train: ") and "steps in a row were skipped" in line
    assert "hidden1/kernel" in line or "head/kernel" in line
    manifest = read_manifest()
    assert manifest["status"] == "failed"
    assert manifest["error"] in line
    rows = read_lines()
    assert rows[-1]["consecutive_skips"] >= 5
    assert manifest["results"]["steps"] == len(rows) <= 22


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_run_says_how_far_it_got(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = Recorder.add
    signum = signal.Signals[name]

    def interrupt(self: Recorder, report: Any, state: Any) -> None:
        taken(self, report, state)
        if self.epoch == 2:
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    monkeypatch.setattr(Recorder, "add", interrupt)
    assert main(SHORT) == 128 + signum
    assert signal.getsignal(signum) is before
    manifest = read_manifest()
    assert (manifest["status"], manifest["signal"]) == ("interrupted", name)
    assert manifest["ended"] is not None
    # Every step begun is in the record, the one that was interrupted too.
    assert manifest["results"]["steps"] == len(read_lines()) == 12
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "interrupted after 12 of 22 steps, in epoch 2 of 2",
        "run left in run",
    ]


@pytest.mark.slow
def test_ctrl_c_at_a_random_moment_leaves_a_readable_folder() -> None:
    command = [sys.executable, "-m", "rjax", "train", "--epochs", "100000"]
    process = subprocess.Popen(
        [*command, "--no-plan", "--out", "run", "--eval-every", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch") and "     3/" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    last = out.splitlines()[-2:]
    steps = int(re.findall(r"interrupted after (\d+) of", last[0])[0])
    manifest = read_manifest()
    assert manifest["status"] == "interrupted"
    assert manifest["results"]["steps"] == steps == len(read_lines()) >= 3 * 44
    assert [row["step"] for row in read_lines()] == list(range(steps))


def test_an_interrupt_waits_for_a_write_and_a_second_one_does_not() -> None:
    done = []
    with pytest.raises(Interrupted) as caught, Interrupts() as interrupts:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("written")
        done.append("never")
    assert done == ["written"] and caught.value.code == 143
    with pytest.raises(Interrupted) as caught, Interrupts() as interrupts:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("never")
    assert done == ["written"] and caught.value.code == 130


def test_the_outermost_write_counts() -> None:
    done = []
    with pytest.raises(Interrupted), Interrupts() as interrupts:
        with interrupts.held():
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGTERM)
            done.append("written")
        done.append("never")
    assert done == ["written"]


def test_what_waits_for_the_end_is_dropped_with_it() -> None:
    done = []
    with Interrupts() as interrupts:
        with interrupts.ending():
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGTERM)
            done.append("ended")
        interrupts.obey()
    assert done == ["ended"]


def test_ctrl_c_while_a_run_is_closed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = Manifest.finish

    def interrupted(self: Manifest, *words: Any, **facts: Any) -> None:
        finish(self, *words, **facts)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Manifest, "finish", interrupted)
    assert main([*SHORT, "--limit-steps", "3"]) == 0
    assert read_manifest()["status"] == "finished"
    out, error = capsys.readouterr()
    assert "from EMA" in out.splitlines()[-1] and error == ""


def test_ctrl_c_before_the_first_step_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rjax.runs.train.prepare_job", interrupted)
    assert main(SHORT) == 130
    assert complaint(capsys) == "rjax train: interrupted\n"


def test_a_bug_marks_the_run_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("rjax.runs.train.fit", broken)
    with pytest.raises(ZeroDivisionError):
        main(SHORT)
    assert read_manifest()["status"] == "failed"


def test_data_that_breaks_in_the_middle_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = rjax.data.train_batches

    def broken(*arguments: Any, **options: Any) -> Any:
        for number, batch in enumerate(real(*arguments, **options)):
            if number == 15:
                raise rjax.data.DataError("some/picture.png cannot be read")
            yield batch

    monkeypatch.setattr(rjax.data, "train_batches", broken)
    assert main(SHORT) == 2
    line = complaint(capsys)
    assert line.startswith("rjax train: some/picture.png cannot be read")
    assert "after 15 of 22 steps, in epoch 2 of 2" in line
    # What had been done is in the record.
    assert len(read_lines()) == 15 == read_manifest()["results"]["steps"]
    assert read_manifest()["status"] == "failed"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line_and_code_2(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = JsonLines.write

    def full(self: JsonLines, *rows: Any) -> None:
        if rows[0]["step"] >= 11:
            raise OSError(number, os.strerror(number))
        real(self, *rows)

    monkeypatch.setattr(JsonLines, "write", full)
    assert main([*SHORT, "--eval-every", "0"]) == 2
    line = complaint(capsys)
    assert "no space is left for the run in run" in line
    assert "after 11 of 22 steps" in line and "--out" in line
    assert [row["step"] for row in read_lines()] == list(range(11))


def test_a_disk_full_from_the_start_leaves_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(SHORT) == 2
    assert "no space is left for the run in run:" in complaint(capsys)
    assert os.listdir("run") == []


@pytest.mark.slow
def test_a_limit_on_file_sizes_keeps_whole_lines() -> None:
    """The real thing: a write that fits in part."""
    # The shell sets the limit, in blocks of 512 bytes; forking here would warn.
    command = f"ulimit -f 50; exec {sys.executable} -m rjax train --no-plan --out run"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "no space is left" in done.stderr
    assert 0 < len(read_lines()) < 880
    assert read_manifest()["status"] == "failed"
    assert Path("run/metrics.jsonl").read_bytes().endswith(b"}\n")


def test_lines_that_do_not_fit_leave_those_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"step": 0})
    inner = lines._file._file

    class Short:
        """Takes three bytes, then none."""

        def __init__(self) -> None:
            self.taken = False

        def write(self, data: bytes) -> int:
            if self.taken:
                raise OSError(errno.ENOSPC, "full")
            self.taken = True
            return inner.write(data[:3])

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    monkeypatch.setattr(lines._file, "_file", Short())
    with pytest.raises(OSError, match="full"):
        lines.write({"step": 1}, {"step": 2})
    monkeypatch.setattr(lines._file, "_file", inner)
    lines.write({"step": 3})
    lines.close()
    assert (tmp_path / "x.jsonl").read_text() == '{"step": 0}\n{"step": 3}\n'


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    command = f"{sys.executable} -m rjax plan | head -1"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_nan_in_the_data_is_a_diagnosis_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = rjax.data.load_digits()
    images = np.full_like(digits.train[0], np.nan)
    broken = rjax.data.Dataset("broken", (images, digits.train[1]), digits.test, 10)
    monkeypatch.setattr(rjax.data, "load_digits", lambda: broken)
    options = ["--max-consecutive-skips", "10", "--log-every", "10"]
    assert main([*SHORT, *options]) == 1
    line = complaint(capsys)
    assert "11 steps in a row were skipped" in line and "the loss itself is nan" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["plan", " ".join(SHORT)])
def test_standard_output_without_room_is_one_line_and_code_2(words: str) -> None:
    command = f"{sys.executable} -m rjax {words} > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "standard output" in done.stderr
