"""The documentation builds without a warning, and not without a description."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
ROOT = pathlib.Path(__file__).parents[2]
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("a built package has no docs", allow_module_level=True)


@pytest.fixture(scope="module")
def hooks() -> Any:
    path = ROOT / "docs" / "tools" / "hooks.py"
    spec = importlib.util.spec_from_file_location("hooks", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_builds_with_every_public_name(hooks, tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = [path.read_text() for path in (tmp_path / "api").rglob("index.html")]
    found = {name for page in pages for name in re.findall(r'id="(rjax[\w.]+)"', page)}
    assert set(hooks.public_names.everything()) <= found
    measured = (tmp_path / "performance" / "index.html").read_text()
    assert measured.count("<table") > 15 and "<!-- results" not in measured
    assert 'class="room"' in (tmp_path / "architecture" / "index.html").read_text()
    assert "assets/style.css" in (tmp_path / "index.html").read_text()
    assert "Loss-scale rules" in (tmp_path / "changes" / "index.html").read_text()


def test_a_name_without_a_description_ends_the_build(hooks, monkeypatch):
    hooks.on_pre_build(None)
    bare = {"rjax.bare": lambda value: value}
    monkeypatch.setattr(hooks.public_names, "everything", lambda: bare)
    with pytest.raises(hooks.PluginError, match="rjax.bare lacks a docstring"):
        hooks.on_pre_build(None)


def test_a_page_lists_all_names_of_its_module(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/optim.md"))
    text = hooks.on_page_markdown("# x\n\npublic: rjax.optim\n", page=page)
    assert "::: rjax.optim.lars\n" in text and "public:" not in text


def test_the_rooms_are_drawn_from_the_imports(hooks):
    graph = hooks.rooms.rooms()
    assert {"regions", "layout"} <= graph["plan"] and not graph["regions"]
    assert graph["ops"] <= {"plain"}
    height = {room: i for i, row in enumerate(hooks.rooms.rows(graph)) for room in row}
    for room, imports in graph.items():
        for other in imports:
            assert height[other] < height[room], (room, other)
    picture = hooks.rooms.svg()
    assert picture.count('class="room"') == len(graph)
    assert "<title>ops imports" in picture


def test_no_rooms_import_each_other(hooks):
    graph = hooks.rooms.rooms()
    assert hooks.rooms.circles(graph) == []
    # Sweeps train, and what trains records: so sweeps are no part of the records.
    assert "repro" in graph["runs"] and "runs" not in graph["repro"]


def test_a_circle_is_found(hooks):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert hooks.rooms.circles(graph) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="import each other: a, b, c"):
        hooks.rooms.rows(graph)
    line = {**graph, "c": set()}
    assert hooks.rooms.rows(line) == [["c", "e"], ["b"], ["a"], ["d"]]


def test_imports_for_types_alone_do_not_count(hooks):
    text = (
        "if TYPE_CHECKING:\n    from rjax.a import x\nelse:\n    import rjax.b\n"
        "def f():\n    from rjax.c import y\n    from rjax import d\n"
    )
    found = hooks.rooms._imported(hooks.rooms.ast.parse(text))
    assert {"b", "c", "d"} <= found and "a" not in found
