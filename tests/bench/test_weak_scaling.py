"""Weak scaling: rigs over two devices, figures, and when the buckets are reduced."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import benchmark

pytestmark = pytest.mark.standard_promotion

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weak_scaling.py"
script = benchmark("weak_scaling")
overlap, settings, table = (
    benchmark(f"scaling.{name}") for name in ("overlap", "settings", "table")
)


def parsed(*argv: str) -> Any:
    return script.parse(settings.make_parser(""), list(argv))


def test_options_name_models_and_parts() -> None:
    _, found = parsed("--parts", "all, one,all", "--batch", "8")
    assert [s.model for s in found] == ["resnet50", "vgg16bn"]
    assert all(s.parts == "all,one" and s.batch == 8 for s in found)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "alexnet"], "--model knows no 'alexnet'"),
        (["--parts", "two"], "--parts knows no 'two': use one, all, sharded, local"),
        (["--parts", ""], "--parts names none of one, all"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--folded", "--model", "vgg16bn"], "--folded is for resnet50"),
    ],
)
def test_wrong_options_are_refused(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert sentence in capsys.readouterr().err


def test_one_device_is_no_weak_scaling() -> None:
    if os.environ.get("XLA_FLAGS"):
        pytest.skip("there may be two devices")
    found = script.child("turns", settings.Settings())
    assert "there is 1" in found["failed"]
    assert "--xla_force_host_platform_device_count=2" in found["failed"]


def part(devices: int, *samples: float, **more: Any) -> dict[str, Any]:
    return {
        "devices": devices, "samples": list(samples), "compile_s": 1.0,
        "state_bytes": 3e6, "first_loss": 2.0, "last_loss": 1.0, "skipped": 0, **more,
    }  # fmt: skip


def test_scaling_is_the_ratio_of_every_round() -> None:
    found = {"one": part(1, 1.0, 2.0, 4.0), "all": part(2, 2.0, 2.5, 4.0)}
    record = {"model": "m", "batch": 10, "steps": 4, "parts_found": found}
    assert table.ratios(found, "all") == [0.5, 0.8, 1.0]
    rows = list(table.lines(record))
    assert len(rows) == 4 and "80.0% [50.0% 100.0%]" in rows[3]
    assert "32.0 [20.0 40.0]" in rows[3] and "625.00" in rows[3]
    assert "20.0 [10.0 40.0]" in rows[2] and "%" not in rows[2]


def test_doubts_are_told() -> None:
    found = {
        "one": part(1, 1.0),
        "all": part(2, 1.0, first_loss=2.1),
        "sharded": part(2, 1.0, last_loss=float("nan"), skipped=3),
    }
    notes = list(table.doubts(found))
    assert [n.split(":")[0] for n in notes] == ["note"] * 3
    assert "all begins with loss 2.1" in notes[0]
    assert "loss of sharded does not fall" in notes[1] and "skipped 3" in notes[2]


def test_memory_is_told_beside_the_plan() -> None:
    one = {
        "model": "m", "part": "all", "state_bytes": 9e6, "temporary_bytes": 5e6,
        "peak_bytes": [20e6, 21e6], "between_bytes": [10e6, 11e6],
    }  # fmt: skip
    assert "in use between steps 10.0, 11.0" in table.memory_line(one)
    other = {**one, "state_bytes": 5e6, "between_bytes": [6.5e6, 7e6]}
    assert table.fall_line(one, other) == (
        "m: sharded, a device holds 3.5, 4.0 MB less, 4.0 predicted"
    )
    silent = {**one, "peak_bytes": [None], "between_bytes": [None]}
    assert "say nothing" in table.memory_line(silent)
    assert table.fall_line(silent, silent) is None


PATH = "jit(train_step)/shard_map"
BACK = f"{PATH}/forward_backward/transpose(jvp(N))"
PROGRAM = f"""HloModule jit_train_step, is_scheduled=true

