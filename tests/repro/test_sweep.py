"""Sweeps: what is run, what is kept, what is lost, and what is said of it."""

import dataclasses
import json
import shutil
import statistics
from pathlib import Path

import pytest
from repro.sweep_helpers import WORDS, script, write_runs

import rjax
from rjax.cli import main
from rjax.repro import sweep
from rjax.runs.sweeps import Sweep, axes
from rjax.runs.sweeps.reading import Seen

SETTINGS = {"precision": ["fp32", "bf16", "fp16"], "rule": ["halving", "static"]}
SEEDS = [0, 3, 4]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict]:
    return tmp_path, write_runs(tmp_path, SETTINGS, SEEDS)


@pytest.fixture
def found(written: tuple[Path, dict]) -> Sweep:
    return sweep(SETTINGS, written[0], train=WORDS, seeds=SEEDS)


def test_means_and_spreads_are_those_of_the_runs(
    found: Sweep, written: tuple[Path, dict]
) -> None:
    assert [s.choice.values for s in found.settings] == [
        (("precision", p), ("rule", r))
        for p in SETTINGS["precision"] for r in SETTINGS["rule"]
    ]  # fmt: skip
    for setting in found.settings:
        folders = [run.folder for run in setting.runs]
        assert len(folders) == 3 and [run.seed for run in setting.runs] == SEEDS
        for name in ("loss", "accuracy"):
            want = [written[1][f]["test"]["master"][name] for f in folders]
            assert setting.values(name) == want
            assert setting.mean(name) == statistics.fmean(want)
            assert setting.spread(name) == statistics.stdev(want)
        skipped = [written[1][f]["train"]["skipped"] for f in folders]
        assert setting.values("skipped") == skipped
        speed = [written[1][f]["train"]["images_per_second"] for f in folders]
        assert setting.values("images_per_second") == speed


def test_settings_of_the_same_bits_share_a_letter(found: Sweep) -> None:
    assert [s.bits for s in found.settings] == ["A", "A", "A", "A", "B", "B"]
    assert [s.agrees for s in found.settings] == [20, 20, 20, 20, 7, 7]
    assert "Bits B, equal masters for every seed: fp16, halving; fp16, static." in str(
        found
    )


def test_one_other_bit_in_one_seed_is_another_letter(
    written: tuple[Path, dict],
) -> None:
    folder = written[0] / "runs" / "precision=bf16,rule=static,seed=3" / "record"
    data = bytearray((folder / "digests.bin").read_bytes())
    other = written[0] / "runs" / "precision=fp16,rule=static,seed=3" / "record"
    row = len(data) // 21
    data[-row:] = (other / "digests.bin").read_bytes()[-row:]
    (folder / "digests.bin").write_bytes(data)
    found = sweep(SETTINGS, written[0], train=WORDS, seeds=SEEDS)
    assert [s.bits for s in found.settings] == ["A", "A", "A", "B", "C", "C"]


