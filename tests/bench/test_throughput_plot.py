"""The picture of whole steps: drawn from what the benchmark keeps."""

import json
from pathlib import Path

import pytest
from helpers import benchmark

pytest.importorskip("matplotlib")

plot = benchmark("throughput_plot")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def record(**other):
    return {
        "contender": "rjax", "model": "resnet20", "batch": 4, "steps": 2, "image": 32,
        "precision": "fp16", "samples": [1.0, 2.0], "device": "cpu",
        "versions": {"jax": "0"}, "peak_bytes": None, **other,
    }  # fmt: skip


def test_what_is_shipped_can_be_drawn(tmp_path):
    kept = [str(path) for path in RESULTS.glob("train_throughput-h200*.jsonl")]
    assert len(kept) >= 4
    plot.main([*kept, "--plot", str(tmp_path / "all.png")])
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_learning_have_a_panel(tmp_path):
    runs = [record(), *({**record(), "losses": [2.0, 1.0], "precision": p}
            for p in ("fp16", "fp32"))]  # fmt: skip
    file = tmp_path / "learn.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in runs))
    plot.main([str(file), "--plot", str(tmp_path / "learn.png")])
    assert (tmp_path / "learn.png").exists()


def test_a_failed_contender_is_left_out(tmp_path):
    file = tmp_path / "some.jsonl"
    failed = {"contender": "flax", "model": "resnet20", "failed": "no"}
    file.write_text("\n".join(map(json.dumps, (record(), failed))))
    assert [r["contender"] for r in plot.read([str(file)])] == ["rjax"]


@pytest.mark.parametrize("text", [None, "", "{", '{"failed": "no"}'])
def test_what_cannot_be_drawn_is_one_line(text, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        plot.main([str(file), "--plot", str(tmp_path / "x.png")])
    assert str(file) in capsys.readouterr().err
