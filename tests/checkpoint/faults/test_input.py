"""Data that are bad, or end, in the middle of an epoch."""

import time

import numpy as np
import pytest

pytest.importorskip("tyro")

from run_helpers import assert_same_run, complaint, read_lines, read_manifest

import rjax
from rjax.checkpoint import load_weights
from rjax.cli import main
from rjax.runs import batches

pytestmark = pytest.mark.standard_promotion

BASE = (
    "train --epochs 3 --batch-size 128 --no-plan --hidden 16 --checkpoint-every 4"
).split()
BAD = (5, 6, 17)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def changed(monkeypatch, change):
    """Let a function of step and batch have every batch first."""
    original = batches.from_host

    def from_host(examples, batch_size, seed, steps, augment):
        found = original(examples, batch_size, seed, steps, augment)
        for step, batch in zip(steps, found, strict=True):
            yield change(step, batch)

    monkeypatch.setattr(batches, "from_host", from_host)


def nan_at_some_steps(step, batch):
    images, labels = batch
    return (np.full_like(images, np.nan) if step in BAD else images), labels


def test_a_source_that_fails_leaves_a_checkpoint(monkeypatch, capsys):
    assert main([*BASE, "--out", "whole"]) == 0

    def broken(step, batch):
        if step == 19:
            raise rjax.data.DataError("pictures/7.png cannot be read: remove it.")
        return batch

    with monkeypatch.context() as patch:
        changed(patch, broken)
        assert main([*BASE, "--out", "run"]) == 2
    line = complaint(capsys)
    assert "pictures/7.png cannot be read: remove it. (ended after 19 of 33" in line
    assert read_manifest("run")["status"] == "failed"
    assert len(read_lines("run")) == 19
    assert main(["train", "--resume", "run"]) == 0
    assert "going on in run after 16 of 33 steps" in capsys.readouterr().out
    assert_same_run("whole", "run")


def test_bad_batches_are_skipped_before_and_after_a_break(monkeypatch):
    """The counters of skips, and the scale, go on where they were."""
    changed(monkeypatch, nan_at_some_steps)
    assert main([*BASE, "--out", "whole"]) == 0

    def broken(step, batch):
        if step == 14:
            raise rjax.data.DataError("gone")
        return nan_at_some_steps(step, batch)

    with monkeypatch.context() as patch:
        changed(patch, broken)
        assert main([*BASE, "--out", "run"]) == 2
    assert main(["train", "--resume", "run"]) == 0
    assert_same_run("whole", "run")
    rows = read_lines("run")
    assert [row["step"] for row in rows if not row["applied"]] == list(BAD)
    assert (rows[-1]["skipped"], rows[-1]["scale"]) == (3, 1024.0)


def test_data_that_are_nothing_but_bad_end_in_the_diagnosis(monkeypatch, capsys):
    """The last checkpoint has the weights of before: no skip has moved them."""
    changed(monkeypatch, lambda step, b: nan_at_some_steps(5 if step > 8 else step, b))
    words = ["--max-consecutive-skips", "10", "--out", "run"]
    assert main([*BASE, *words]) == 1
    assert "steps in a row were skipped" in complaint(capsys)
    with rjax.checkpoint.Checkpoints("run/checkpoints", PLAN) as saved:
        first, *_, last = saved.steps()
    assert (first, last) == (11, 16)
    held = [load_weights("run/checkpoints", step=step) for step in (first, last)]
    assert np.array_equal(*(each["params"]["head"]["kernel"] for each in held))


# Only what lies in the folder is looked at.
PLAN = rjax.make_plan({"w": np.ones(1, np.float32)}, rjax.Config())


def test_a_clock_that_goes_backwards_changes_nothing(monkeypatch, capsys):
    assert main([*BASE, "--out", "whole"]) == 0
    now = iter(range(2_000_000_000, 0, -3600))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(now)))
        patch.setattr(time, "time_ns", lambda: next(now) * 10**9)
        changed(patch, _gone)
        assert main([*BASE, "--out", "run"]) == 2
        assert "gone" in complaint(capsys)
    assert main(["train", "--resume", "run"]) == 0
    assert "going on in run after 24 of 33 steps" in capsys.readouterr().out
    assert_same_run("whole", "run")


def _gone(step, batch):
    if step == 25:
        raise rjax.data.DataError("gone")
    return batch
