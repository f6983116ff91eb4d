"""The benchmark of whole steps: contenders alike, figures, profile, verdict."""

import argparse
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

import rjax
from rjax.trees import flatten

# Stock Flax and Optax do not promote strictly.
pytestmark = pytest.mark.standard_promotion

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_throughput.py"
script = benchmark("train_throughput")
settings, measure, table, verdict, profiling = (
    benchmark(f"throughput.{name}")
    for name in ("settings", "measure", "table", "verdict", "profiling")
)
on_jax, learning, peers_flax = (
    benchmark(f"throughput.{name}") for name in ("on_jax", "learning", "peers_flax")
)
TOY = settings.Settings(
    "resnet20", 4, 16, 10, learning_rate=0.05, steps=2, samples=2, warmup=1
)
RECORD = {
    "contender": "rjax", **dataclasses.asdict(TOY), "compile_s": 1.5,
    "samples": [0.4, 0.1, 0.2], "first_loss": 2.5, "last_loss": 1.25, "scale": 8192.0,
    "parameters": 7, "device": "cpu", "peak_bytes": 2_000_000_000,
}  # fmt: skip


def parsed(*argv: str) -> Any:
    return script.parse(settings.make_parser(""), list(argv))


def test_options_name_models_and_contenders() -> None:
    _, names, found = parsed("--model", "resnet50, vgg16bn", "--ema", "--batch", "32")
    assert names == ["rjax", "torch", "torch-compile", "flax"]
    assert [s.model for s in found] == ["resnet50", "vgg16bn"]
    assert all(s.ema and s.batch == 32 and not s.learn for s in found)
    _, names, _ = parsed("--implementation", "xla", "--peers", "flax,flax", "--no-rjax")
    assert names == ["rjax[xla]", "flax"]
    assert (
        parsed("--learn")[2][0].learn == 200 and parsed("--learn", "7")[2][0].learn == 7
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "alexnet"], "--model knows no 'alexnet': use resnet50, vgg16bn"),
        (["--model", ""], "--model names no model"),
        (["--peers", "haiku"], "--peers knows no 'haiku': use torch"),
        (["--implementation", "cudnn"], "--implementation knows no 'cudnn'"),
        (["--no-rjax", "--peers", ""], "nothing is left to measure"),
        (["--learn", "--precision", "fp32"], "--learn compares with fp32"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--warmup", "-1"], "--warmup must not be negative, got -1"),
        (["--learning-rate", "nan"], "--learning-rate must be a finite number > 0"),
    ],
)
def test_wrong_options_are_refused(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert sentence in capsys.readouterr().err


def test_the_batch_has_the_same_values_in_every_precision() -> None:
    images, labels = settings.make_batch(TOY)
    assert images.dtype == np.float16 and images.shape == (4, 16, 16, 3)
    wide, same = settings.make_batch(dataclasses.replace(TOY, precision="fp32"))
    assert (
        wide.dtype == np.float32 and (wide == images).all() and (same == labels).all()
    )
    other, _ = settings.make_batch(dataclasses.replace(TOY, seed=1))
    assert (other != images).any()
    half, _ = on_jax.make_batch(dataclasses.replace(TOY, precision="bf16"))
    assert half.dtype == jnp.bfloat16


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flatten(tree)[0]}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet50", 25_557_032), ("vgg16bn", 138_361_768), ("resnet20", 278_324)],
)
def test_flax_has_the_parameters_of_rjax(name: str, parameters: int) -> None:
    whole = dataclasses.replace(TOY, model=name, image=224, classes=1000)
    if name == "resnet20":
        whole = dataclasses.replace(whole, image=32, classes=100)
    x = jax.ShapeDtypeStruct((1, whole.image, whole.image, 3), jnp.float32)
    ours, theirs = (
        jax.eval_shape(module.make_model(whole).init, jax.random.key(0), x)
        for module in (on_jax, peers_flax)
    )
    assert shapes(ours) == shapes(theirs)
    assert on_jax.count(ours["params"]) == parameters


TINY: dict[str, Any] = {
    "resnet50": (
        rjax.nn.ResNet50(5, blocks=(1, 1, 1, 1), width=4),
        peers_flax.ResNet(5, jnp.float32, (1, 1, 1, 1), 4),
    ),
    "vgg16bn": (
        rjax.nn.VGG16BN(5, width=4, hidden=8),
        peers_flax.VGG16BN(5, jnp.float32, 4, 8),
    ),
    "resnet20": (
        rjax.nn.ResNet(5, blocks=1, width=4),
        peers_flax.ResNet(5, jnp.float32, (1, 1, 1), 4, bottleneck=False),
    ),
}


