"""Every snippet and command of the page on checkpoints runs, one after another."""

import pathlib
import shlex

import pytest
from doc_pages import read_page
from run_helpers import read_lines, read_manifest

PAGE = read_page("checkpoints.md")

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_snippets_run(capsys):
    assert len(PAGE.snippets) == 4
    scope: dict = {"__name__": "__main__"}
    for i, snippet in enumerate(PAGE.snippets):
        PAGE.run(snippet, scope)
        if i == 1:
            assert scope["report"].applied and int(scope["state"].step) == 51
    assert "w has shape [64, 2], not [64, 3]" in capsys.readouterr().out
    master, ema = (scope[name]["params"]["w"] for name in ("variables", "averaged"))
    assert master.shape == (64, 2) and (master != ema).all()


def test_commands_run(capsys):
    pytest.importorskip("tyro")
    from rjax.cli import main

    assert len(PAGE.commands) == 2
    for command in PAGE.commands:
        assert main(shlex.split(command)) == 0, capsys.readouterr().err
    assert len(read_lines("run")) == 33
    [again] = read_manifest("run")["resumed"]
    assert (again["step"], len(again["changes"])) == (22, 2)
    assert pathlib.Path("run/weights.npz").exists()
    assert pathlib.Path("run/weights_ema.npz").exists()
