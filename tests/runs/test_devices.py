"""`rjax train` over several devices, and over several processes."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doc_pages import DOCS, read_page

pytest.importorskip("tyro")

from helpers import fresh_process
from run_helpers import complaint, read_lines, read_manifest

from rjax.cli import main

pytestmark = pytest.mark.standard_promotion

FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ADDRESS = "--coordinator 127.0.0.1:1"
WRONG = {
    "--devices 2": "--devices 2 is more than the 1 that JAX sees (cpu): give 1 or less,"
    " or make a CPU look like several with "
    "XLA_FLAGS=--xla_force_host_platform_device_count=2",
    "--devices 0": "--devices must be all or a number above 0, got 0",
    "--devices some": "--devices must be all or a number above 0, got some",
    "--shard-optimizer": "--shard-optimizer has nothing to share with one device",
    "--processes 2": "--coordinator is missing",
    ADDRESS: "--processes is missing: several processes need",
    f"{ADDRESS} --processes 2": "--process is missing",
    f"{ADDRESS} --processes 2 --process 2": "got 2 of 2",
    "--coordinator here --processes 1 --process 0": "must be HOST:PORT of the first",
    "--coordinator auto --processes 2": "finds out --processes by itself",
    f"{ADDRESS} --processes 1 --process 0 --heartbeat 0": "--heartbeat must be",
}


@pytest.mark.parametrize("options", WRONG)
def test_devices_that_cannot_be_are_refused(options, capsys):
    if "2" in options and "--devices" in options and os.environ.get("XLA_FLAGS"):
        pytest.skip("there may be two devices")
    assert main(["train", "--limit-steps", "1", *options.split()]) == 2
    assert WRONG[options] in complaint(capsys)
    assert not Path("runs").exists()


def test_the_environment_names_the_processes(monkeypatch, capsys):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    assert main(["train"]) == 2
    assert "JAX_NUM_PROCESSES must be a number, got 'two'" in complaint(capsys)


OVER_FOUR = """
import contextlib, io, json
from rjax.cli import main
from rjax.runs import devices
said, states = {}, {}
place = devices.Spread.state
def noted(self, state):
    state = place(self, state)
    here = state.master.addressable_shards
    states.setdefault(len(said), [len(here), len(here[0].data) < len(state.master)])
    return state
devices.Spread.state = noted
BASE = "train --batch-size 96 --no-plan --hidden 16 --log-every 7".split()
def run(name, *words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*BASE, "--out", name, *words])
    said[name] = [code, out.getvalue(), err.getvalue()]
TWO = ["--epochs", "2"]
run("one", *TWO)
run("three", *TWO, "--devices", "3")
run("sharded", *TWO, "--devices", "all", "--shard-optimizer", "--record-grads",
    "--snapshot-every", "10")
run("whole", *TWO, "--devices", "2", "--whole-epochs", "--shard-optimizer",
    "--early-stop", "3")
run("uneven", "--batch-size", "90", "--devices", "4")
run("micro", "--devices", "all", "--accumulation-steps", "6", "--batch-size", "60")
with contextlib.redirect_stdout(io.StringIO()) as out:
    said["compare"] = [main(["compare", "three", "sharded"]), out.getvalue(), ""]
    said["replay"] = [main(["compare", "one", "sharded", "--replay", "2"]), "", ""]
