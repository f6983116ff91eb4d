"""A disk that is full while a checkpoint is written ends the run in one sentence."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from run_helpers import assert_same_run, complaint, read_manifest

from rjax.checkpoint import files, load_weights, saving
from rjax.cli import main

pytestmark = pytest.mark.standard_promotion

BASE = (
    "train --epochs 3 --batch-size 128 --no-plan --hidden 16 --checkpoint-every 4"
).split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([*BASE, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("where", ["arrays", "seal"])
def test_a_full_disk(whole, where, monkeypatch, capsys):
    """The first three saves fit, the fourth does not; then there is room again."""
    module, name = {"arrays": (saving, "to_host"), "seal": (files, "seal")}[where]
    original, calls = getattr(module, name), []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, full)
        assert main([*BASE, "--out", "run"]) == 2
    line = complaint(capsys)
    assert "no space is left for the run in run, ended after" in line
    assert read_manifest("run")["status"] == "failed"
    assert main(["train", "--resume", "run"]) == 0
    assert "going on in run after 11 of 33 steps" in capsys.readouterr().out
    assert_same_run(whole, "run")


SCRIPT = """
import resource, sys
import jax
from rjax.cli import main
from rjax.checkpoint import Checkpoints
jax.devices()
save = Checkpoints.save
def limited(self, *arguments, **named):
    # Smaller than the file that holds the arrays, larger than all others.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40000, resource.RLIM_INFINITY))
    save(self, *arguments, **named)
    self.wait()
Checkpoints.save = limited
sys.exit(main(sys.argv[1:]))
"""


def test_a_file_that_may_not_grow_so_large():
    """The system itself refuses, deep within the library that writes."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    words = "train --epochs 1 --batch-size 128 --no-plan --hidden 64 --record-every 0"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words.split(), "--out", "run"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "no space is left for the run in run, ended after 11 of 11" in done.stderr
    assert main(["train", "--resume", "run"]) == 0
    assert load_weights("run/weights.npz")["params"]["head"]["kernel"].shape == (64, 10)
    assert not list(Path("run/checkpoints").glob("*.orbax-checkpoint-tmp*"))