%late (p: f16[4,4]) -> f32[16] {{
  %p = f16[4,4]{{1,0}} parameter(0)
  ROOT %c = f32[16]{{0}} convert(%p), metadata={{op_name="{BACK}/stem/conv/conv_general_dilated"}}
}}

ENTRY %main (a: f16[4,4], g: f32[1000]) -> f32[16] {{
  %a = f16[4,4]{{1,0}} parameter(0)
  %g = f32[1000]{{0}} parameter(1)
  %psum.1 = f32[8]{{0}} all-reduce(%a), metadata={{op_name="{PATH}/forward_backward/jvp(N)/stem/bn/psum"}}
  %wgrad.2 = f16[4,4]{{1,0}} convolution(%a, %a), metadata={{op_name="{BACK}/deep/conv/conv_general_dilated"}}
  %all-reduce-start.3 = f32[1000]{{0}} all-reduce-start(%g), metadata={{op_name="{PATH}/reduce_deep/psum"}}
  %all-reduce-done.3 = f32[1000]{{0}} all-reduce-done(%all-reduce-start.3)
  %wgrad.4 = f16[4,4]{{1,0}} convolution(%a, %a), metadata={{op_name="{BACK}/stem/conv/conv_general_dilated"}}
  %wgrad.5 = f16[4,4]{{1,0}} convolution(%a, %a)
  %fusion.6 = f32[16]{{0}} fusion(%wgrad.5), kind=kLoop, calls=%late
  ROOT %psum.7 = f32[16]{{0}} all-reduce(%fusion.6), metadata={{op_name="{PATH}/reduce_first/psum"}}
}}
"""  # noqa: E501
PLAN = SimpleNamespace(
    slots=[
        SimpleNamespace(path="deep/conv/kernel", shape=(3, 3, 64, 64)),
        SimpleNamespace(path="stem/conv/kernel", shape=(7, 7, 3, 64)),
        SimpleNamespace(path="head/kernel", shape=(3, 3)),
    ]
)


def test_instructions_have_roles() -> None:
    roles = overlap.roles_of(PROGRAM, PLAN)
    assert roles.last == "stem/conv"
    assert roles.of == {
        "psum_1": "stats", "all_reduce_start_3": "deep", "wgrad_4": "last",
        "wgrad_5": "last", "psum_7": "first", "c": "last",  # fused, no kernel
    }  # fmt: skip
    assert roles.nbytes == {"deep": 4000, "first": 64}


def event(name: str, start: float, end: float) -> Any:
    start, end = 1e6 * start, 1e6 * end
    return SimpleNamespace(
        name=f"k_{name}", start_ns=start, duration_ns=end - start,
        stats=[("hlo_op", name)],
    )  # fmt: skip


def trace(*rows: tuple[str, float, float]) -> Any:
    """Return a trace of one GPU with two steps, the second ten milliseconds later."""
    streams: dict[str, list[Any]] = {"Stream #1": [], "Stream #2": []}
    for again in (0.0, 10.0):
        for name, start, end in rows:
            line = "Stream #2" if "all-reduce" in name else "Stream #1"
            streams[line].append(event(name, start + again, end + again))
    lines = [SimpleNamespace(name=k, events=v) for k, v in streams.items()]
    lines.append(SimpleNamespace(name="XLA Ops", events=[event("wgrad.4", 0, 99)]))
    host = SimpleNamespace(name="/host:CPU", lines=lines)
    return SimpleNamespace(
        planes=[host, SimpleNamespace(name="/device:GPU:1", lines=lines)]
    )


def test_a_reduction_is_seen_beside_the_backward_pass() -> None:
    roles = overlap.roles_of(PROGRAM, PLAN)
    data = trace(
        ("wgrad.2", 0.0, 1.0), ("all-reduce-start.3", 1.0, 4.0), ("other", 1.5, 2.0),
        ("wgrad.4", 2.0, 3.5), ("wgrad.5", 3.5, 3.75), ("psum.7", 5.0, 6.0),
    )  # fmt: skip
    found = overlap.summarize(overlap.read_events(data), roles, 2) | {"count": 2}
    assert list(found["devices"]) == ["1"]
    buckets = found["devices"]["1"]["buckets"]
    assert buckets["deep"] == pytest.approx(
        {
            "ms": 3.0, "before_first_layer_begins": 1.0,
            "before_first_layer_ends": 2.75, "ends_after_first_layer": 0.25,
            "covered": 2.25 / 3.0,
        }
    )  # fmt: skip
    assert buckets["first"]["before_first_layer_ends"] == pytest.approx(-1.25)
    assert buckets["first"]["covered"] == 0.0
    deep, first = overlap.lines(found)
    assert "begins 2.750 ms before the backward pass of stem/conv ends" in deep
    assert "75% of it beside other kernels" in deep and "1.250 ms after" in first
    # Of the last step, relative to the end of the first layer's backward pass.
    timeline = found["devices"]["1"]["timeline"]
    assert timeline["deep"][-1] == pytest.approx([-2.75, 0.25])
    assert timeline["last"][-1] == pytest.approx([-1.75, 0.0])


@pytest.mark.parametrize("missing", [False, True])
def test_kernels_of_nccl_are_told_apart_by_their_turn(missing: bool) -> None:
    """They have no instruction, and one name; psum.1 is that of a norm."""
    roles = overlap.roles_of(PROGRAM, PLAN)
    assert roles.order == ("stats", "deep", "first")
    rows = [("wgrad.4", 2.0, 3.5), ("nccl a", 0.0, 0.5), ("nccl b", 1.0, 4.0)]
    data = trace(*rows, *([] if missing else [("nccl c", 5.0, 6.0)]))
    for line in data.planes[1].lines:
        for each in line.events:
            if "nccl" in each.name:
                each.name, each.stats = "ncclDevKernel_AllReduce", []
    found = overlap.summarize(overlap.read_events(data), roles, 2)
    buckets = found["devices"]["1"]["buckets"]
    took = {name: row["ms"] for name, row in buckets.items()}
    assert took == ({} if missing else pytest.approx({"deep": 3.0, "first": 1.0}))


def test_what_was_not_seen_is_said() -> None:
    roles = overlap.roles_of(PROGRAM, PLAN)
    data = trace(("wgrad.4", 2.0, 3.0))
    found = overlap.summarize(overlap.read_events(data), roles, 2) | {"count": 2}
    assert len(list(overlap.lines(found))) == 2
    assert all("bucket was seen" in text for text in overlap.lines(found))
    found = overlap.summarize(overlap.read_events(trace()), roles, 2) | {"count": 2}
    assert list(overlap.lines(found)) == []
    assert list(overlap.lines({"failed": "no file"})) == ["not profiled: no file"]


@pytest.mark.slow
def test_two_devices_from_end_to_end(tmp_path: Path) -> None:
    flags = (
        "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    options = (
        "--model resnet20 --batch 4 --image 16 --classes 10 --steps 2 --samples 2 "
        "--warmup 1 --learning-rate 0.05 --parts one,all,sharded,local --no-memory "
        "--profile"
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split(), "--json", "out.jsonl"],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
             "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note:" not in done.stdout
    turns, profiled = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    one, both = (turns["parts_found"][name] for name in ("one", "all"))
    assert len(one["samples"]) == len(both["samples"]) == 2
    assert one["devices"] == 1 and both["devices"] == 2
    masters = {name: p["masters"] for name, p in turns["parts_found"].items()}
    assert masters["one"] == masters["all"] == masters["local"] > masters["sharded"]
    norms = [p["batch_statistics"] for p in turns["parts_found"].values()]
    assert norms == [None, "global", "global", "device"]
    # Every device has the same images, so that both train the same.
    assert both["last_loss"] == pytest.approx(one["last_loss"], rel=0.05)
    devices = profiled["profiled"]["devices"]
    assert set(devices) == {"0", "1"}
    assert all(d["buckets"].keys() == {"deep", "first"} for d in devices.values())
