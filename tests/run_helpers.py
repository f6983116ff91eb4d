"""What a run leaves, read back as strictly as a stranger would."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import bits

import rjax
from rjax.checkpoint import load_weights

# Two epochs of eleven steps on digits.
SHORT = ["train", "--epochs", "2", "--batch-size", "128", "--no-plan", "--out", "run"]


def read_manifest(folder: str | Path = "run") -> dict[str, Any]:
    return json.loads(Path(folder, "manifest.json").read_text(), parse_constant=_refuse)


def read_lines(folder: str | Path = "run", name: str = "metrics") -> list[dict]:
    lines = Path(folder, f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=_refuse) for line in lines]


def assert_same_run(a: str | Path, b: str | Path) -> None:
    """All that two runs leave is equal, but for clocks and checkpoints."""
    for name in ("metrics", "evaluations"):
        one, other = (Path(run, f"{name}.jsonl").read_bytes() for run in (a, b))
        assert one == other, name
    records = [
        {x.name: x.read_bytes() for x in Path(run, "record").glob("*.*")}
        for run in (a, b)
    ]
    assert records[0] == records[1]
    assert rjax.repro.compare(a, b).verdict == "bit-identical"
    snapshots = [sorted(x.name for x in Path(r).rglob("0*.npz")) for r in (a, b)]
    assert snapshots[0] == snapshots[1]
    for path in Path(a).glob("weights*"):
        assert bits(load_weights(path)) == bits(load_weights(Path(b, path.name)))
    one, other = (read_manifest(run) for run in (a, b))
    assert other["status"] == "finished"
    for name in ("test", "steps", "ended_by", "best_epoch"):
        assert one["results"][name] == other["results"][name], name
    for name in ("loss", "accuracy", "skipped", "scale"):
        assert one["results"]["train"][name] == other["results"]["train"][name], name


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on standard error."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error
    return error


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
