"""The benchmark of the prefetcher runs, and reads a trace as it says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import benchmark

import rjax

# Stock Flax promotes dtypes.
pytestmark = pytest.mark.standard_promotion

script = benchmark("prefetch")
LOOPS = ["resident", "one by one", "plain", "prefetch", "flax"]


def made(args: Any) -> Any:
    """Stand in for `make`, whose step takes seconds to compile."""
    pool = script.np.zeros((8, 8, 8, 3), script.np.float32), script.np.arange(8)
    step = script.jax.jit(lambda state, batch: (state + batch[0].sum(), None))
    return step, script.np.float32(0), pool


@pytest.mark.slow
def test_the_step_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.MODELS, "mlp", lambda: rjax.nn.MLP((8,), 10))
    args = script.parse("--model mlp --batch 4 --image 8 --dtype float16".split())
    step, state, (images, labels) = script.make(args)
    assert images.shape == (16, 8, 8, 3) and images.dtype == "float16"
    new, report = step(state, (images[:4], labels[:4]))
    assert report.applied and int(new.step) == 1 and float(report.loss) > 0


def test_all_loops_are_timed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "TRACED", 2)
    monkeypatch.setattr(script, "make", made)
    kept = tmp_path / "kept.jsonl"
    options = "--model mlp --batch 4 --image 8 --steps 3 --samples 2 --gather"
    script.main([*options.split(), f"--json={kept}", f"--profile={tmp_path}/traces"])
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    loops = [name for name in LOOPS if name in {row["loop"] for row in rows}]
    assert loops[:4] == LOOPS[:4]
    timed = [(row["loop"], row["sample"]) for row in rows if "ms" in row]
    assert timed == [(name, i) for name in loops for i in range(2)]
    assert all(row["ms"] > 0 and row["gather"] for row in rows if "ms" in row)
    assert {row["bytes"] for row in rows} == {4 * (8 * 8 * 3 * 4 + 8)}
    traced = [row["loop"] for row in rows if "us" in row]
    assert traced == loops[1:]
    assert all(list((tmp_path / "traces").rglob(f"{n[:3]}*/**/*.pb")) for n in traced)
    said = capsys.readouterr().out.splitlines()
    table = [line.split("|")[1].strip() for line in said if line.startswith("| ")]
    assert table == ["loop", *loops] and len({len(line) for line in said[-3:]}) == 1
    assert any(line.startswith("prefetch waited in its last sample") for line in said)


def test_sources_give_the_same_pool() -> None:
    pool = tuple(map(script.np.arange, (8, 8)))
    whole = script.make_source(SimpleNamespace(gather=False, batch=2), pool)
    batches = [x.tolist() for x, _ in whole(6)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]
    picked = script.make_source(SimpleNamespace(gather=True, batch=2), pool)
    assert sorted(sum((x.tolist() for x, _ in picked(4)), [])) == list(range(8))


def test_every_loop_takes_every_step_once() -> None:
    def step(state: list[float], batch: Any) -> Any:
        return [*state, float(batch[0])], None

    given = [script.np.full(3, i, script.np.float32) for i in range(5)]
    loops = script.make_loops(given[0], waited := [])
    for name, loop in loops.items():
        found = loop(step, [], iter(given))
        assert found == ([0.0] * 5 if name == "resident" else list(range(5))), name
    assert len(waited) == 1


def event(name: str, start: float, stop: float) -> Any:
    return SimpleNamespace(
        name=name, start_ns=1e3 * start, duration_ns=1e3 * (stop - start)
    )


def test_overlap_is_that_of_copies_and_kernels() -> None:
    copy = [event("MemcpyH2D", 0, 10), event("MemcpyH2D", 8, 20)]
    compute = [
        event("fusion", 15, 18),
        event("gemm", 17, 30),  # of two streams: counts once
        event("MemcpyD2D", 2, 4),
        event("Memset", 4, 6),
        event("MemcpyD2H", 6, 8),
    ]
    lines = [
        SimpleNamespace(name="Stream #14(MemcpyH2D)", events=copy),
        SimpleNamespace(name="Stream #13(Compute)", events=compute),
        SimpleNamespace(name="XLA Ops", events=[event("fusion", 0, 99)]),
    ]
    host = SimpleNamespace(name="/host:CPU", lines=lines)
    gpu = SimpleNamespace(name="/device:GPU:0", lines=lines)
    found = script.overlap(SimpleNamespace(planes=[host, gpu]), steps=2)
    assert found == {"copies": 10.0, "hidden": 2.5, "kernels": 7.5}
    assert script.told("plain", found).startswith("plain: copies 10.0 us a step, 2.5 ")
    assert script.overlap(SimpleNamespace(planes=[host]), steps=2) is None
    assert script.told("plain", None) == "plain: no GPU in the trace"


def test_hidden_is_the_share_between_floor_and_ceiling() -> None:
    samples = {"resident": [10.0, 11, 90], "one by one": [31.0], "plain": [26.0]}
    rows = list(script.table(samples))
    assert rows[2].split() == "| resident | 11.000 [10.000 90.000] | |".split()
    assert rows[4].split()[-2] == "25%" and rows[3].split()[-2:] == ["|", "|"]
    even = script.table({name: [1.0] for name in samples})
    assert not any("%" in row for row in even)


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
    assert script.parse([]).image == 32
    assert script.parse(["--model=resnet50"]).image == 224
