"""The benchmark of the MNIST recipe: contenders alike, honest samples, figures."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import benchmark
from jax import lax
from set_writers import SIZES, write_mnist

from rjax.runs.schedules import build_schedule

pytestmark = pytest.mark.standard_promotion

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mnist_mlp.py"
script = benchmark("mnist_mlp")
settings, measure, table, on_rjax = (
    benchmark(f"mnist.{name}") for name in ("settings", "measure", "table", "on_rjax")
)
benchmark("throughput.on_jax")
TINY = {"epochs": 3, "seeds": (0, 3), "batch": 26, "hidden": (8,), "warmup_epochs": 1.0}


def parsed(*argv: str) -> Any:
    return settings.settings_of(settings.make_parser("").parse_args(list(argv)))


def test_contenders_share_all_but_their_names() -> None:
    found = parsed("--data-dir", "d", "--seeds", "1,2", "--peers", "torch,torch-eager")
    assert [s.contender for s in found] == ["rjax", "torch", "torch-eager"]
    assert len({dataclasses.replace(s, contender="") for s in found}) == 1
    assert found[0].seeds == (1, 2) and found[0].hidden == (1024, 512, 256)
    assert (found[0].epochs, found[0].batch, found[0].warmup_epochs) == (100, 200, 5)
    assert (
        settings.from_json(json.loads(json.dumps(dataclasses.asdict(found[0]))))
        == (found[0])
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "--data-dir is needed"),
        (["--data-dir", "d", "--peers", "flax"], "--peers knows no 'flax': use torch,"),
        (["--data-dir", "d", "--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--data-dir", "d", "--epochs", "5"], "--warmup-epochs 5 leaves nothing of 5"),
        (["--data-dir", "d", "--seeds", "a"], "--seeds must be whole numbers from 0"),
        (["--data-dir", "d", "--hidden", "0"], "--hidden must be whole numbers from 1"),
        (["--data-dir", "d", "--no-rjax", "--peers", ""], "nothing is left to measure"),
        (["--data-dir", "d", "--json", "no/x"], "--json no/x: No such file"),
    ],
)
def test_wrong_options_are_refused(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(argv)
    assert sentence in capsys.readouterr().err


class Rig:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def compile(self) -> None:
        self.said.append("compile")

    def reset(self, seed: int) -> None:
        self.said.append(f"reset {seed}")
        self.begun = 0

    def epoch(self) -> int:
        self.begun += 1
        self.said.append(f"epoch {self.begun}")
        return self.begun

    def read(self, begun: int) -> tuple[float, float, float]:
        self.said.append(f"read {begun}")
        return begun + 0.25, begun + 0.5, begun / 10

    def facts(self) -> dict[str, Any]:
        return {"steps": 7}

    def ending(self) -> dict[str, Any]:
        return {"skipped": 0, "scale": 1.0}


def test_every_epoch_is_a_sample_and_one_is_begun_ahead() -> None:
    rig = Rig()
    found = measure.measure(rig, settings.Settings("rjax", "d", 3, (5, 6)))
    one = ["epoch 1", "epoch 2", "read 1", "epoch 3", "read 2", "read 3"]
    assert rig.said == ["compile", "reset 5", *one, "reset 6", *one]
    assert found["steps"] == 7 and [run["seed"] for run in found["runs"]] == [5, 6]
    run = found["runs"][0]
    assert list(run["loss"]) == [1.25, 2.25, 3.25]
    assert list(run["test_loss"]) == [1.5, 2.5, 3.5]
    assert list(run["accuracy"]) == [0.1, 0.2, 0.3]
    assert len(run["seconds"]) == 3 and min(run["seconds"]) >= 0


def record(name: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    run = {
        "seed": 0, "seconds": seconds, "loss": [2.0, 1.0], "accuracy": [0.994, 0.99],
        "skipped": 1, "scale": 4096.0,
    }  # fmt: skip
    head = {"contender": name, "steps": 10, "device": "cpu", "compile_s": [1.5, 2.5, 9]}
    return {**head, "runs": [run], **more}


def test_figures_are_those_of_the_samples() -> None:
    ours = record("rjax", [0.1, 0.3], kernels_per_step=50.25)
    peer = record("torch", [0.5, 0.3])
    said = "\n".join(table.lines(ours))
    assert (
        "rjax on cpu: 5.00 epochs/s [5.00 5.00], 20000.0 µs a step, 50.2 kernels"
        in (said)
    )
    assert "seed 0: best 99.40% (epoch 1), last 99.00%; loss 2.0000 -> 1.0000" in said
    assert "skipped 1, scale 4096" in said and "warm after 2.5 s" in said
    left = {"contender": "torch-eager", "failed": "no torch"}
    rows = list(table.table([ours, peer, left]))
    assert len(rows) == 4 and "2.00x" in rows[3] and "0x" not in rows[2]
    assert list(table.lines(left)) == ["torch-eager: left out: no torch"]


def test_launches_are_counted_by_step() -> None:
    def steps(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=10)[0]

    text = jax.jit(steps).lower(jnp.ones((8, 8))).compile().as_text()
    assert 2 <= on_rjax.launches(text, 10) < 8
    assert on_rjax.launches(text, 5) == 2 * on_rjax.launches(text, 10)
    line = '  %{0} = f32[8]{{0}} {0}(%x), op_name="a"\n'
    two = "".join(map(line.format, ("fusion-start", "fusion-done", "fusion")))
    assert on_rjax.launches(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{two}}}\n", 1) == 2


def test_runs_take_turns_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spawn(one: Any, timeout: float) -> dict[str, Any]:
        asked.append((one.contender, one.seeds))
        if one.contender == "torch-eager" and one.seeds == (2,):
            return {"contender": one.contender, "failed": "out of memory"}
        found = record(one.contender, [0.1], compile_s=float(one.seeds[0]))
        found["runs"][0]["seed"] = one.seeds[0]
        return found

    monkeypatch.setattr(script, "spawn", spawn)
    both = parsed("--data-dir", "d", "--seeds", "1,2", "--peers", "torch-eager")
    ours, peer = script.by_turns(both, 9)
    assert asked == [
        (name, (seed,)) for seed in (1, 2) for name in ("rjax", "torch-eager")
    ]
    assert [run["seed"] for run in ours["runs"]] == ours["compile_s"] == [1, 2]
    assert ours["seeds"] == [1, 2] and peer["failed"] == "out of memory"


@pytest.mark.slow
def test_rjax_runs_the_recipe(tmp_path: Path) -> None:
    write_mnist(tmp_path / "files")
    one = settings.Settings("rjax", str(tmp_path / "files"), **TINY)
    found = script.child(one)
    assert "failed" not in found, found["failed"]
    first, second = found["runs"]
    assert found["steps"] == SIZES["train"] // 26 and found["kernels_per_step"] > 1
    assert len(first["seconds"]) == len(first["accuracy"]) == 3
    assert first["loss"] != second["loss"] and first["scale"] == 8192.0
    hits = np.array(first["accuracy"]) * SIZES["test"]
    np.testing.assert_allclose(hits, np.round(hits), atol=1e-4)
    # Another seed in between leaves no trace: the first one again is the same.
    again = script.child(dataclasses.replace(one, seeds=(0,)))
    assert again["runs"][0]["loss"] == first["loss"]


def test_a_contender_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = os.pathsep.join(map(str, (tmp_path, *sys.path)))
    words = ["--data-dir", "d", "--no-rjax", "--json", "out.json"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch: left out: ImportError: no torch here" in done.stdout
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["contender"] == "torch" and kept["hidden"] == [1024, 512, 256]


def imported() -> Any:
    """Return the peer's module, or skip."""
    pytest.importorskip("torch")
    return benchmark("mnist.on_torch")


