"""The page of a comparison against the records: numbers, curves, colours, weight."""

import dataclasses
import html.parser
import math
import re
from pathlib import Path

import numpy as np
import pytest
from compare_helpers import Run, some_run
from repro.chromium import shown

from rjax.repro import Comparison, Tensor, compare
from rjax.repro import format as on_disk
from rjax.repro.bits import decode
from rjax.repro.page.charts import Line, chart
from rjax.repro.page.strips import strips
from rjax.repro.timeline import BINS, Strip, Timeline, Watcher

EQUAL, SOME, ALL = "#56b4e9", "#e69f00", "#d55e00"
_NUMBER = re.compile(
    r"0x[0-9a-f]+|(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?(?!\w)"
)


class Seen(html.parser.HTMLParser):
    """What a reader sees, without the styles and the explanations that never change."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.skip = "", 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skip += tag in ("style", "dl")
        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        self.skip -= tag in ("style", "dl")
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += "" if self.skip else data


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run]:
    a, b = some_run(30, snapshots=(8, 20)), some_run(30, snapshots=(8, 20))
    rng = np.random.default_rng(1)
    for run in (a, b):
        run.floats("loss")[12:] *= rng.uniform(0.7, 1.3, 18).astype(np.float32)
        run.floats("grad_norm")[12:] += rng.random(18, np.float32)
    b.digests[8:, 0] ^= np.uint32(1)
    b.digests[11:, 1:3] ^= np.uint32(5)
    b.digests[20, 0] = a.digests[20, 0]  # equal once more
    for step in (8, 20):
        b.snapshots[step]["master fc/kernel"][3] += 0.375
        b.snapshots[step]["compute fc/kernel"][2] += 0.5
    b.floats("scale")[17:] /= 4
    b.column("applied")[16] = 0
    b.column("skipped")[17:] += 1
    b.manifest["seed"] = 4711
    return a, b


@pytest.fixture(scope="module")
def found(runs: tuple[Run, Run], tmp_path_factory) -> Comparison:
    folder = tmp_path_factory.mktemp("runs")
    a, b = (run.write(folder / name) for run, name in zip(runs, "ab", strict=True))
    return compare(a, b)


def _known(a: Run, b: Run) -> set[str]:
    """Return every number that the records hold, and what lies between the two."""
    known = {str(i) for i in range(32)}  # steps, places, and how many there are of each
    known |= {"0.001", "0.01", "4711"}  # what is allowed, and the manifest
    for i, (_, dtype) in enumerate(a.layout.columns):
        x, y = (decode(run.words[:, i], dtype) for run in (a, b))
        for word, value in zip(
            np.r_[a.words[:, i], b.words[:, i]].tolist(), np.r_[x, y], strict=True
        ):
            known |= {f"{float(value):{f}}" for f in (".6g", "g")}
            known |= {str(value), str(float(value)), f"0x{word:08x}", f"0x{word:x}"}
        apart = np.abs(x.astype(float) - y) / np.maximum(abs(x), abs(y)).clip(1e-30)
        known |= {f"{value:{f}}" for value in apart for f in (".2g", ".6g")}
        words = a.words[:, i].astype(np.int64) - b.words[:, i]
        known |= {f"{abs(value):,}" for value in words.tolist()}
    for run in (a, b):
        for lanes in run.digests.reshape(-1, 2).tolist():
            known.add(f"0x{lanes[1]:08x}{lanes[0]:08x}")
    for step in (8, 20):
        for name, left in a.snapshots[step].items():
            x, y = left.astype(float), b.snapshots[step][name].astype(float)
            known.add(f"{np.linalg.norm(x - y) / max(np.linalg.norm(x), 1e-30):.2g}")
            if left.dtype.kind == "f":
                bits = f"u{left.itemsize}"
                pairs = zip(left, b.snapshots[step][name], strict=True)
                for each in pairs:
                    low, high = (int(v.view(bits)) for v in each)
                    known |= {f"0x{v:0{2 * left.itemsize}x}" for v in (low, high)}
                    known |= {str(float(v)) for v in each} | {f"{abs(high - low):,}"}
    return known


def test_every_number_is_found_in_the_records(
    found: Comparison, runs: tuple[Run, Run]
) -> None:
    seen = Seen(found.to_html()).text.replace(found.a.folder, "")
    numbers = {*_NUMBER.findall(seen.replace(found.b.folder, ""))}
    assert len(numbers) > 40
    assert numbers - _known(*runs) == set()


def test_the_curve_of_the_loss_is_that_of_the_record(
    found: Comparison, runs: tuple[Run, Run]
) -> None:
    figure = found.to_html().split("<figcaption>loss")[1].split("</figure>")[0]
    low, high = (min(r.floats("loss").min() for r in runs), 1.0)
    for run, path in zip(
        runs, re.findall(r'd="(M[^"]+)" stroke=', figure), strict=True
    ):
        x, y = np.array(re.findall(r"[\d.]+", path), float).reshape(-1, 2).T
        np.testing.assert_allclose(x, np.arange(30) / 29 * 1000, atol=0.06)
        losses = run.floats("loss")
        share = (losses - low) / (high - low)
        if ", logarithmic" in figure:
            share = np.log(losses / low) / math.log(high / low)
        np.testing.assert_allclose(y, 96 - 92 * share, atol=0.06)


def _colours(page: str, name: str, steps: int) -> list[str]:
    """Return the colour of a strip at every step."""
    strip = page.split(f'aria-label="{name}"')[1].split("</svg>")[0]
    rects = re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)".*?fill="(.+?)"', strip)
    at = [(float(x), float(x) + float(wide), colour) for x, wide, colour in rects]
    places = (1000 * (step + 0.5) / steps for step in range(steps))
    return [[c for low, high, c in at if low <= x < high][0] for x in places]


def test_the_strips_have_the_colours_of_the_records(
    found: Comparison, runs: tuple[Run, Run]
) -> None:
    a, b = runs
    page = found.to_html()
    for i, tensor in enumerate(a.layout.tensors):
        differ = (a.digests[:, i] != b.digests[:, i]).any(axis=1)
        want = [ALL if each else EQUAL for each in differ[:30]]
        assert _colours(page, tensor.region or tensor.field, 30) == want
    for i, (name, _) in enumerate(a.layout.columns):
        want = np.where(a.words[:, i] != b.words[:, i], ALL, EQUAL).tolist()
        assert _colours(page, name, 30) == want


def test_records_that_are_read_in_pieces_give_the_same_timelines(
    found: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "_CHUNK", 300)
    pieces = compare(found.a.folder, found.b.folder)
    assert pieces.timelines == found.timelines


def test_what_shows_where_a_pointer_rests(found: Comparison) -> None:
    titles = re.findall(r"<title>(.*?)</title>", found.to_html())
    assert {
        "W_FC_WEIGHT, after 0 to 7 steps: equal",
        "W_FC_WEIGHT, after 8 to 19 steps: differs within these 12 rows",
        "W_FC_WEIGHT, after 20 steps: equal",
        "applied, step 16: differs, by up to 1 of the larger",
    } <= {*titles}
    timeline = Timeline(((0, 4), (5, 9)), (5, 5), (Strip("x", 3, (1, 2)),))
    drawn = strips({"state": timeline}, (0, 9), None)
    assert "x, after 0 to 9 steps: up to 2 of 3 tensors differ" in drawn


def test_the_runs_are_told_as_they_ended(
    found: Comparison, runs: tuple[Run, Run]
) -> None:
    page = found.to_html()
    losses = (f"{run.floats('loss')[-1]:.6g} in step 29" for run in runs)
    for name, cells in (
        ("loss", losses),
        ("loss scale at the end", ("8192", "2048")),
        ("steps skipped", ("0", "1")),
        ("steps", ("30 (0 to 29)",) * 2),
    ):
        row = "".join(f"<td>{cell}</td>" for cell in (name, *cells))
        assert f"<tr>{row}</tr>" in page


def test_what_is_not_known_of_a_run_is_said(tmp_path: Path) -> None:
    a, b = some_run(5), some_run(5)
    b.manifest = None
    found = compare(a.write(tmp_path / "a"), b.write(tmp_path / "b"))
    assert "B has no manifest" in found.to_html()


def test_a_strip_tells_a_part_of_a_region_from_all_of_it() -> None:
    watcher = Watcher(("x", "x", "y"), 4)
    watcher.add(np.arange(3), np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]], bool))
    watcher.add(np.array([7]), np.array([[0, 1, 1]], bool))
    seen = watcher.timeline()
    assert seen.bounds == ((0, 0), (1, 1), (2, 2), (7, 7)) and seen.rows == (1,) * 4
    assert [(s.name, s.size, s.differ) for s in seen.strips] == [
        ("x", 2, (0, 1, 2, 1)),
        ("y", 1, (0, 0, 0, 1)),
    ]


def test_many_rows_share_a_place_and_the_worst_of_them_is_shown() -> None:
    rows = 5 * BINS - 3
    rng = np.random.default_rng(0)
    differ, apart = rng.random((rows, 3)) < 0.1, rng.random((rows, 3))
    watcher = Watcher("xxy", rows)
    for part in np.split(np.arange(rows), range(3, rows, 3)):
        watcher.add(part, differ[part], apart[part])
    seen = watcher.timeline()
    assert len(seen.bounds) == BINS and sum(seen.rows) == rows
    for i, (low, high) in enumerate(seen.bounds):
        assert (low, high) == (5 * i, min(5 * i + 4, rows - 1))
        inside = slice(low, high + 1)
        assert seen.strips[0].differ[i] == differ[inside, :2].sum(axis=1).max()
        assert seen.strips[1].differ[i] == differ[inside, 2].max()
        assert seen.strips[1].largest[i] == apart[inside, 2].max()


def test_records_without_anything_in_common_have_a_page(tmp_path: Path) -> None:
    a, b = some_run(5), some_run(5)
    columns = tuple((f"other/{name}", dtype) for name, dtype in b.layout.columns)
    tensors = tuple(dataclasses.replace(t, shape=(9,)) for t in b.layout.tensors)
    b.layout = dataclasses.replace(b.layout, columns=columns, tensors=tensors)
    found = compare(a.write(tmp_path / "a"), b.write(tmp_path / "b"))
    assert found.verdict == "diverged"
    assert "Where they agree" in found.to_html()


def test_a_point_alone_is_drawn_and_the_axis_has_all_steps() -> None:
    nan = float("nan")
    points = [(0, nan), (4, 2.0), (5, nan), (9, 3.0), (10, 1.0)]
    drawn = chart("x", [Line("x", points, "red")])
    assert 'd="M400.0 50.0h0M900.0 4.0L1000.0 96.0"' in drawn
    assert "<span>step 0</span><span>10</span>" in drawn


def test_names_in_a_chart_stay_text() -> None:
    drawn = chart("<b>", [Line("<i>", [(0, 1.0), (1, 2.0)], "red")])
    assert "<b>" not in drawn and "<i>" not in drawn


def _long_run() -> Run:
    """Return a run of 10,000 steps with digests of 60 regions after each of them."""
    run = some_run(10_000, every=0)
    tensors = tuple(
        Tensor("master", f"layer{i}/kernel", (3,), "float32", f"W_{i}")
        for i in range(60)
    )
    run.layout = dataclasses.replace(run.layout, tensors=tensors, every=1)
    run.digest_steps = np.arange(10_001)
    run.digests = np.zeros((10_001, 60, 2), np.uint32)
    return run


def test_the_page_of_ten_thousand_steps_is_light(tmp_path: Path) -> None:
    a, b = _long_run(), _long_run()
    rng = np.random.default_rng(0)
    # The worst there can be: no two places of a strip have one colour for long.
    b.digests[:] = rng.random(b.digests.shape) < 0.01
    b.floats("loss")[:] = rng.random(10_000)
    b.floats("scale")[:] = 2.0 ** rng.integers(0, 20, 10_000)
    page = compare(a.write(tmp_path / "a"), b.write(tmp_path / "b")).to_html()
    assert 100_000 < len(page.encode()) < 3_000_000


@pytest.mark.parametrize("width", (1400, 420))
def test_a_browser_shows_it_without_complaint(
    found: Comparison, tmp_path: Path, width: int
) -> None:
    over, tall, wide = shown(found.to_html(), tmp_path, width)
    assert over <= 0
    assert tall >= 12 and wide >= 200
