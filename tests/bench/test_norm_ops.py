"""The benchmark of batch norm and pooling: its rows, its bytes, what it leaves."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import benchmark
from ops.range_kernels import needs_kernels

from rjax.bench.measure import BenchError
from rjax.bench.programs import XLA, build

# Stock Flax, which some rows are, does not promote strictly.
pytestmark = pytest.mark.standard_promotion

TINY, RESNET, VGG = (8, 8, 64), "ResNet-50", "VGG16-BN"
norm_ops = benchmark("norm_ops")


def measured(names: str, chosen: list[str], **options: Any) -> tuple[Any, list[str]]:
    said: list[str] = []
    ops = norm_ops.chosen_ops(names)
    record = norm_ops.run(2, [TINY], ops, chosen, say=said.append, **options)
    return record, said


def test_all_shapes_of_both_networks_once() -> None:
    shapes = norm_ops.chosen_shapes(None)
    assert len(shapes) == len(set(shapes)) == 14
    assert norm_ops.networks((56, 56, 256)) == [RESNET, VGG]
    assert norm_ops.networks((224, 224, 64)) == [VGG]
    where = lambda kind: {shape for shape in shapes if norm_ops.has(shape, kind)}  # noqa: E731
    assert where("") == set(shapes)
    assert where("pool") == {
        (112, 112, 64), (224, 224, 64), (112, 112, 128), (56, 56, 256),
        (28, 28, 512), (14, 14, 512),
    }  # fmt: skip
    assert where("residual") == {
        (56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048)
    }  # fmt: skip


# In arrays of x's size; a pooled one has a quarter of it.
ARRAYS = {
    "copy": 2, "statistics": 1, "apply/relu": 2, "apply/residual": 3,
    "apply/pool": 1.25, "reduce/relu": 2, "reduce/residual": 4, "reduce/pool": 1.25,
    "gradient/relu": 3, "gradient/plain": 3, "gradient/pool": 2.25,
    "max_pool/forward": 1.25, "max_pool/backward": 2.25, "batch_norm/forward": 3,
    "batch_norm/both": 8,
}  # fmt: skip


def test_bytes_are_those_of_the_definition() -> None:
    for name in norm_ops.OPS:
        for image in (TINY, (112, 112, 64)):  # the stem pools to a quarter, too
            row = norm_ops.make_row(name, 3, image)
            x = 2 * 3 * image[0] * image[1] * image[2]
            assert row.nbytes == ARRAYS[name.removeprefix("flax.")] * x, name


def test_what_was_measured_is_said_kept_and_drawn(tmp_path: Path) -> None:
    kept = tmp_path / "samples.json"
    names = "apply,gradient/pool,max_pool,batch_norm,flax.max_pool/backward"
    record, said = measured(names, ["xla", "mosaic_gpu", "default"], path=kept)
    figures = record["rows"]
    assert [f["op"] for f in figures] == norm_ops.chosen_ops(names)
    assert {f["implementation"] for f in figures} == {"xla"}
    assert said[0].startswith("only xla is measured: Mosaic GPU kernels need")
    for figure in figures:
        assert len(figure["samples"]) == 3 and min(figure["samples"]) > 0
        assert figure["bandwidth"] * figure["seconds"] == pytest.approx(
            figure["nbytes"]
        )
    assert any(line.startswith("apply/pool 8x8x64 xla: ") for line in said)
    table = said[-1].strip().splitlines()
    assert len(table) == 2 + len(figures) and len({len(line) for line in table}) == 1
    assert "kernel" not in table[0] and "xla GB/s | xla /copy" in table[0]
    assert table[2].startswith("| copy") and " 100% |" in table[2]
    assert json.loads(kept.read_text()) == json.loads(json.dumps(record))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record, _ = measured("max_pool/forward,flax.max_pool/forward", ["xla"])
    assert norm_ops.curve(record["rows"], "max_pool/forward", "flax").keys() == {
        (2, *TINY)
    }
    norm_ops.plot(json.loads(json.dumps(record)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@needs_kernels
def test_kernels_are_verified_and_timed_beside_xla() -> None:
    names = "statistics,batch_norm/forward"
    record, said = measured(names, ["mosaic_gpu", "default"], target="interpret")
    assert [(f["op"], f["implementation"]) for f in record["rows"]] == [
        ("copy", "xla"),  # nothing else serves
        ("statistics", "mosaic_gpu"),
        ("batch_norm/forward", "mosaic_gpu"),
        ("batch_norm/forward", "default"),
    ]
    assert "kernel GB/s" in said[-1] and "default us" in said[-1]


def test_a_wrong_kernel_stops_in_one_sentence() -> None:
    row = norm_ops.make_row("apply/relu", 2, TINY)

    def compiled(*args: Any) -> list[Any]:
        return [y.at[0, 0, 0, 0].add(0.1) for y in right.compiled(*args)]

    right = build(row.case, row.n, XLA)
    wanted = right.compiled(*right.arguments())
    norm_ops.check(right, wanted)
    wrong = dataclasses.replace(right, compiled=compiled)
    with pytest.raises(BenchError, match="apply/relu 8x8x64, .* differs from XLA's by"):
        norm_ops.check(wrong, wanted)


def test_no_kernel_is_timed_where_none_serves() -> None:
    odd = norm_ops.make_row("statistics", 1, (3, 3, 7))
    assert norm_ops.variants(odd, ["mosaic_gpu", "default"], "interpret") == [XLA]


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (norm_ops.chosen_ops, "statistics,nothing"),
        (norm_ops.chosen_shapes, "56x56"),
        (norm_ops.chosen_shapes, "1x7x64"),
        (norm_ops.chosen_implementations, "cudnn"),
    ],
)
def test_wrong_options_are_refused(choose: Any, text: str) -> None:
    with pytest.raises(ValueError, match="got '|knows no '"):
        choose(text)
