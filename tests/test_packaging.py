"""What is promised outside the code: metadata, make targets, commands."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rjax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def test_the_version_is_said_once_more_in_the_package() -> None:
    assert rjax.__version__ == PROJECT["project"]["version"]
    assert rjax.__version__ == importlib.metadata.version("rjax")


def test_the_command_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="rjax")
    assert script.value == "rjax.cli:main"
    assert script.load() is sys.modules["rjax.cli"].main


def test_make_has_the_targets() -> None:
    assert {"demo", "test", "test-new", "lint", "clean", "help"} <= TARGETS


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_help_names_every_target() -> None:
    command = ["make", "-C", str(ROOT), "--no-print-directory", "help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == TARGETS


def test_ci_is_one_script_over_make_targets() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    (targets,) = re.findall(r"^for target in (.*); do$", script.read_text(), re.M)
    assert set(targets.split()) <= TARGETS


@pytest.mark.parametrize("which", ["first", "newest"])
def test_the_python_found_is_one_that_is_supported(which: str) -> None:
    command = [str(ROOT / ".ci" / "find-python"), which]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("no such Python here")
    question = "import sys; print(*sys.version_info[:2])"
    command = [done.stdout.strip(), "-c", question]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    version = tuple(map(int, done.stdout.split()))
    assert (3, 12 if which == "newest" else 11) <= version < (3, 15)


def test_a_shim_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    shim = tmp_path / "python3"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [str(ROOT / ".ci" / "find-python")]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    )
    assert str(shim) not in done.stdout


def test_the_front_door_stays_light() -> None:
    heavy = "sklearn matplotlib tyro rich.progress orbax grain PIL pandas".split()
    code = f"import sys, rjax; print([m for m in {heavy!r} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_readme_names_only_what_exists() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README yet")
    text = readme.read_text()
    assert set(re.findall(r"^\s*make ([a-z-]+)", text, re.M)) <= TARGETS
    commands = set(re.findall(r"^\s*rjax ([a-z]+)", text, re.M))
    assert commands <= {"train", "plan", "bench", "compare", "sweep"}
