"""Every snippet of the pages in docs/ runs as it stands, in a folder of its page."""

import os
import pathlib
import re
import shlex

import pytest
from doc_pages import DOCS, Page, all_pages

# These have tests of their own, which look at what the snippets leave behind.
ELSEWHERE = {
    *("adoption.md", "checkpoints.md", "many_devices.md", "reproducibility.md"),
}
PAGES = {name: page for name, page in all_pages().items() if name not in ELSEWHERE}
PYTHON = [
    pytest.param(name, snippet, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, snippet in enumerate(page.snippets)
]
COMMANDS = [
    pytest.param(name, line, id=f"{name}-{line}")
    for name, page in PAGES.items()
    for line in page.commands
]
pytestmark = pytest.mark.standard_promotion


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder a page, in which its commands find what those before have left."""
    return {name: tmp_path_factory.mktemp(name.removesuffix(".md")) for name in PAGES}


@pytest.mark.parametrize(("name", "snippet"), PYTHON)
def test_snippet_runs(name, snippet, folders, monkeypatch):
    monkeypatch.chdir(folders[name])
    PAGES[name].run(snippet)


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
        assert any(f'read_page("{name}")' in text for text in texts), name


def test_what_runs_is_found():
    page = all_pages()["reproducibility.md"]
    assert len(page.snippets) == len(page.outputs) == page.text.count("```python") == 5
    assert "Finding the place" in page.titled
    [command] = page.commands
    assert command.startswith("sweep ")


def test_of_a_page_is_found_what_can_run():
    page = Page(
        "x",
        "# x\n\n## One\n\n```python\nx = 1\n```\n\n```text\n1\n```\n\nrjax is prose\n\n"
        "## Two\n\nNothing.\n\n## Three\n\n```sh\nrjax plan --a 1  # why\nls\n"
        "rjax compare a b || true\n```\n\n```python\ny = x + 1\n```\n",
    )
    assert page.snippets == ["x = 1\n", "y = x + 1\n"] and page.outputs == ["1\n"]
    assert page.titled == {"One": "x = 1\n", "Three": "y = x + 1\n"}
    assert [line.split() for line in page.commands] == [
        ["plan", "--a", "1"],
        ["compare", "a", "b"],
    ]
    scope = page.run(page.snippets[0])
    assert page.run(page.snippets[1], scope)["y"] == 2
    with pytest.raises(NameError, match="x"):
        page.run(page.snippets[1])


def test_links_lead_somewhere():
    for name, page in all_pages().items():
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.text):
            assert os.path.exists(DOCS / target), (name, target)
