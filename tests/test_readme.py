"""Every snippet of the README runs as it stands, one after another in one folder."""

import os
import pathlib
import re
import shlex

import pytest
from set_writers import write_cifar10, write_mnist, write_pictures

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = re.findall(r"^(rjax .*?) *(?:#.*)?$", README, re.M)

pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder with small sets of the names that the snippets use."""
    before, here = pathlib.Path.cwd(), tmp_path_factory.mktemp("readme")
    write_mnist(here / "mnist", ".gz")
    write_cifar10(here / "cifar", "python")
    write_pictures(here / "pictures")
    os.chdir(here)
    yield here
    os.chdir(before)


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command_runs(number, capsys):
    pytest.importorskip("tyro")
    from rjax.cli import main

    if COMMANDS[number] == "rjax train":
        return _default_run()
    words = shlex.split(COMMANDS[number])[1:]
    if "--recipe" in words:  # a small set, and whole epochs
        words += "--epochs 1 --warmup-epochs 0 --batch-size 4 --hidden 8".split()
    elif "--data" in words and words[0] == "train":
        words += ["--limit-steps", "2", "--no-plan"]
    assert main(words) == 0, capsys.readouterr().err


def _default_run():
    """See to it that this worker's folder has the run of the first command."""
    pytest.importorskip("tyro")
    from rjax.cli import main

    assert COMMANDS[0] == "rjax train"
    if not pathlib.Path("runs/digits-mlp-fp16-1").exists():
        assert main(["train", "--no-plan"]) == 0


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_snippet_runs(number, capsys):
    if "runs/digits" in PYTHON[number]:
        pytest.importorskip("pandas")
        _default_run()
    scope: dict = {"__name__": "__main__"}
    exec(compile(PYTHON[number], f"README snippet {number}", "exec"), scope)
    printed = capsys.readouterr().out
    if "load_digits" in PYTHON[number]:
        accuracies = dict(re.findall(r"^(master|ema) ([\d.]+)$", printed, re.M))
        assert all(float(value) >= 0.97 for value in accuracies.values()), printed
        assert set(accuracies) == {"master", "ema"}
    if "scan(body" in PYTHON[number]:
        losses = scope["reports"].loss
        assert float(losses[-1]) < 1e-2 * float(losses[0])
    if "diagnose" in PYTHON[number]:
        assert "'w'" in printed and "4096" not in printed
    if "repro.compare" in PYTHON[number]:
        assert printed.startswith("diverged: first difference in step 2, loss\n")
    if "read_json" in PYTHON[number]:
        assert len(scope["steps"]) == 880


def test_every_kind_of_snippet_is_there():
    assert len(PYTHON) >= 6 and len(COMMANDS) >= 5
    assert set(re.findall(r"```(\w+)\n", README)) == {"python", "sh", "text"}


def test_first_example_is_about_thirty_lines():
    lines = [line for line in PYTHON[0].splitlines() if line.strip()]
    assert len(lines) <= 34