said["states"] = [states[i] for i in range(4)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Runs over one to four devices, all in one process."""
    folder, before = tmp_path_factory.mktemp("four"), Path.cwd()
    os.chdir(folder)
    try:
        flags = f"--xla_force_host_platform_device_count=4 {FAST}"
        said = json.loads(fresh_process(OVER_FOUR, XLA_FLAGS=flags).splitlines()[-1])
    finally:
        os.chdir(before)
    return folder, said


def shape_of(text):
    """Return the lines of a run with every number in them left out."""
    text = re.sub(r"run left in \w+", "run left in", text)
    return [re.sub(r"[-\d.,:e]+", "#", line) for line in text.splitlines()[1:]]


@pytest.mark.slow
def test_more_devices_leave_what_one_leaves(four):
    folder, said = four
    names = ["one", "three", "sharded", "whole"]
    assert [said[name][0] for name in names] == [0] * 4, said
    assert not any(said[name][2] for name in names)
    one = read_lines(folder / "one")
    kept = {p.name for p in (folder / "one").iterdir()}
    manifest = read_manifest(folder / "one")
    for name in ("three", "sharded"):
        assert {p.name for p in (folder / name).iterdir()} == kept
        found = read_manifest(folder / name)
        assert found.keys() == manifest.keys() and found["plan"] == manifest["plan"]
        assert shape_of(said[name][1]) == shape_of(said["one"][1])
        rows = read_lines(folder / name)
        assert len(rows) == len(one) == 28
        for row, right in zip(rows, one, strict=True):
            assert row.keys() == right.keys() and row["applied"]
            assert row["loss"] == pytest.approx(right["loss"], rel=2e-2)
        assert rows[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
        seen, right = (read_lines(folder / n, "evaluations")[-1] for n in (name, "one"))
        assert seen["count"] == right["count"] == 359
        assert seen["loss"] == pytest.approx(right["loss"], rel=1e-2)
    # How many devices hold masters, and whether each of them a part.
    assert said["states"] == [[1, False], [3, False], [4, True], [2, True]]
    assert read_manifest(folder / "sharded")["options"]["devices"] == "all"
    assert len(read_lines(folder / "whole")) == 26


@pytest.mark.slow
def test_runs_over_devices_are_compared_and_replayed(four):
    _, said = four
    code, text, _ = said["compare"]
    # Rounding alone tells them apart, from the first step on and not before it.
    assert code == 1 and re.search("equal after 0|before step 0 is equal", text)
    assert "options.shard_optimizer: false in A, true in B" in text
    assert "Only B has digests of gradients" in text
    assert said["replay"][0] == 1


@pytest.mark.slow
def test_a_batch_that_devices_cannot_share_is_refused(four):
    _, said = four
    code, _, error = said["uneven"]
    assert code == 2 and error.count("\n") == 1
    assert "--batch-size 90 does not split into equal shares for 4 devices" in error
    code, _, error = said["micro"]
    assert code == 2
    assert "4 devices times 6 --accumulation-steps: make it a multiple of 24" in error


def start(words, **env):
    """Start a command of the page, with two CPU devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {FAST}",
        "PYTHONPATH": str(DOCS.parent),
        **env,
    }
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "rjax", *words, "--no-plan", "--hidden", "16"]
    return subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(port):
    """Return the page's commands for two processes, as words."""
    commands = read_page("many_devices.md").commands
    lines = [line for line in commands if "--processes 2" in line]
    assert len(lines) == 2
    return [shlex.split(line.replace("PORT", str(port))) for line in lines]


@pytest.mark.slow
def test_the_launch_of_the_page_trains_as_one_process():
    started = [start(words) for words in launch(free_port())]
    alone = start(["train", "--batch-size", "128", "--epochs", "2", "--out", "alone"])
    try:
        said = [p.communicate(timeout=200) for p in (*started, alone)]
    finally:
        for process in (*started, alone):
            process.kill()
    assert [p.returncode for p in (*started, alone)] == [0, 0, 0], said
    assert "test accuracy" in said[0][0] and "test accuracy" not in said[1][0]
    rows, right = read_lines("run"), read_lines("alone")
    assert len(rows) == len(right) == 22
    assert rows[0]["loss"] == pytest.approx(right[0]["loss"], rel=1e-6)
    assert rows[-1]["loss"] == pytest.approx(right[-1]["loss"], rel=5e-2)
    assert {p.name for p in Path("run").iterdir()} == {
        p.name for p in Path("alone").iterdir()
    }


@pytest.mark.slow
def test_a_process_that_fails_ends_the_other():
    more = "--epochs 9999 --heartbeat 5 --whole-epochs --shard-optimizer".split()
    first, second = (start([*words, *more]) for words in launch(free_port()))
    try:
        until = time.monotonic() + 100
        log = Path("run", "evaluations.jsonl")
        while not (log.exists() and log.stat().st_size) and time.monotonic() < until:
            time.sleep(0.1)
        first.terminate()
        out, _ = first.communicate(timeout=60)
        _, error = second.communicate(timeout=60)
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 143 and "interrupted after" in out
    assert second.returncode not in (0, None)
    assert "Traceback" not in error
    assert "another one has ended" in error or "another task died" in error
    assert read_manifest("run")["status"] == "interrupted"


@pytest.mark.slow
def test_a_folder_that_cannot_be_ends_both():
    Path("run").mkdir()
    Path("run", "taken").touch()
    first, second = (start(words) for words in launch(free_port()))
    try:
        _, error = first.communicate(timeout=100)
        second.communicate(timeout=60)
    finally:
        first.kill()
        second.kill()
    assert first.returncode == 2 and "is not empty" in error
    assert second.returncode not in (0, None)