def drawn(tree: Any) -> Any:
    """Return variables drawn on the host, all of them away from 0 and 1."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        if leaf.ndim == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        fan_in = np.prod(leaf.shape[:-1])
        return jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree.map(draw, tree)


def tiny(name: str) -> tuple[Any, Any, jax.Array, Any]:
    ours, theirs = TINY[name]
    # VGG reads at least 32 rows; odd ones tell one padding from another.
    size = 33 if name != "vgg16bn" else 40
    x = np.random.default_rng(1).normal(size=(2, size, size, 3))
    x = jnp.asarray(x, jnp.float32)
    return ours, theirs, x, drawn(jax.eval_shape(ours.init, jax.random.key(0), x))


def close(got: Any, want: Any) -> None:
    got, want = np.asarray(got), np.asarray(want)
    # Some 20 layers of sums over at most 9 * 32 products.
    bound = 20 * 18 * float(np.finfo(np.float32).eps) * np.abs(want).max()
    np.testing.assert_allclose(got, want, 0, bound)


@pytest.mark.parametrize("name", TINY)
def test_flax_computes_what_rjax_computes(name: str) -> None:
    ours, theirs, x, variables = tiny(name)
    close(jax.jit(theirs.apply)(variables, x), jax.jit(ours.apply)(variables, x))


def state_dict(torch: Any, model: Any) -> dict[str, Any]:
    """Fill a model with numbers, and return its arrays."""
    generator = torch.Generator().manual_seed(0)
    state = model.state_dict()
    for value in state.values():
        if value.ndim == 1:
            value.uniform_(0.5, 1.5, generator=generator)
        elif value.ndim:
            fan_in = value[0].numel()
            value.normal_(0, fan_in**-0.5, generator=generator)
    return {k: v.numpy() for k, v in state.items()}


@pytest.mark.parametrize("name", ["resnet50", "vgg16bn"])
def test_torch_computes_what_rjax_computes(name: str) -> None:
    torch = pytest.importorskip("torch")
    peers_torch = benchmark("throughput.peers_torch")
    ours, _, x, _ = tiny(name)
    if name == "vgg16bn":
        model = peers_torch.VGG16BN(5, 4, 8)
    else:
        model = peers_torch.ResNet(5, (1, 1, 1, 1), 4)
    arrays = state_dict(torch, model)
    if name == "vgg16bn":  # torchvision's convolutions have biases
        convs = [k for k, v in arrays.items() if v.ndim == 4]
        arrays |= {
            k.replace("weight", "bias"): np.zeros(len(arrays[k]), np.float32)
            for k in convs
        }
    variables = rjax.nn.from_torchvision(ours, arrays)
    with torch.no_grad():
        images = torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)
        want = model.eval()(images).numpy()
    close(jax.jit(ours.apply)(variables, x), want)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet50", 25_557_032), ("vgg16bn", 138_361_768), ("resnet20", 272_474)],
)
def test_torch_has_the_parameters_of_rjax(name: str, parameters: int) -> None:
    torch = pytest.importorskip("torch")
    peers_torch = benchmark("throughput.peers_torch")
    classes = 10 if name == "resnet20" else 1000
    with torch.device("meta"):
        model = peers_torch.make_model(
            dataclasses.replace(TOY, model=name, classes=classes)
        )
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_torch_trains(precision: str) -> None:
    pytest.importorskip("torch")
    peers_torch = benchmark("throughput.peers_torch")
    toy = dataclasses.replace(TOY, precision=precision, ema=True)
    found = measure.measure(peers_torch.TorchRig("torch", toy), toy)
    assert found["last_loss"] < found["first_loss"]
    assert found["scale"] == (8192.0 if precision == "fp16" else 1.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the contenders on JAX train what compiles fast, a CNN and one block."""

    def theirs(s: Any) -> Any:
        dtype = on_jax.DTYPES[s.precision]
        return peers_flax.ResNet(s.classes, dtype, (1,), 4, bottleneck=False)

    monkeypatch.setattr(on_jax, "make_model", lambda s: rjax.nn.CNN(s.classes, 4))
    monkeypatch.setattr(peers_flax, "make_model", theirs)