class TestTorch:
    """The peer, on a CPU, where PyTorch is installed."""

    def test_its_rates_are_those_of_the_recipe(self) -> None:
        peer = imported()
        options = settings.Settings("torch", "d").options(0)
        rate = options.rate.learning_rate
        ours: Any = build_schedule(options.rate, rate, 300, 100)
        theirs = peer.rates(300, 100, 5.0)
        at = np.array([0, 1, 1499, 1500, 1501, 15000, 29999])
        np.testing.assert_allclose(theirs.numpy()[at], ours(at), rtol=1e-4)

    def test_it_learns_and_starts_anew(self, tmp_path: Path) -> None:
        peer = imported()
        write_mnist(tmp_path / "files")
        one = settings.Settings("torch", str(tmp_path / "files"), **TINY)
        found = measure.measure(peer.Rig(dataclasses.replace(one, seeds=(0, 0))), one)
        assert found["runs"][0]["skipped"] == 0
        rig = peer.Rig(one)
        losses = []
        for _ in range(2):
            rig.reset(4)
            losses.append(rig.read(rig.epoch())[0])
        assert losses[0] == losses[1]
        rig.reset(5)
        assert rig.read(rig.epoch())[0] != losses[0]

    def test_its_augmentation_is_that_of_rjax(self) -> None:
        peer = imported()
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        images = torch.ones(2000, 1, 28, 28)
        erased = 1 - peer.erase(images, 0.5).mean((1, 2, 3))
        lost = erased > 0
        assert abs(float(lost.float().mean()) - 0.5) < 0.05
        assert 0.01 < float(erased[lost].min()) and float(erased.max()) < 0.36
        shown = peer.crop(images, 2).mean((1, 2, 3)) * 28 * 28
        sides = {float(a * b) for a in (26, 27, 28) for b in (26, 27, 28)}
        assert {round(float(x)) for x in shown} == sides
        turned = peer.augment(images)
        assert turned.shape == images.shape and 0.3 < float(turned.mean()) < 1