def test_the_last_digest_counts_and_it_is_said_where_it_is_not_the_end(
    found: Sweep, written: tuple[Path, dict]
) -> None:
    assert "The last digests" not in str(found)
    for path in written[0].glob("runs/*/record/digests.bin"):
        data = path.read_bytes()
        path.write_bytes(data[: -(len(data) // 21)])
    found = sweep(SETTINGS, written[0], train=WORDS, seeds=SEEDS)
    assert [s.bits for s in found.settings] == ["A", "A", "A", "A", "B", "B"]
    assert "those after 19 of 20 steps" in str(found)


def test_masters_that_meet_again_have_parted_all_the_same() -> None:
    choices = axes.choices({"rule": ["static", "halving"]})
    each = ({0: "a", 5: "b", 9: "c"}, {0: "a", 5: "x", 9: "c"})
    runs = [
        Seen(choice, 0, "", "", steps=9, masters=masters)
        for choice, masters in zip(choices, each, strict=True)
    ]
    found = Sweep.of(["rule"], [], choices, [0], runs)
    assert [s.bits for s in found.settings] == ["A", "A"]
    assert [s.agrees for s in found.settings] == [9, 0]
    early = dataclasses.replace(runs[1], masters={0: "a", 5: "c"})
    found = Sweep.of(["rule"], [], choices, [0], [runs[0], early])
    assert [s.bits for s in found.settings] == ["A", "B"]


def test_text_json_and_folder_tell_the_same(
    found: Sweep, written: tuple[Path, dict]
) -> None:
    out = written[0]
    assert {p.name for p in out.iterdir()} == {"runs", "sweep.html", "sweep.json"}
    assert (out / "sweep.html").read_text() == found.to_html()
    content = json.loads((out / "sweep.json").read_text())
    assert content["command"] == ["rjax", "train", *WORDS]
    for setting, row in zip(found.settings, content["settings"], strict=True):
        assert row["mean"]["loss"] == setting.mean("loss")
        assert f"{row['mean']['loss']:.4f} ± {row['spread']['loss']:.4f}" in str(found)
        assert [run["folder"] for run in row["runs"]] == [
            run.folder for run in setting.runs
        ]
    assert str(found).startswith("6 settings x 3 seeds: 18 runs finished")
    assert found._repr_html_() in found.to_html()


def test_it_says_whether_chance_explains_the_differences(
    written: tuple[Path, dict],
) -> None:
    def told(of_seed: float, of_setting: float) -> str:
        for i, path in enumerate(sorted(written[0].glob("runs/*/manifest.json"))):
            content = json.loads(path.read_text())
            accuracy = 0.5 + i // 3 * of_setting + i % 3 * of_seed
            content["results"]["test"]["master"]["accuracy"] = accuracy
            path.write_text(json.dumps(content))
        return str(sweep(SETTINGS, written[0], train=WORDS, seeds=SEEDS))

    chance = told(0.01, 0.001)
    assert "lie within 0.50 points" in chance and "spread by up to 1.00" in chance
    assert "the seed matters as much" in chance
    assert "more than a change of the seed explains" in told(0.001, 0.01)


def test_one_setting_and_one_seed_need_no_spread(tmp_path: Path) -> None:
    write_runs(tmp_path, {}, [5])
    found = sweep({}, tmp_path, train=WORDS, seeds=[5])
    assert "±" not in str(found) and "±" not in found.table()[1][0]
    assert found.table()[1][0][0] == "as given" and found.to_html()


def test_versions_that_nobody_asked_for_are_told(written: tuple[Path, dict]) -> None:
    path = next(written[0].glob("runs/*/manifest.json"))
    path.write_text(path.read_text().replace("0.10.2", "0.11.2"))
    found = sweep(SETTINGS, written[0], train=WORDS, seeds=SEEDS)
    sentence = "Not all runs have the same version of jax."
    assert sentence in str(found) and sentence in found.to_html()


def test_a_run_gets_its_words_its_interpreter_and_its_devices(tmp_path: Path) -> None:
    python = script(tmp_path / "python", 'echo "$JAX_NUM_CPU_DEVICES: $@" >&2; exit 3')
    settings = {"devices": [1, 4], "deterministic": [False, True], "python": [python]}
    lines: list[str] = []
    found = sweep(
        settings, tmp_path / "out", train=["--hidden", "8", "4"], seeds=1, jobs=2,
        progress=lines.append,
    )  # fmt: skip
    assert [len(s.runs) for s in found.settings] == [0] * 4 and len(lines) == 4
    words = (
        "4: -m rjax train --hidden 8 4 --devices 1 --deterministic --no-plan "
        "--checkpoint-every 0 --weights none --seed 0 --out "
    )
    assert found.settings[1].failed[0].error.startswith(f"failed: {words}")
    assert "--devices 4 --no-deterministic " in found.settings[2].failed[0].error
    assert all(row[3] == "0 of 1" and row[-1] == "-" for row in found.table()[1])


def test_what_did_not_finish_or_was_of_other_words_is_run_again(
    written: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = written[0]
    python = script(out / "python", "echo ran >&2; exit 3")
    monkeypatch.setattr("sys.executable", python)
    broken = out / "runs" / "precision=fp32,rule=static,seed=3" / "manifest.json"
    broken.write_text(broken.read_text().replace('"finished"', '"interrupted"'))
    shutil.rmtree(out / "runs" / "precision=fp16,rule=halving,seed=0")
    lines: list[str] = []
    found = sweep(SETTINGS, out, train=WORDS, seeds=SEEDS, progress=lines.append)
    assert lines[0] == "16 of 18 runs are there already, and kept"
    assert {(x.choice.name, x.seed) for x in found.failed} == {
        ("fp32, static", 3), ("fp16, halving", 0),
    }  # fmt: skip
    assert not broken.exists()  # the run that failed again has taken its place
    assert [len(s.runs) for s in found.settings] == [3, 2, 3, 3, 2, 3]
    assert found.settings[1].bits == "" and "2 of 3" in str(found)
    assert "failed: ran" in str(found) and "2 failed" in found.to_html()
    more = sweep(SETTINGS, out, train=[*WORDS, "--width", "3"], seeds=SEEDS[:1])
    assert len(more.failed) == 6


def test_a_folder_that_is_no_run_stays(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "rule=static,seed=0" / "thesis.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(FileExistsError, match="is no run of `rjax train`"):
        sweep({"rule": ["static"]}, tmp_path, seeds=1)
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    (
        ({"presicion": ["fp16"]}, {}, "`presicion` is no axis"),
        ({"seed": [1, 2]}, {}, "`seed` cannot be varied"),
        ({"rule": []}, {}, "`rule` must have a list of values"),
        ({"rule": "static"}, {}, "`rule` must have a list of values"),
        ({"rule": ["static", "static"]}, {}, "different values"),
        ({"python": ["/no/such"]}, {}, "is no program"),
        ({"deterministic": ["perhaps"]}, {}, "must be yes or no"),
        ({}, {"seeds": 0}, "`seeds` must be different numbers"),
        ({}, {"seeds": [1, 1]}, "`seeds` must be different numbers"),
        ({}, {"jobs": 0}, "`jobs` must be at least 1"),
        ({}, {"train": ["--seed=3"]}, "decided by the sweep: .* use `seeds`"),
        ({"rule": ["a b", "a/b"]}, {}, "more than signs of punctuation"),
    ),
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, settings: dict, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(settings, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ("precision", "rule=static=", "rule"))
def test_settings_that_are_no_axis_and_values(text: str) -> None:
    with pytest.raises(ValueError):
        axes.choices(axes.parse([text, text] if "=" in text else [text]))


def test_the_command_says_it_and_leaves_it(
    written: tuple[Path, dict], capsys: pytest.CaptureFixture
) -> None:
    out = str(written[0])
    words = ["sweep", *(f"{k}={','.join(v)}" for k, v in SETTINGS.items())]
    words += ["--only-seeds", *map(str, SEEDS), "--out", out, "--", *WORDS]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "18 of 18 runs are there already" in said
    assert f"sweep left in {out}" in said
    assert main(["sweep", "nothing=1"]) == 2
    assert "`nothing` is no axis" in capsys.readouterr().err
    assert main(["sweep", "rule=static", "--seeds", "0"]) == 2
    assert "--seeds must be at least 1" in capsys.readouterr().err


def test_real_runs_train_fail_and_are_kept(tmp_path: Path) -> None:
    words = ["--hidden", "8", "--epochs", "1", "--limit-steps", "20"]
    settings = {"learning-rate": [0.1, "nan"], "precision": ["fp32"]}
    found = sweep(settings, tmp_path, train=words, seeds=1)
    good, bad = found.settings
    assert bad.failed[0].error == (
        "failed: rjax train: --learning-rate must be a number above 0, got nan"
    )
    (run,) = good.runs
    content = json.loads((Path(run.folder) / "manifest.json").read_text())
    assert content["results"]["test"]["master"]["loss"] == run.loss
    assert content["options"]["learning_rate"] == 0.1 and run.steps == 20
    assert good.bits == "A" and sorted(run.masters) == [0, 10, 20]
    lines: list[str] = []
    sweep(settings, tmp_path, train=words, seeds=1, progress=lines.append)
    assert lines[0] == "1 of 2 runs are there already, and kept"
    assert rjax.repro.sweep is sweep
