"""`rjax compare`: exit codes, what it refuses in one line, and real runs."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro")

import helpers
import numpy as np
from compare_helpers import some_run
from run_helpers import complaint

import rjax
from rjax.cli import main
from rjax.repro import RecordError, compare
from rjax.repro import format as on_disk

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside two equal runs, `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        some_run().write(Path(name))


def spoil(name: str, place: int) -> None:
    """Flip a bit of one byte of a file of `b`."""
    path = Path("b", on_disk.FOLDER, name)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_equal_runs_are_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("bit-identical\n") and out.err == ""


def test_anything_else_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    other = some_run()
    other.floats("loss")[3] += 1
    other.write(Path("c"))
    assert main(["compare", "a", "c"]) == 1
    assert capsys.readouterr().out.startswith("diverged: first difference in step 3")
    short = some_run()
    short.keep(5)
    short.write(Path("d"))
    assert main(["compare", "a", "d"]) == 1
    assert capsys.readouterr().out.startswith("incomplete\n")


def test_the_page_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "a", "b", "--html", "page.html"]) == 0
    assert "bit-identical" in Path("page.html").read_text()
    capsys.readouterr()
    assert main(["compare", "a", "b", "--html", "none/page.html"]) == 2
    assert "--html none/page.html cannot be written" in capsys.readouterr().err


def _layout(**changes: Any) -> None:
    path = Path("b", on_disk.FOLDER, on_disk.LAYOUT)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut(name: str, size: int) -> None:
    path = Path("b", on_disk.FOLDER, name)
    path.write_bytes(path.read_bytes()[:size])


def _twice() -> None:
    path = Path("b", on_disk.FOLDER, on_disk.STEPS)
    path.write_bytes(2 * path.read_bytes())


def _remove(name: str) -> None:
    Path("b", on_disk.FOLDER, name).unlink()


REFUSED = {
    "newer format": (lambda: _layout(format=2), "has format 2"),
    "no layout": (lambda: _remove(on_disk.LAYOUT), "no record of a run"),
    "no steps": (lambda: _remove(on_disk.STEPS), "cannot be read"),
    "no digests": (lambda: _remove(on_disk.DIGESTS), "cannot be read"),
    "cut layout": (lambda: _cut(on_disk.LAYOUT, 99), "is damaged"),
    "empty": (lambda: _cut(on_disk.STEPS, 0), "holds no whole step"),
    "cut to nothing": (lambda: _cut(on_disk.STEPS, 9), "holds no whole step"),
    "damaged steps": (lambda: spoil(on_disk.STEPS, 100), "damaged at row 3 of 20"),
    "damaged first step": (lambda: spoil(on_disk.STEPS, 1), "damaged at row 0"),
    "damaged digests": (lambda: spoil(on_disk.DIGESTS, 100), "damaged at row 2 of 21"),
    "unknown dtype": (lambda: _layout(columns=[["loss", "float33"]]), "is damaged"),
    "one name twice": (
        lambda: _layout(columns=[["loss", "float32"]] * 6), "is damaged",
    ),
    "no columns": (lambda: _layout(columns=5), "is damaged"),
    "steps twice": (_twice, "steps out of order"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_one_line_and_code_2(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ruin, words = REFUSED[case]
    ruin()
    for pair in (["a", "b"], ["b", "a"]):
        assert main(["compare", *pair]) == 2
        line = complaint(capsys)
        assert line.startswith("rjax compare: b") and words in line
    with pytest.raises(RecordError, match="b"):
        compare("a", "b")


def test_folders_that_are_no_runs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("foreign").mkdir()
    Path("file").touch()
    for name in ("foreign", "file", "missing"):
        assert main(["compare", "a", name]) == 2
        assert f"{name} has no record of a run" in complaint(capsys)


@pytest.mark.parametrize("words", [[], ["a"], ["a", "b", "c"], ["a", "b", "--html"]])
def test_bad_words_are_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words]) == 2
    line = complaint(capsys)
    assert line.endswith("(see rjax compare --help)\n")
    assert "RUN_A RUN_B" in line or len(words) > 1


def test_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["compare", "-h"]) == 0
    said = capsys.readouterr().out
    assert "rjax compare [-h] RUN_A RUN_B [--html FILE]" in said
    assert "bit-identical (exit code 0)" in said and "None" not in said


def _train(folder: str, at: int | None = None, **options: Any) -> None:
    """Record twelve steps; pull one element by a little more in step `at`."""
    config = helpers.config(optimizer=rjax.optim.nesterov(), ema=rjax.Ema(0.9))
    rig = helpers.make_rig(helpers.SIX, config)
    state = rig.state()
    with rjax.repro.record(folder, rig.plan, state, **options) as recording:
        for i in range(12):
            batch = helpers.ones(helpers.SIX, np.inf if i == 4 else 0.125)
            if i == at:
                batch = helpers.injected(batch, "fc/kernel", 4, 0.25)
            state, report = rig.jitted(state, batch)
            recording.add(state, report)


def test_real_runs(capsys: pytest.CaptureFixture[str]) -> None:
    _train("one", every=1, snapshot_every=3)
    _train("two", every=1, snapshot_every=3)
    _train("pulled", at=8, every=1, snapshot_every=3)
    assert main(["compare", "one", "two"]) == 0
    assert "8192, 4096 from step 5" in capsys.readouterr().out
    assert main(["compare", "one", "pulled"]) == 1
    found = compare("one", "pulled")
    # The loss is linear in the batch: it shows in the step itself, then in the state.
    assert (found.first.step, found.first.name) == (8, "loss")
    assert "The state before step 8 is equal" in found.text()
    assert (found.state.equal, found.state.step) == (8, 9)
    assert found.state.name == "mu fc/kernel"
    assert found.state.element.index == (1, 1) and found.state.element.count == 1
    fields = [t.field for t in found.state.tensors if t.path == "fc/kernel"]
    assert fields == ["mu", "master", "compute", "ema", "ema_compute"]
    assert "what differs is not in them" in capsys.readouterr().out
