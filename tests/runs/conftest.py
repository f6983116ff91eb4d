"""Every run starts in an empty folder of its own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
