"""Weights on their own: out to files that others read, and back into a state."""

import ast
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.states import rig, trained
from helpers import bits, host

import rjax
from rjax import checkpoint
from rjax.checkpoint import CheckpointError, export_weights, load_weights

SUFFIXES = (".npz", ".safetensors")
VIEWS = ("master", "compute", "ema", "ema_compute")


@pytest.fixture(scope="module")
def made():
    return rig("adamw")


@pytest.fixture(scope="module")
def state(made):
    return trained(made)


def save_npz(path, arrays: dict[str, Any]):
    np.savez(path, **arrays)


def wanted(made, state, which):
    stats = "ema" if which.startswith("ema") else "current"
    return {
        "params": rjax.get_params(made.plan, state, which),
        "batch_stats": rjax.get_batch_stats(made.plan, state, stats),
    }


@pytest.mark.parametrize("which", VIEWS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_hold_the_bits(made, state, tmp_path, suffix, which):
    path = tmp_path / f"weights{suffix}"
    export_weights(path, made.plan, state, which)
    found = load_weights(path)
    assert bits(found) == bits(wanted(made, state, which))
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("which", VIEWS)
def test_checkpoints_hold_the_bits(made, state, tmp_path, which):
    checkpoint.save(tmp_path, made.plan, state)
    for path in (tmp_path, tmp_path / "4"):
        assert bits(load_weights(path, which)) == bits(wanted(made, state, which))


def test_checkpoints_without_an_average_or_halves(tmp_path):
    made = rig("fp32")
    checkpoint.save(tmp_path, made.plan, made.state())
    found = load_weights(tmp_path, "compute")
    assert bits(found) == bits(wanted(made, made.state(), "compute"))
    with pytest.raises(ValueError, match="`which` must be a kind .*got 'ema'"):
        load_weights(tmp_path, "ema")
    with pytest.raises(ValueError, match="`which` must be a kind .*got 'best'"):
        load_weights(tmp_path, "best")  # type: ignore[arg-type]


def test_into_another_training(made, state, tmp_path):
    """Of another configuration: weights go through `replace_params`, nothing else."""
    checkpoint.save(tmp_path, made.plan, state)
    other = rig("bf16")
    fresh = other.state()
    params = load_weights(tmp_path, "ema")["params"]
    taken = rjax.replace_params(other.plan, fresh, params)
    right = rjax.get_params(made.plan, state, "ema")
    found = rjax.get_params(other.plan, taken, "master")
    right["fc"]["kernel"] = right["fc"]["kernel"].astype(jnp.bfloat16)
    for path in ("gain", "bn1", "conv1", "conv10"):
        assert bits(found[path]) == bits(right[path])
    assert int(taken.step) == 0 and float(taken.scale) == float(fresh.scale)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plain_flax_model_takes_them(tmp_path, suffix):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            return nn.BatchNorm(use_running_average=True)(x)

    model, x = Net(), jnp.ones((2, 4))
    variables = model.init(jax.random.key(0), x)
    stats = variables["batch_stats"]
    plan = rjax.make_plan(variables["params"], rjax.Config(), batch_stats=stats)
    state = rjax.init_state(plan, variables["params"], stats)
    path = tmp_path / f"weights{suffix}"
    export_weights(path, plan, state)
    found = load_weights(path)
    assert bits(model.apply(found, x)) == bits(model.apply(variables, x))
    # And back, from a tree of another program.
    doubled = jax.tree.map(lambda w: w + w, variables["params"])
    state = rjax.replace_params(plan, state, doubled)
    assert bits(rjax.get_params(plan, state)) == bits(doubled)


def test_numpy_and_safetensors_read_them_without_rjax(made, state, tmp_path):
    import safetensors.numpy

    for suffix in SUFFIXES:
        export_weights(tmp_path / f"weights{suffix}", made.plan, state)
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as found:
        plain = dict(found)
    assert plain["params/conv1/kernel"].shape == (2, 2, 1, 3)
    assert "batch_stats/bn1/mean" in plain
    other = safetensors.numpy.load_file(tmp_path / "weights.safetensors")
    assert bits(plain) == bits(other)


def test_a_file_of_another_program(tmp_path):
    import safetensors.numpy

    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.numpy.save_file({"params/w": kernel}, tmp_path / "w.safetensors")
    save_npz(tmp_path / "w.npz", {"params/w": kernel})
    for suffix in SUFFIXES:
        found = load_weights(tmp_path / f"w{suffix}")
        assert np.array_equal(found["params"]["w"], kernel)
        assert found["batch_stats"] == {}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damage_is_refused(made, state, tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    export_weights(path, made.plan, state)
    data = path.read_bytes()
    right = bits(load_weights(path))
    draw = np.random.default_rng(0)
    for at in [0, len(data) - 1, *draw.integers(0, len(data), 200).tolist()]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(draw.integers(8))
        path.write_bytes(damaged)
        try:
            found = bits(load_weights(path))
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:  # a byte that means nothing, as a date
            assert found == right, at
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="is damaged or holds other data"):
            load_weights(path)


def test_numbers_that_were_changed_are_refused(made, state, tmp_path):
    """The last bytes are numbers in one format, and a directory in the other."""
    path = tmp_path / "weights.safetensors"
    export_weights(path, made.plan, state)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "weights.npz"
    save_npz(path, {"params/w": np.array([Bomb()], object)})
    with pytest.raises(CheckpointError):
        load_weights(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        load_weights(path)


def test_no_code_here_can_unpickle():
    """No module imports what unpickles, and NumPy is told not to.

    But for one that reads the files of CIFAR, and takes nothing but plain data.
    """
    package = Path(rjax.__file__).parent
    sources = {*package.rglob("*.py")} - {package / "data" / "pickles.py"}
    assert len(sources) > 100
    for source in sources:
        tree = ast.parse(source.read_text())
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                root = name.partition(".")[0]
                assert root not in ("pickle", "cloudpickle", "dill", "joblib"), source
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant)
                assert node.value.value is False, source


def test_a_header_that_promises_too_much(tmp_path):
    path = tmp_path / "weights.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]}
    header = json.dumps({"params/w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(path)


def test_what_holds_no_weights(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones(2))
    with pytest.raises(CheckpointError, match="no weights of rjax"):
        load_weights(tmp_path / "x.npz")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(tmp_path / "nowhere.npz")
    with pytest.raises(CheckpointError, match="holds no checkpoints of rjax"):
        load_weights(tmp_path)


def test_arguments_that_cannot_be(made, state, tmp_path):
    with pytest.raises(ValueError, match=r"`path` must end in .npz or .safetensors"):
        export_weights(tmp_path / "weights.pt", made.plan, state)
    with pytest.raises(ValueError, match=r"`path` must end in .npz or .safetensors"):
        load_weights(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="which"):
        export_weights(tmp_path / "x.npz", made.plan, state, "best")  # type: ignore[arg-type]
    fp32 = rig("fp32")
    with pytest.raises(ValueError, match="ema"):
        export_weights(tmp_path / "x.npz", fp32.plan, fp32.state(), "ema")
    assert not list(tmp_path.iterdir())


def test_bfloat16_needs_the_other_format(tmp_path):
    made = rig("bf16")
    state = made.state()
    with pytest.raises(NotImplementedError, match=r"write .safetensors"):
        export_weights(tmp_path / "x.npz", made.plan, state, "compute")
    export_weights(tmp_path / "x.safetensors", made.plan, state, "compute")
    found = load_weights(tmp_path / "x.safetensors")["params"]["conv1"]["kernel"]
    assert found.dtype == jnp.bfloat16 and host(found).shape == (2, 2, 1, 3)


def test_a_file_is_replaced_whole(made, state, tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    export_weights(path, made.plan, state)
    data = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        export_weights(path, made.plan, state, "ema")
    assert path.read_bytes() == data
    assert [x.name for x in tmp_path.iterdir()] == ["weights.npz"]
