"""Measuring in a folder of its own, with no table of this machine, and in no time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rjax.bench import measure, programs
from rjax.ops import tuned


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned.here.cache_clear()
    yield
    tuned.here.cache_clear()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations a program, one program in flight, three samples."""
    monkeypatch.setattr(programs, "_MANY", 2)
    monkeypatch.setattr(measure, "_IN_FLIGHT", 1)
    monkeypatch.setattr(measure, "_SAMPLES", 3)
