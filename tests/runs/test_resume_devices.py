"""A run over many devices, or over several processes, is taken up by as many."""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("tyro")

from helpers import fresh_process
from run_helpers import assert_same_run, read_lines, read_manifest

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
BASE = "train --epochs 2 --batch-size 96 --no-plan --hidden 16 --dropout 0.1".split()
# Trains until some steps are begun, then ends at once, as by a kill.
BROKEN = """
import os, sys
from rjax.cli import main
from rjax.runs.recorder import Recorder
def broken(taken):
    def take(self, report, state):
        taken(self, report, state)
        if int(state.step) >= 20:
            os._exit(9)
    return take
Recorder.add, Recorder.add_epoch = map(broken, (Recorder.add, Recorder.add_epoch))
sys.exit(main(sys.argv[1:]))
"""
OVER_FOUR = """
import subprocess, sys
from rjax.cli import main
for name, words in KINDS.items():
    assert main([*BASE, "--out", f"{name}-whole", *words]) == 0
    run = [*BASE, "--out", name, *words, "--checkpoint-every", "5"]
    done = subprocess.run([sys.executable, "-c", BROKEN, *run])
    assert done.returncode == 9, done
    assert main(["train", "--resume", name]) == 0
assert main(["train", "--resume", "ranges", "--epochs", "3", "--devices", "2"]) == 0
"""
KINDS = {
    "ranges": ["--devices", "4", "--shard-optimizer"],
    "whole": ["--devices", "4", "--whole-epochs"],
}


def test_over_four_devices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"{FAST} --xla_force_host_platform_device_count=4"
    given = f"BASE, BROKEN, KINDS = {[BASE, BROKEN, KINDS]!r}\n"
    fresh_process(given + OVER_FOUR, XLA_FLAGS=flags)
    assert_same_run("whole-whole", "whole")
    one, other = (read_lines(name) for name in ("ranges-whole", "ranges"))
    assert one == other[:28] and len(other) == 42
    manifest = read_manifest("ranges")
    first, second = manifest["resumed"]
    # The last save was under way, or had just ended.
    assert first["step"] in (14, 15, 20) and second["step"] == 28
    assert second["changes"] == [
        "--epochs 3 instead of 2", "--devices 2 instead of 4"
    ]  # fmt: skip


def processes(*words, broken=False):
    """Run the command in two processes of two devices; return what they say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{FAST} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    program = ["-c", BROKEN] if broken else ["-m", "rjax"]
    started = [
        subprocess.Popen(
            [
                *(sys.executable, *program, *words, "--coordinator", address),
                *("--processes", "2", "--process", str(i), "--heartbeat", "10"),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


def test_over_two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["--shard-optimizer"]
    codes, said = processes(*BASE, *more, "--out", "whole")
    assert codes == [0, 0], said
    saves = ["--checkpoint-every", "5"]
    codes, said = processes(*BASE, *more, *saves, "--out", "run", broken=True)
    assert codes == [9, 9], said
    codes, said = processes("train", "--resume", "run")
    assert codes == [0, 0], said
    assert "going on in run after" in said[0][0]
    assert_same_run("whole", "run")
