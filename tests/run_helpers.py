"""What a run leaves, read back as strictly as a stranger would."""

import json
from pathlib import Path
from typing import Any

import pytest

# Two epochs of eleven steps on digits.
SHORT = ["train", "--epochs", "2", "--batch-size", "128", "--no-plan", "--out", "run"]


def read_manifest(folder: str | Path = "run") -> dict[str, Any]:
    return json.loads(Path(folder, "manifest.json").read_text(), parse_constant=_refuse)


def read_lines(folder: str | Path = "run", name: str = "metrics") -> list[dict]:
    lines = Path(folder, f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on standard error."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    return error


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
