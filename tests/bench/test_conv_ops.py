"""The benchmark of convolutions: the networks' own layers, ways that agree, sums."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import benchmark

from rjax.bench.measure import BenchError
from rjax.bench.programs import XLA, build_all

pytestmark = pytest.mark.standard_promotion
conv_ops = benchmark("conv_ops")
LAYERS = {
    "one pixel": conv_ops.Layer((2, 4, 4, 8), (1, 1, 8, 6), (1, 1), ((0, 0),) * 2),
    "strides": conv_ops.Layer((2, 5, 5, 8), (1, 1, 8, 6), (2, 2), ((0, 0),) * 2),
    "stem": conv_ops.Layer((2, 9, 9, 3), (7, 7, 3, 4), (2, 2), ((3, 3),) * 2),
    "first": conv_ops.Layer((2, 6, 5, 3), (3, 3, 3, 4), (1, 1), ((1, 1),) * 2),
}


# Multiplications and additions of one image, of the papers: 4.1 and 15.5 milliards.
@pytest.mark.parametrize(
    ("model", "count", "macs"), [("resnet50", 53, 4.09e9), ("vgg16bn", 13, 15.35e9)]
)
def test_layers_are_those_of_the_network(model: str, count: int, macs: float) -> None:
    found = conv_ops.layers(model, 2, 224)
    assert sum(found.values()) == count
    flops = sum(layer.flops * times for layer, times in found.items())
    assert math.isclose(flops, 2 * 2 * macs, rel_tol=0.01)


def test_bytes_are_those_that_are_met() -> None:
    layer = LAYERS["strides"]
    assert layer.result == (2, 3, 3, 6)
    assert layer.nbytes == 2 * (2 * 3 * 3 * 8 + 8 * 6 + 2 * 3 * 3 * 6)
    assert LAYERS["stem"].nbytes == 2 * (2 * 81 * 3 + 49 * 3 * 4 + 2 * 25 * 4)


@pytest.mark.parametrize("which", conv_ops.PASSES)
@pytest.mark.parametrize("name", LAYERS)
def test_ways_agree(name: str, which: str) -> None:
    layer = LAYERS[name]
    ways = list(conv_ops.ways_of(layer))
    assert len(ways) == 2
    cases = [conv_ops.case_of(layer, way, which) for way in ways]
    conv_ops.check(build_all([(case, math.prod(layer.x), XLA) for case in cases]))


def test_a_wrong_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["one pixel"]
    right = conv_ops.Layer.multiply
    monkeypatch.setattr(
        conv_ops.Layer,
        "multiply",
        lambda self, x, kernel: 1.02 * right(self, x, kernel),
    )
    with pytest.raises(BenchError, match="1x1 8-6 at 4x4 forward: the ways differ by"):
        list(conv_ops.measure(layer, ["dot"]))


def test_sums_count_every_layer() -> None:
    rows = [
        {"layer": name, "pass": "forward", "way": way, "seconds": seconds}
        for name, way, seconds in (
            ("a", "conv", 0.003), ("a", "dot", 0.002), ("b", "conv", 0.004)
        )
    ]  # fmt: skip
    forward, *others = conv_ops.summary(rows, {"a": 2, "b": 1})
    assert forward.split() == "forward 10.00 ms by conv, 8.00 by the best".split()
    assert all(" 0.00 ms" in line for line in others)


def test_all_samples_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def few(*_: Any) -> dict[Any, int]:
        return {LAYERS["first"]: 2}

    monkeypatch.setattr(conv_ops, "layers", few)
    monkeypatch.setattr(conv_ops, "CEILING", 64)
    monkeypatch.setattr(conv_ops, "COPIED", 1 << 12)
    path = tmp_path / "samples.json"
    conv_ops.main(["--model", "vgg16bn", "--batch", "2", "--json", str(path)])
    record = json.loads(path.read_text())
    found = [(row["pass"], row["way"]) for row in record["rows"]]
    assert found == [(p, w) for p in ("forward", "kernel") for w in ("conv", "patches")]
    assert all(len(row["samples"]) > 1 for row in record["rows"])
    said = capsys.readouterr().out
    assert "ceilings" in said and said.count(" of a copy") == 4 and "vgg16bn" in said


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "alexnet"], "--model knows no 'alexnet': use resnet50, vgg16bn"),
        (["--ways", "fft"], "--ways knows no 'fft': use conv, dot, patches"),
        (["--batch", "0"], "--batch and --image must be at least 1"),
    ],
)
def test_wrong_options_are_refused(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        conv_ops.main(argv)
    assert sentence in capsys.readouterr().err
