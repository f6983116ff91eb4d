"""Every snippet of the pages in docs/ runs as it stands, in a folder of its page."""

import os
import pathlib
import re
import shlex

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
if not DOCS.exists():
    pytest.skip("a built package has no docs", allow_module_level=True)
# These have tests of their own, which look at what the snippets leave behind.
ELSEWHERE = {
    *("adoption.md", "checkpoints.md", "many_devices.md", "reproducibility.md"),
}
PAGES = {
    path.name: path.read_text()
    for path in sorted(DOCS.glob("*.md"))
    if path.name not in ELSEWHERE
}
PYTHON = [
    pytest.param(name, number, snippet, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
]
COMMANDS = [
    pytest.param(name, line, id=f"{name}-{line}")
    for name, text in PAGES.items()
    for block in re.findall(r"```sh\n(.*?)```", text, re.S)
    for line in re.findall(r"^rjax ([^\n#|]*)", block, re.M)
]
pytestmark = pytest.mark.standard_promotion


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder a page, in which its commands find what those before have left."""
    return {name: tmp_path_factory.mktemp(name.removesuffix(".md")) for name in PAGES}


@pytest.mark.parametrize(("name", "number", "snippet"), PYTHON)
def test_snippet_runs(name, number, snippet, folders, monkeypatch):
    monkeypatch.chdir(folders[name])
    scope: dict = {"__name__": "__main__"}
    exec(compile(snippet, f"{name}, snippet {number}", "exec"), scope)


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_command_runs(name, line, folders, monkeypatch, capsys):
    from rjax.cli import main

    monkeypatch.chdir(folders[name])
    words = shlex.split(line)
    if words[0] == "train":
        words += ["--limit-steps", "2", "--no-plan"]
    wanted = 1 if words[0] == "compare" else 0  # the page compares two that differ
    assert main(words) == wanted, capsys.readouterr().err


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for path in DOCS.rglob("*.md"):
        assert f": {path.relative_to(DOCS).as_posix()}\n" in navigation


def test_pages_kept_apart_have_tests_of_their_own():
    tests = pathlib.Path(__file__).parents[1].rglob("test_*.py")
    texts = [path.read_text() for path in tests if path != pathlib.Path(__file__)]
    for name in ELSEWHERE:
        assert any(name in text for text in texts), name


def test_links_lead_somewhere():
    for name, text in PAGES.items():
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
            assert os.path.exists(DOCS / target), (name, target)
