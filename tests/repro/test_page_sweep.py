"""The page of a sweep: every number from the runs, and a browser that shows it."""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from repro.chromium import shown
from repro.sweep_helpers import WORDS, script, write_runs
from repro.test_page import Seen

from rjax.repro import sweep
from rjax.runs.sweeps import Sweep

SETTINGS = {"precision": ["fp32", "fp16"], "rule": ["halving", "<b>"]}
SEEDS = [0, 3, 4]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, dict]:
    out = tmp_path_factory.mktemp("sweep")
    runs = write_runs(out, SETTINGS, SEEDS)
    return sweep(SETTINGS, out, train=WORDS, seeds=SEEDS), runs


def _known(found: Sweep, runs: dict) -> Iterator[str]:
    """Yield every number that the runs hold, and means and spreads of theirs."""
    for setting in found.settings:
        mine = [runs[run.folder] for run in setting.runs]
        for values, shown_as in (
            ([r["test"]["master"]["loss"] for r in mine], "{:.4f}"),
            ([100 * r["test"]["master"]["accuracy"] for r in mine], "{:.2f}"),
            ([r["train"]["skipped"] for r in mine], "{:.4g}"),
            ([r["train"]["images_per_second"] for r in mine], "{:,.0f}"),
        ):
            yield from map(shown_as.format, values)
            yield shown_as.format(statistics.fmean(values))
            yield shown_as.format(statistics.stdev(values))
        courses = [[row["loss"] for row in r["course"]] for r in mine]
        for losses in zip(*courses, strict=True):
            yield f"{statistics.fmean(losses):.6g}"
        yield f"{mine[0]['train']['scale']:g}"
    means = [100 * setting.mean("accuracy") for setting in found.settings]
    yield f"{max(means) - min(means):.2f}"
    yield f"{max(100 * setting.spread('accuracy') for setting in found.settings):.2f}"


def test_every_number_is_found_in_the_runs(written: tuple[Sweep, dict]) -> None:
    found, runs = written
    page = found.to_html()
    seen = Seen(page).text + " ".join(re.findall('title="([^"]+)"', page))
    numbers = {
        *re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?(?!\w)", seen)
    }
    known = {*_known(found, runs)}
    # Seeds, steps and how many there are; versions; the first scale of the records.
    known |= {str(i) for i in range(21)} | {"3.11", "0.10.2", "0.10", "8192"}
    assert len(numbers & known) > 40 and numbers - known == set()


def test_dots_lie_where_the_accuracies_are(written: tuple[Sweep, dict]) -> None:
    found, _ = written
    values = [x for setting in found.settings for x in setting.values("accuracy")]
    dots = re.findall(r'<i style="left:([\d.]+)%;[^"]+" title="seed', found.to_html())
    low, high = min(values), max(values)
    want = [100 * (x - low) / (high - low) for x in values]
    assert [float(dot) for dot in dots] == pytest.approx(want, abs=0.006)


def test_it_explains_itself_and_names_stay_text(written: tuple[Sweep, dict]) -> None:
    page = written[0].to_html()
    for words in (
        "precision: fp32, fp16", "The number format", "How the loss scale moves",
        "± ", "seed", "equal in every bit", "rjax train --data digits",
    ):  # fmt: skip
        assert words in page
    assert "<b>" not in page and "&lt;b&gt;" in page and "http" not in page
    assert "<script" not in page


def test_nothing_finished_is_a_page_too(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo no room on the disk >&2; exit 1")
    found = sweep({"python": [python]}, tmp_path / "out", seeds=2)
    page = found.to_html()
    assert "no room on the disk" in page and "2 failed" in page


@pytest.mark.parametrize("width", (1400, 420))
def test_a_browser_shows_it_without_complaint(
    written: tuple[Sweep, dict], tmp_path: Path, width: int
) -> None:
    over, tall, _ = shown(written[0].to_html(), tmp_path, width)
    assert over <= 0 and tall >= 6
