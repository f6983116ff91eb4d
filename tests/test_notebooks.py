"""The notebooks run as they stand, show what their text says, and are saved clean."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

import rjax

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")  # has the digits

ROOT = Path(rjax.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALL = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SECONDS = 300  # for one cell, on a busy machine
LARGEST = 600_000
# Which slots overflow first is a matter of a rounding; all other words are not.
NAMES_WHAT_OVERFLOWS = {"skip", "diagnose", "diagnosis"}


def _read(path) -> Any:
    return nbformat.read(path, as_version=4)


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _texts(notebook) -> dict[str, str]:
    """Return what every code cell prints and displays as text, by its id."""
    found = {}
    for cell in _code(notebook):
        kinds = [
            output.get("data", {}).get("text/plain", "") for output in cell.outputs
        ]
        found[cell.id] = "".join([*kinds, *(o.get("text", "") for o in cell.outputs)])
    return found


def _data(notebook, kind) -> list[str]:
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    return [o.data[kind] for o in outputs if kind in o.get("data", {})]


def _execute(path, folder, monkeypatch) -> Any:
    """Run a notebook in a fresh kernel, in a folder of its own."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = _read(path)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    return notebook


def _check_quickstart(notebook):
    texts = _texts(notebook)
    accuracy = dict(re.findall(r"^(\w+) +([\d.]+)%$", texts["accuracy"], re.M))
    assert list(accuracy) == ["master", "compute", "ema", "ema_compute"]
    assert all(float(percent) >= 97 for percent in accuracy.values()), accuracy
    report = ast.literal_eval(texts["report"])
    assert report["applied"] and report["step"] == 299 and report["skipped"] > 0
    assert report["scale"] == 2.0 ** (24 - report["skipped"])
    assert "was skipped" in texts["diagnosis"]
    assert "the gradient is not finite in" in " ".join(texts["diagnosis"].split())


def _changed(text) -> list[str]:
    """Return the fields that a stage is said to have changed."""
    return re.findall(r"^([\w.]+)  +", text, re.M)


CHANGES = {
    "forward_backward": ["batch", "cotangents", "loss", "next_stats"],
    "cast_deep_grads": ["cotangents"],
    "reduce_deep": [],
    "cast_first_grads": ["cotangents", "grads"],
    "reduce_first": [],
    "check_and_scale": ["flag", "bad_stats", "grad_norm", "bad_slots"],
    "reconcile_stats": [],
    "commit_stats": ["state.batch_stats", "state.results"],
    "update": ["state.master", "state.mu", "state.applied_steps"],
    "update_ema": ["state.ema", "state.ema_batch_stats"],
    "cast_to_compute": ["state.compute"],
    "cast_ema_to_compute": ["state.ema_compute"],
    "flag": ["flag", "bad_stats", "grad_norm", "bad_slots", "state.scale"],
    "skip": ["bad_slots"],
}


def _check_pipeline(notebook):
    texts = _texts(notebook)
    assert {name: _changed(texts[name]) for name in CHANGES} == CHANGES
    assert "flag                   bool[]: False" in texts["check_and_scale"]
    assert "flag                   bool[]: True" in texts["flag"]
    _check_overflow(texts)
    fields = dict(re.findall(r"^(\w+) +(.+)$", texts["unmoved"], re.M))
    moved = {name: words for name, words in fields.items() if words != "same bits"}
    assert set(moved) == {"scale", "step", "skipped", "consecutive_skips"}
    assert {"master", "compute", "mu", "ema", "batch_stats"} < set(fields)
    old, new = map(float, moved["scale"].split(" → "))
    assert new == old / 2
    assert "was skipped" in texts["diagnose"]
    assert "was applied" in texts["succeed"] and "1 skipped" in texts["succeed"]
    (counts,) = re.findall(
        r"^(\d+) arrays compared, (\d+) differ$", texts["equal"], re.M
    )
    assert int(counts[0]) > 500 and int(counts[1]) == 0


