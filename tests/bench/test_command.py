"""`rjax bench`: what it says, leaves and refuses."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("tyro")

from ops.range_kernels import HAS_KERNELS
from run_helpers import complaint

from rjax.bench import command, tune
from rjax.bench.cases import CASES
from rjax.bench.command import prepare
from rjax.bench.measure import BenchError, Figure
from rjax.bench.options import BenchOptions
from rjax.cli import main
from rjax.ops import mosaic, tuned
from rjax.runs.interrupts import Interrupted

BAD = {
    "--ops emma": "--ops knows no 'emma': use names from copy, cast, ema,",
    "--ops ema,": "--ops knows no ''",
    "--ops fused_update/": "--ops knows no 'fused_update/'",
    "--ops EMA": "--ops knows no 'EMA'",
    "--ops": "missing value for argument '--ops'",
    "--sizes 6": "--sizes takes logarithms from 7 to 28",
    "--sizes 29": "got '29'",
    "--sizes 1024": "got '1024'",
    "--sizes 10,,12": "got '10,,12'",
    "--sizes 10;12": "got '10;12'",
    "--sizes ten": "got 'ten'",
    "--sizes 10.0": "got '10.0'",
    "--sizes -10": "--sizes",
    "--sizes ²": "got '²'",
    "--size 10": "did you mean --sizes?",
    "--out table.json": "--out is the file of --tune",
    "--json .": "--json . cannot be written",
    "--json file/figures.json": "--json file/figures.json cannot be written",
    "--json missing/figures.json": "--json missing/figures.json cannot be written",
    "stray": "stray",
}
DEVICE = jax.devices()[0].device_kind


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command believe that kernels can run."""
    monkeypatch.setattr(mosaic, "why_not", lambda: None)


