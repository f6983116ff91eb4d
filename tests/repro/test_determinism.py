"""What `deterministic` asks of XLA, and what two processes then have in common."""

import hashlib

import pytest
from helpers import fresh_process

from rjax.repro import deterministic
from rjax.repro.determinism import has_started

FLAG = "--xla_gpu_deterministic_ops"


def test_it_sets_the_flag_and_keeps_the_others(monkeypatch):
    monkeypatch.setattr("rjax.repro.determinism.has_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    import os

    deterministic()
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {FLAG}=true"
    deterministic()
    assert os.environ["XLA_FLAGS"].count(FLAG) == 1


@pytest.mark.parametrize("value", ["", "=true", "=1"])
def test_a_flag_that_is_there_is_enough(monkeypatch, value):
    monkeypatch.setenv("XLA_FLAGS", FLAG + value)
    deterministic()


def test_the_contrary_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=false")
    with pytest.raises(RuntimeError, match="XLA_FLAGS holds .*=false; remove it"):
        deterministic()


def test_too_late_is_said_where_it_matters(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr("rjax.repro.determinism.has_started", lambda: True)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="comes too late: JAX has started"):
        deterministic()
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    deterministic()


def test_importing_rjax_and_its_command_line_starts_nothing():
    script = (
        "import rjax, rjax.cli, jax; from rjax.repro.determinism import has_started; "
        "print(has_started()); jax.devices(); print(has_started())"
    )
    assert fresh_process(script).split() == ["False", "True"]


def test_here_jax_has_started():
    import jax

    jax.devices()
    assert has_started()


MODELS = {
    "mlp": (),
    "cnn": ("--width", "4"),
    "resnet": ("--width", "4", "--blocks", "1"),
}


def run(folder):
    """Train every model in a fresh process; return a hash of each file of a record."""
    lines = ["from rjax.cli import main"]
    for model, options in MODELS.items():
        words = [
            "train", "--model", model, *options, "--out", str(folder / model),
            "--limit-steps", "55", "--batch-size", "16", "--record-every", "5",
            "--loss-scale", "1e8", "--deterministic", "--no-plan",
        ]  # fmt: skip
        lines.append(f"assert main({words!r}) == 0")
    fresh_process("\n".join(lines))
    names = ("steps.bin", "digests.bin", "layout.json")
    return {
        (model, name): hashlib.sha256(
            (folder / model / "record" / name).read_bytes()
        ).hexdigest()
        for model in MODELS
        for name in names
    }


def test_two_processes_leave_the_same_records(tmp_path):
    """The first steps overflow: the scale starts far too high."""
    assert run(tmp_path / "a") == run(tmp_path / "b")
    for model in MODELS:
        lines = (tmp_path / "a" / model / "metrics.jsonl").read_text().splitlines()
        assert '"applied": false' in lines[0] and '"applied": true' in lines[-1]
        assert len(lines) == 55
