"""The flags that rjax sets: which, when, and that XLA knows them."""

import os

import pytest
from helpers import fresh_process

import rjax
from rjax.xla_flags import DEFAULTS

BUFFERS, SMALL = DEFAULTS


@pytest.fixture(autouse=True)
def not_started(monkeypatch):
    monkeypatch.setattr("rjax.xla_flags.has_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")


def test_flags_are_added_once_and_others_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    rjax.set_xla_flags()
    wanted = ["--xla_a=1", *(f"{name}={value}" for name, value in DEFAULTS.items())]
    assert os.environ["XLA_FLAGS"].split() == wanted
    rjax.set_xla_flags()
    assert os.environ["XLA_FLAGS"].split() == wanted


def test_what_is_set_already_wins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{BUFFERS}=")
    rjax.set_xla_flags()
    assert os.environ["XLA_FLAGS"] == f"{BUFFERS}= {SMALL}=1"


def test_both_functions_share_the_variable():
    rjax.set_xla_flags()
    rjax.repro.deterministic()
    assert len(os.environ["XLA_FLAGS"].split()) == len(DEFAULTS) + 1


def test_too_late_is_said_where_it_matters(monkeypatch):
    monkeypatch.setattr("rjax.xla_flags.has_started", lambda: True)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="set_xla_flags.. comes too late: JAX has"):
        rjax.set_xla_flags()
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    rjax.set_xla_flags()
    assert os.environ["XLA_FLAGS"] == ""
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    given = " ".join(f"{name}={value}" for name, value in DEFAULTS.items())
    monkeypatch.setenv("XLA_FLAGS", given)
    rjax.set_xla_flags()


def test_xla_knows_them():
    script = "import rjax; rjax.set_xla_flags(); import jax; print(jax.jit(abs)(-2.0))"
    assert fresh_process(script).split() == ["2.0"]