@pytest.mark.slow
def test_contenders_train_alike_and_are_profiled(small: None) -> None:
    toy, said = dataclasses.replace(TOY, profile=True, ema=True), []
    names = ["rjax", "rjax[xla]", "flax"]
    records = script.compare(names, toy, script.child, said.append)
    assert [r["contender"] for r in records] == names
    assert not any("failed" in r for r in records), said
    for record in records:
        assert len(record["samples"]) == 2 and min(record["samples"]) > 0
        assert record["last_loss"] < record["first_loss"]
        assert record["scale"] == 8192.0 and record["versions"]["jax"]
        ms = record["profiled"]["ms"]
        assert min(ms["conv"], ms["norm"], ms["update"]) > 0 and ms["pool"] == 0
        # The longest of all and of each category: how many there are is XLA's affair.
        top = record["profiled"]["top"]
        assert profiling.TOP <= len(top) < profiling.TOP + 5 * profiling.TOP_EACH
        assert {row["kind"] for row in top} >= {"conv", "norm", "update"}
    lines = said[-1].strip().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("| ")][1:] == names
    # Not the same model here, which is said.
    assert lines[-1].startswith("note: contenders differ in parameters: {'rjax': ")


@pytest.mark.slow
def test_a_step_that_is_not_finite_moves_nothing_of_flax(small: None) -> None:
    step, state, _ = peers_flax.make(dataclasses.replace(TOY, ema=True))
    images, labels = on_jax.make_batch(TOY)
    new, _ = jax.jit(step)(state, (images.at[0, 0, 0, 0].set(jnp.inf), labels))
    assert float(new.dynamic_scale.scale) == 4096.0
    for field in ("params", "opt_state", "batch_stats", "ema"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(new, field), getattr(state, field)
        )


def test_what_a_contender_raises_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ImportError("No module named 'torch'\nand more")

    monkeypatch.setattr(script, "measure_one", fails)
    record = script.child("torch", TOY)
    assert record["failed"] == "ImportError: No module named 'torch'"
    assert table.line(record) == (
        "resnet20 torch: left out: ImportError: No module named 'torch'"
    )


@pytest.mark.parametrize(
    ("program", "failed"),
    [
        ("print('noise'); print(json.dumps(head | {'found': 1})); print(2)", None),
        ("sys.exit('first\\nout of memory')", "ended with 1: out of memory"),
        ("os.kill(os.getpid(), 9)", "ended with -9: no message"),
        ("time.sleep(60)", "not done after 3 s"),
    ],
)
def test_a_contender_has_a_process_of_its_own(
    program: str,
    failed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(
        f"import json, os, sys, time\nhead = json.loads(sys.argv[2])\n{program}\n"
    )
    monkeypatch.setattr(script, "__file__", str(fake))
    timeout = 3 if failed and "not done" in failed else 60
    record = script.spawn("flax", TOY, timeout)
    assert record.get("failed") == failed
    assert record["contender"] == "flax" and record["batch"] == 4
    assert record.get("found") == (None if failed else 1)


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    flags = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    path = os.pathsep.join([str(SCRIPT.parents[1]), *filter(None, sys.path)])
    command = (
        f"{SCRIPT} --model resnet20 --batch 2 --image 8 --classes 10 --steps 1 "
        f"--samples 2 --warmup 0 --peers flax --no-rjax --json {kept}"
    )
    done = subprocess.run(
        [sys.executable, *command.split()],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, kept.read_text().splitlines())
    assert "failed" not in record and len(record["samples"]) == 2
    assert "--samples 2" in record["command"] and record["flags"] == {
        "XLA_FLAGS": flags
    }
    assert "| flax      |" in done.stdout


def test_records_are_kept_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    run = script.keeping(lambda name, _: {"contender": name}, str(path))
    assert [run(name, TOY)["contender"] for name in "ab"] == ["a", "b"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["contender"] for line in lines] == ["a", "b"]
    assert all(line["command"].startswith("python ") for line in lines)


def test_the_table_shows_medians_and_how_much_faster_rjax_is() -> None:
    slow = RECORD | {"contender": "flax", "samples": [0.4] * 3, "peak_bytes": None}
    missing = {"contender": "torch", "model": "resnet20", "failed": "no torch"}
    rows = list(table.lines([RECORD, slow, missing]))
    assert len({len(row) for row in rows[:4]}) == 1 and rows[0].startswith(
        "| contender"
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:4]]
    assert cells == [
        ["rjax", "40.0 [20.0 80.0]", "100.00", "", "1.5", "2.00", "2.5000", "1.2500"],
        ["flax", "20.0 [20.0 20.0]", "200.00", "2.00x", "1.5", "", "2.5000", "1.2500"],
    ]
    assert rows[4:] == ["note: torch was left out: no torch"]
    assert list(table.lines([missing]))[2:] == rows[4:]
    assert table.line(RECORD) == (
        "resnet20 rjax: 40.0 img/s [20.0 80.0], 100.00 ms/step, compile 1.5 s, loss "
        "2.5000 -> 1.2500, scale 8192, peak 2.00 GB"
    )


