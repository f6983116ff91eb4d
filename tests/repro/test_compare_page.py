"""The page of a comparison: whole, by itself, and with the pictures."""

import html.parser
from pathlib import Path

import numpy as np
import pytest
from compare_helpers import some_run

from rjax.repro import Comparison, compare
from rjax.repro.page.charts import Line, Points, chart, stairs

_VOID = ("meta", "link")


class Reader(html.parser.HTMLParser):
    """Checks that all that opens is closed, and keeps what was seen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = self.heading = ""
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open[-1:] == ["h1"]:
            self.heading += data
        if self.open[-1:] == ["td"]:
            self.cells.append(data)


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    a, b = some_run(snapshots=(5,)), some_run(snapshots=(5,))
    b.digests[5:, :3] ^= np.uint32(1)
    b.snapshots[5]["mu fc/kernel"][3] += 1
    b.floats("loss")[5] = np.nan
    b.floats("scale")[9:] /= 2
    b.manifest["seed"] = "<script>"
    return compare(a.write(tmp_path / "a"), b.write(tmp_path / "<b>"))


def test_the_page_says_what_the_text_says(found: Comparison) -> None:
    read = Reader(found.to_html())
    lines = found.text().splitlines()
    assert lines[0] == f"{found.verdict}: {read.heading}"
    for line in lines[1:]:
        # The page has a table of the runs, and one of what the manifests say.
        if "steps 0 to" not in line and line.strip() not in map(
            str, found.causes.found
        ):
            assert line.strip() in read.text
    for cause in found.causes.found:
        assert {cause.name, cause.a, cause.b} <= {*read.cells}
    assert "table" in read.tags
    for tensor in found.state.tensors:
        assert tensor.name in read.text


def test_the_page_needs_nothing_and_runs_nothing(found: Comparison) -> None:
    page = found.to_html()
    assert page.startswith("<!DOCTYPE html>") and found.verdict in page
    # Names of the run's own making stay text.
    assert "<script" not in page and "<b>" not in page
    page = page.replace('<link rel="icon" href="data:,">', "")  # or browsers ask
    for word in ("href", "src=", "url(", "@import"):
        assert word not in page
    assert "http" not in page


def test_a_notebook_gets_the_same_without_a_page_around_it(found: Comparison) -> None:
    fragment = found._repr_html_()
    assert fragment in found.to_html() and "<html" not in fragment
    Reader(fragment)


def test_equal_runs_have_a_page_too(tmp_path: Path) -> None:
    folder = some_run().write(tmp_path / "a")
    assert "bit-identical" in Reader(compare(folder, folder).to_html()).text


def test_charts_leave_holes_and_never_fail() -> None:
    def drawn(*curves: Points, mark: float | None = None) -> str:
        return chart("loss", [Line("x", points, "red") for points in curves], mark=mark)

    hole = [(0, 1.0), (1, np.inf), (2, 2.0), (3, 3.0)]
    assert drawn(hole, [(0, 1.0)], mark=2).count("M") == 2 + 1 + 1  # and the mark
    assert drawn([(0, np.nan)], []) == ""
    assert "logarithmic" in drawn([(0, 1e-3), (1, 1e3)])
    big = np.finfo(np.float64).max
    for low in (-big, 0.0):
        assert "nan" not in drawn([(0, low), (1, big)], mark=0)


def test_stairs_are_few() -> None:
    assert stairs([], 5) == []
    assert len(stairs([(i, float(i)) for i in range(12_345)], 12_345)) <= 1000
