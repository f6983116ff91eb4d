import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rjax
from rjax.files import write_atomically
from rjax.plain import dumps, plain
from rjax.repro.manifest import (
    Manifest,
    describe_data,
    describe_machine,
    describe_source,
)
from rjax.runs.errors import UsageError
from rjax.runs.folder import claim_folder


def make_data(first: float = 0.0) -> rjax.data.Dataset:
    images = np.full((4, 2, 2, 1), first, np.float32)
    labels = np.arange(4, dtype=np.int32)
    return rjax.data.Dataset(
        "made", (images, labels), (images[:2], labels[:2]), num_classes=4
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_non_finite_numbers_are_null(value: Any) -> None:
    assert dumps({"x": value, "y": [value]}) == '{"x": null, "y": [null]}'


def test_arrays_dataclasses_and_callables_are_plain() -> None:
    @dataclasses.dataclass
    class Inner:
        rate: Any
        shape: tuple[int, ...]

    value = {"inner": Inner(jnp.float32(0.5), (1, 2)), "call": dumps, 3: np.int32(7)}
    assert plain(value) == {
        "inner": {"type": "Inner", "rate": 0.5, "shape": [1, 2]},
        "call": "dumps",
        "3": 7,
    }


def test_a_config_is_plain() -> None:
    config = rjax.Config(
        optimizer=rjax.optim.adamw(), clip=rjax.Clip(norm=1.0), ema=rjax.Ema(0.5)
    )
    described = json.loads(dumps(config))
    assert described["precision"] == "fp16"
    assert described["clip"]["norm"] == 1.0
    assert described["ema"]["decay"] == 0.5


def test_writing_replaces_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_atomically(path, "long text\n" * 100)
    write_atomically(path, "short\n")
    assert path.read_text() == "short\n"
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_failed_write_keeps_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    write_atomically(path, "old\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_manifest_says_running_until_it_is_finished(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path, seed=3)
    first = json.loads(manifest.path.read_text())
    assert (first["status"], first["ended"], first["results"]) == (
        "running",
        None,
        None,
    )
    manifest.finish("finished", {"accuracy": 0.5})
    last = json.loads(manifest.path.read_text())
    assert (last["status"], last["seed"]) == ("finished", 3)
    assert last["results"] == {"accuracy": 0.5}
    assert last["started"] == first["started"] <= last["ended"]


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SOME_FLAG", "1")
    facts = describe_machine()
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["versions"]["rjax"] == rjax.__version__
    assert facts["device"]["platform"] == jax.default_backend()
    assert facts["environment"]["JAX_SOME_FLAG"] == "1"
    assert "PATH" not in facts["environment"]


def test_the_data_fingerprint_follows_every_byte() -> None:
    once, again, other = make_data(), make_data(), make_data(1.0)
    assert describe_data(once) == describe_data(again)
    assert describe_data(once)["fingerprint"] != describe_data(other)["fingerprint"]
    assert describe_data(once)["train"] == 4
    assert len(describe_data(once)["fingerprint"]) == hashlib.sha256().digest_size * 2


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_source_is_the_checkout_of_the_package_only(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("init", "-q")
    assert describe_source(package) is None
    git("add", ".")
    git("commit", "-q", "-m", "first")
    revision = git("rev-parse", "HEAD")
    assert describe_source(package) == {"revision": revision, "dirty": False}
    (package / "__init__.py").write_text("x = 1\n")
    assert describe_source(package) == {"revision": revision, "dirty": True}
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert describe_source(installed) is None


def test_default_folders_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert claim_folder(None, "a") == Path("runs/a-1")
    assert claim_folder(None, "a") == Path("runs/a-2")
    assert claim_folder(None, "b") == Path("runs/b-1")


def test_an_empty_folder_may_be_used_a_full_one_not(tmp_path: Path) -> None:
    assert claim_folder(str(tmp_path), "a") == tmp_path
    (tmp_path / ".hidden").touch()
    with pytest.raises(UsageError, match="is not empty: choose another"):
        claim_folder(str(tmp_path), "a")


@pytest.mark.parametrize("out", ["file", "file/run", "file/deep/run"])
def test_a_file_in_the_way_is_named(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make a run in .*file"):
        claim_folder(str(tmp_path / out), "a")


def test_a_file_called_runs_is_in_the_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(UsageError, match="cannot make a run in runs"):
        claim_folder(None, "a")
