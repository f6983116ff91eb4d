"""Killed at random moments, again and again, a run ends as if nobody had touched it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from run_helpers import assert_same_run, read_manifest

from rjax.checkpoint import files
from rjax.repro import RecordError
from rjax.repro import format as on_disk

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

LONG = pytest.mark.skipif(
    "RJAX_LONG" not in os.environ, reason="takes minutes: set RJAX_LONG=1"
)

OPTIONS = (
    "--no-plan --hidden 16 --batch-size 32 --loss-scale 1073741824 --eval-every 5 "
    "--log-every 100000 --record-every 44 --dropout 0.1"
).split()
# How often a run is killed, how many epochs of 44 steps it has, and within how many
# steps of training it is killed; 150 lie between two checkpoints.
FEW, STEPS, EPOCHS = (10, 200, 900), (25, 600, 900), (25, 4000, 5000)


def command(*words):
    return [sys.executable, "-m", "rjax", "train", *words]


def train(*words):
    """Run to the end, and return what it says."""
    done = subprocess.run(
        command(*words), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def written():
    """Return how many steps are on disk, in metrics and in the record."""
    path, record = Path("killed/metrics.jsonl"), Path("killed") / on_disk.FOLDER
    try:
        row = on_disk.read_layout(record).step_row
        rows = on_disk.Rows(record / on_disk.STEPS, row).count
        return min(rows, path.read_bytes().count(b"\n"))
    except (RecordError, OSError):
        return 0


def under_way():
    """Return whether the run was made and has not come to its end."""
    made = Path("killed/manifest.json").exists()
    return made and read_manifest("killed")["status"] == "running"


def kill(draw, within, *words):
    """Kill a run at a random moment; return whether it had not ended before.

    One in three while it is being made or taken up, else while it trains and saves:
    after some steps, however long they take here, and some milliseconds.
    """
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        early = draw.random() < 1 / 3
        for line in process.stdout:
            if line.startswith(("going on", "training") if early else "training"):
                break
        steps = 0 if early else written() + draw.randrange(within)
        while process.poll() is None and written() < steps:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return process.returncode == -signal.SIGKILL


def kill_often(draw, kills, epochs, within, *options):
    """Kill a run that often, then let it end; return after how many steps it went on.

    Whatever it leaves in between, its last checkpoint of all that are whole is used. A
    machine that is so fast that the run ends before has seen fewer kills.
    """
    times = 0
    words = [*OPTIONS, "--epochs", str(epochs), *options, "--out", "killed"]
    while times < kills and (not times or under_way()):
        times += kill(draw, within, *words)
        if Path("killed/manifest.json").exists():
            words = ["--resume", "killed"]
    if under_way():
        assert "going on in killed after" in train("--resume", "killed")
    seals = Path("killed/checkpoints").glob(f"*/{files.SEAL}")
    assert len(list(seals)) <= 4
    return [again["step"] for again in read_manifest("killed")["resumed"]]


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        pytest.param([], FEW, id="steps-10"),
        pytest.param([], STEPS, id="steps-25", marks=LONG),
        pytest.param(["--whole-epochs"], EPOCHS, id="epochs-25", marks=LONG),
    ],
)
def test_a_killed_run_ends_bit_equal_to_the_unbroken_one(
    kind, times, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    kills, epochs, within = times
    draw = random.Random(int(os.environ.get("RJAX_SEED", 0)))
    options = [*kind, "--checkpoint-every", "150"]
    train(*OPTIONS, "--epochs", str(epochs), *kind, "--out", "whole")
    steps = kill_often(draw, kills, epochs, within, *options)
    assert len(steps) >= 4 and steps == sorted(steps)
    assert len(set(steps)) >= 3, "the run came nowhere between the kills"
    assert_same_run("whole", "killed")
    print(f"went on {len(steps)} times, after {steps} steps")