def test_doubts_are_said() -> None:
    odd = RECORD | {"contender": "flax", "parameters": 8, "last_loss": float("nan")}
    assert list(table.doubts([RECORD, odd])) == [
        "note: contenders differ in parameters: {'rjax': 7, 'flax': 8}",
        "note: the loss of flax does not fall: nan",
    ]


LEARNED = {
    "model": "resnet50", "precision": "fp16", "losses": [7.0] * 20 + [1.01] * 20,
    "skipped_steps": [0, 1], "eval_loss": 1.1, "eval_accuracy": 0.99,
}  # fmt: skip
FULL = LEARNED | {
    "precision": "fp32", "losses": [7.0] * 20 + [1.0] * 20, "skipped_steps": []
}  # fmt: skip


def test_the_verdict_passes() -> None:
    lines = list(verdict.lines(LEARNED, FULL))
    assert len(lines) == 7 and all(line.startswith("  PASS") for line in lines)
    assert lines[1].endswith("2 skipped, at steps [0, 1]")
    assert lines[-1].endswith("means lie 0.0100 apart, at most 0.0200")


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({"losses": [7.0] * 40}, [0, 6]),
        ({"losses": [7.0] * 39 + [float("nan")]}, [0, 6]),
        ({"losses": [7.0] * 20 + [1.03] * 20}, [6]),
        ({"skipped_steps": [3, 10]}, [1]),
        ({"eval_loss": float("inf")}, [2]),
    ],
)
def test_the_verdict_fails(change: dict[str, Any], at: list[int]) -> None:
    passed = [ok for ok, _ in verdict.checks(LEARNED | change, FULL)]
    assert [i for i, ok in enumerate(passed) if not ok] == at


@pytest.mark.slow
def test_both_precisions_learn_from_the_same_stream(small: None) -> None:
    toy = dataclasses.replace(TOY, batch=16, learn=40, learning_rate=0.1)
    runs = [
        {"precision": p, **learning.train(dataclasses.replace(toy, precision=p))}
        for p in ("fp16", "fp32")
    ]
    for run in runs:
        assert len(run["losses"]) == 40 and run["skipped_steps"] == []
        assert run["losses"][-1] < run["losses"][0] and run["scale"] in (1.0, 8192.0)
        assert np.isfinite(run["eval_loss"]) and 0 <= run["eval_accuracy"] <= 1
    # The same weights and the same first batch, but for the rounding.
    half, full = runs
    assert half["losses"][0] == pytest.approx(full["losses"][0], rel=0.01)


def test_learning_says_what_fails() -> None:
    said: list[str] = []
    toy = dataclasses.replace(TOY, learn=3)

    def run(name: str, s: Any) -> Any:
        return {"failed": "no memory", "name": name, "precision": s.precision}

    assert not script.learn(toy, run, said.append)
    assert said[-1] == "  FAIL  resnet20 fp16: no memory"


def test_labels_of_the_task_have_patterns() -> None:
    toy = dataclasses.replace(TOY, batch=64, classes=1000)
    pictures = learning.patterns(toy)
    images, labels = learning.draw(toy, pictures, jax.random.key(0))
    assert images.shape == (64, 16, 16, 3) and images.dtype == jnp.float16
    assert set(np.unique(labels)) <= set(range(10))
    cells = images.astype(jnp.float32).reshape(64, 8, 2, 8, 2, 3).mean((2, 4))
    distance = ((cells[:, None] - pictures[None]) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == labels).mean() > 0.9


def test_the_parser_hides_the_child() -> None:
    assert isinstance(parser := settings.make_parser(""), argparse.ArgumentParser)
    assert "--only" not in parser.format_help() and "--learn" in parser.format_help()