def _check_overflow(texts):
    rows = [[int(n) for n in row.split()] for row in texts["half_gradients"].split("\n")
            if re.fullmatch(r"[ \d]*\d", row)]  # fmt: skip
    assert [row[0] for row in rows[:2]] == [1, 8192] and len(rows) == 3
    total = sum(rows[0][1:])
    (_, zero, subnormal, _, bad), fits, overflows = rows
    assert zero + subnormal > 0 and bad == 0
    assert fits[1:] == [0, 0, total, 0]
    assert overflows[4] > 0 and overflows[0] > 8192


def _check_compare_runs(notebook):
    texts = _texts(notebook)
    assert texts["same"] == "verdict: bit-identical\n"
    assert texts["plant"].startswith("diverged: first difference in step 37, loss\n")
    assert "first step with another loss: 37" in texts["curves"]
    differ = re.findall(r"^\S+ +(\d+) of +\d+ weights differ", texts["element"], re.M)
    assert len(differ) == 4 and any(map(int, differ))
    assert re.fullmatch(
        r"step 37, image \d+, pixel \(\d, \d\): 1 ULP apart\n", texts["input"]
    )


def _check_speed(notebook):
    texts = _texts(notebook)
    assert texts["setup"] == "kept results of NVIDIA H200\n"
    shares = re.findall(r"^(\w.*?) +(\d+)% +(\d+)%$", texts["share"], re.M)
    assert len(shares) == 4 and all(int(share) >= 90 for *_, share in shares)
    assert re.search(r"kernels reach( \d+%){2} of the copy", texts["cbr"])
    speeds = re.findall(r"(\w+), (\S+) +([\d,]+) images a sec", texts["steps"])
    assert len(speeds) == 6 and {peer for _, peer, _ in speeds} > {"rjax", "flax"}


CHECKS = {
    "01_quickstart": _check_quickstart,
    "02_pipeline": _check_pipeline,
    "03_compare_runs": _check_compare_runs,
    "04_speed": _check_speed,
}
PLOTS = {"01_quickstart": 1, "02_pipeline": 2, "03_compare_runs": 1, "04_speed": 4}


def _words(text) -> list[str]:
    """Return the words of a text, a sign in place of every number that may differ."""
    return re.sub(r"(?<![\w\[.])-?\d[\d.]*(e[+-]?\d+)?(?![\w\]])", "#", text).split()


def test_there_is_a_check_for_every_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(CHECKS) == sorted(PLOTS)


@pytest.mark.slow
@pytest.mark.standard_promotion
@ALL
def test_it_runs_and_shows_what_its_text_says(path, tmp_path, monkeypatch):
    fresh, saved = _execute(path, tmp_path, monkeypatch), _read(path)
    CHECKS[path.stem](fresh)
    assert len(_data(fresh, "image/png")) == PLOTS[path.stem]
    assert _data(fresh, "text/html") == _data(saved, "text/html")
    old, new = _texts(saved), _texts(fresh)
    for name in old.keys() - NAMES_WHAT_OVERFLOWS:
        assert _words(new[name]) == _words(old[name]), name


@ALL
def test_what_is_saved_shows_what_its_text_says(path):
    saved = _read(path)
    CHECKS[path.stem](saved)
    assert len(_data(saved, "image/png")) == PLOTS[path.stem]
    assert all("<svg" in html for html in _data(saved, "text/html"))


@ALL
def test_it_is_saved_as_one_clean_run(path):
    notebook = _read(path)
    nbformat.validate(notebook)
    cells = _code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(cell.metadata for cell in notebook.cells)
    assert notebook.metadata == {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
    assert path.stat().st_size < LARGEST


@ALL
def test_it_names_no_place_on_a_machine(path):
    notebook = _read(path)
    sources = [cell.source for cell in notebook.cells]
    shown = [*_texts(notebook).values(), *_data(notebook, "text/html")]
    for text in (*sources, *shown):
        assert not re.search(r"/(home|tmp|root|work|usr|Users)\b|[A-Z]:\\", text)
        assert "sys.path" not in text and "Warning" not in text


def test_the_quickstart_trains_in_about_thirty_lines():
    sources = {cell.id: cell.source for cell in _read(NOTEBOOKS[0]).cells}
    lines = "\n".join(sources[name] for name in ("model", "plan", "train")).split("\n")
    assert len([line for line in lines if line.strip()]) <= 34
