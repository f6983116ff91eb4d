"""Every snippet and command of the page on checkpoints runs, one after another."""

import pathlib
import re
import shlex

import pytest
from run_helpers import read_lines, read_manifest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"
if not PAGE.exists():
    pytest.skip("a built package has no docs", allow_module_level=True)
TEXT = PAGE.read_text()

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_snippets_run(capsys):
    snippets = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(snippets) == 4
    scope: dict = {"__name__": "__main__"}
    for i, snippet in enumerate(snippets):
        exec(compile(snippet, f"snippet {i}", "exec"), scope)
        if i == 1:
            assert scope["report"].applied and int(scope["state"].step) == 51
    assert "w has shape [64, 2], not [64, 3]" in capsys.readouterr().out
    master, ema = (scope[name]["params"]["w"] for name in ("variables", "averaged"))
    assert master.shape == (64, 2) and (master != ema).all()


def test_commands_run(capsys):
    pytest.importorskip("tyro")
    from rjax.cli import main

    commands = re.findall(r"^(rjax .*?)$", TEXT, re.M)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert len(read_lines("run")) == 33
    [again] = read_manifest("run")["resumed"]
    assert (again["step"], len(again["changes"])) == (22, 2)
    assert pathlib.Path("run/weights.npz").exists()
    assert pathlib.Path("run/weights_ema.npz").exists()