@pytest.fixture
def faked(
    monkeypatch: pytest.MonkeyPatch, with_kernels: None
) -> list[BaseException | None]:
    """Measure nothing: two ops at one size, and what is put into the list between."""
    ends: list[BaseException | None] = [None]

    def group(op: str, end: BaseException | None) -> Iterator[Figure]:
        yield Figure(op, 1024, "xla", None, 8, (3e-6,))
        if end is not None:
            raise end
        for block in (256, 128, 512):
            yield Figure(op, 1024, "mosaic_gpu", block, 8, (block * 1e-8,))

    def sweep(*_: Any) -> Iterator[Iterator[Figure]]:
        yield group("ema", None)
        yield group("digest/32", ends[0])

    monkeypatch.setattr(command, "sweep", sweep)
    return ends


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_code_2(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("kept")
    assert main(["bench", *words.split()]) == 2
    line = complaint(capsys)
    assert line.startswith("rjax bench: ") and BAD[words] in line
    assert os.listdir() == ["file"] and Path("file").read_text() == "kept"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels can run here")
def test_tuning_where_no_kernel_can_run_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--tune"], ["--tune", "--out", "table.json"]):
        assert main(["bench", *words]) == 2
        wanted = "need an NVIDIA GPU" if HAS_KERNELS else "need jax 0.11"
        assert wanted in complaint(capsys)
        assert os.listdir() == []


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("folder", "--out folder cannot be written (Is a directory)"),
        ("file/table.json", "--out file/table.json cannot be written"),
        ("file", "file is no tuning table of this version"),
        ("other.json", "holds measurements of 'Other GPU'"),
    ],
)
def test_an_unusable_table_is_refused(
    out: str, why: str, with_kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("file").write_text("kept")
    tuned.write(Path("other.json"), tuned.Tuning("Other GPU", "1", {}))
    before = Path("other.json").read_text()
    assert main(["bench", "--tune", "--out", out]) == 2
    assert why in complaint(capsys)
    assert Path("file").read_text() == "kept" and os.listdir("folder") == []
    assert Path("other.json").read_text() == before


def test_tuning_the_copy_alone_is_refused(
    with_kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--tune", "--ops", "copy"]) == 2
    assert "nothing to choose for copy" in complaint(capsys)


def test_a_damaged_table_in_force_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tune.default_path(DEVICE)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "why_not", lambda: "no kernel today")
    assert main(["bench"]) == 2
    assert "is no tuning table of this version" in complaint(capsys)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU has")
def test_on_a_cpu_xla_is_measured_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--ops", "ema", "--sizes", "12,10", "--json", "figures.json"]
    assert main(["bench", *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("only xla is measured: Mosaic GPU kernels need")
    told = [line.partition(":")[0] for line in said[2:8]]
    assert told == [
        "2^10 elements", "copy, 2^10, xla", "ema, 2^10, xla",
        "2^12 elements", "copy, 2^12, xla", "ema, 2^12, xla",
    ]  # fmt: skip
    assert said[9].startswith("| op   |    n |") and "mosaic" not in said[9]
    assert said[-1] == "samples in figures.json"
    record = json.loads(Path("figures.json").read_text())
    assert record["device"] == DEVICE and record["jax"] == jax.__version__
    assert [(row["op"], row["n"]) for row in record["rows"]] == [
        (op, n) for n in (1024, 4096) for op in ("copy", "ema")
    ]
    for row in record["rows"]:
        assert row["implementation"] == "xla" and row["block"] is None
        assert len(row["samples"]) == 3 and min(row["samples"]) > 0
        assert row["seconds"] == sorted(row["samples"])[1]
        moved = row["nbytes"] * row["n"]
        assert row["bandwidth"] == pytest.approx(moved / row["seconds"])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs have more sizes")
def test_what_is_measured_if_nothing_is_named(with_kernels: None) -> None:
    job = prepare(BenchOptions())
    assert [case.name for case in job.cases] == list(CASES)
    assert job.sizes == [1 << log for log in range(10, 23, 2)]
    assert [str(v) for v in job.variants(CASES["ema"], 1024)] == ["xla", "mosaic_gpu"]
    assert [str(v) for v in job.variants(CASES["copy"], 1024)] == ["xla"]


def test_tuning_writes_the_table_of_the_user(
    faked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--tune"]) == 0
    path = tune.default_path(DEVICE)
    assert capsys.readouterr().out.splitlines()[-1] == f"table in {path}"
    found = tuned.read(path)
    best = (tuned.Choice(1024, 3e-6, 128e-8, 128),)
    assert found == tuned.Tuning(
        DEVICE, jax.__version__, {"ema": best, "digest/32": best}
    )


def test_a_part_is_added_to_the_table_named(faked: Any) -> None:
    old = {"cast/32-16": (tuned.Choice(1024, 1.0, 2.0, 512),)}
    tuned.write(Path("table.json"), tuned.Tuning(DEVICE, "1", old))
    assert main(["bench", "--tune", "--out", "table.json"]) == 0
    found = tuned.read(Path("table.json"))
    assert list(found.choices) == ["cast/32-16", "ema", "digest/32"]
    assert not tune.default_path(DEVICE).exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_an_interrupt_leaves_what_was_measured(
    number: int, code: int, faked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    faked[0] = Interrupted(number)
    words = ["--tune", "--out", "table.json", "--json", "figures.json"]
    assert main(["bench", *words]) == code
    out, error = capsys.readouterr()
    assert "interrupted after 5 figures\n" in out and error == ""
    assert "\n| ema " in out and "table in table.json\n" in out
    assert list(tuned.read(Path("table.json")).choices) == ["ema"]
    assert len(json.loads(Path("figures.json").read_text())["rows"]) == 5


@pytest.mark.parametrize(
    "end",
    [
        BenchError("digest/32: a result differs"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a result\nmore lines"),
    ],
)
def test_a_failure_is_one_line_and_code_1_after_what_was_measured(
    end: Exception, faked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    faked[0] = end
    assert main(["bench", "--json", "figures.json"]) == 1
    out, error = capsys.readouterr()
    assert error.startswith("rjax bench: ") and error.count("\n") == 1
    assert "a result" in error and "\n| ema " in out
    assert len(json.loads(Path("figures.json").read_text())["rows"]) == 5


def test_help_names_every_option_and_every_op(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    for name in vars(BenchOptions()):
        assert f" --{name} " in said
    assert all(name.partition("/")[0] in said for name in CASES)
    assert "None" not in said and "--no-" not in said
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.gpu
def test_tuning_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ops", "ema,digest_slots/16", "--sizes", "10,20"]
    assert main(["bench", "--tune", *words]) == 0, capsys.readouterr().err
    found = tuned.read(tune.default_path(DEVICE))
    for op in ("ema", "digest_slots/16"):  # what is shipped stays
        assert {2**10, 2**20} <= {choice.n for choice in found.choices[op]}
    assert tuned.here() == found
