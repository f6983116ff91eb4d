"""A recorded run of `rjax train` can be had again, step by step."""

import json
from pathlib import Path

import pytest

from rjax.cli import main
from rjax.runs.errors import UsageError
from rjax.runs.options import TrainOptions
from rjax.runs.replay import options_of, replay_apart

TRAIN = (
    "train", "--hidden", "8", "--no-plan", "--limit-steps", "14", "--eval-every", "0"
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs whose rates differ in one ULP, with digests every five steps."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", "0.1"), ("b", "0.10000001")):
        words = [*TRAIN, "--out", str(folder / name), "--learning-rate", rate]
        assert main([*words, "--record-every", "5"]) == 0
    return folder


def test_the_options_are_those_of_the_run(runs):
    options = options_of(runs / "a")
    assert isinstance(options, TrainOptions)
    assert options.network.hidden == (8,) and options.loop.limit_steps == 14
    assert options.rate.learning_rate == 0.1 and options.output.record_every == 5


@pytest.mark.slow
def test_a_replay_shows_the_element(runs, capsys):
    assert main(["compare", str(runs / "a"), str(runs / "b"), "--replay", "5"]) == 1
    whole, _, rest = capsys.readouterr().out.partition("\nreplaying")
    assert "State after 5 steps (equal after 0)" in whole and "--replay 5" in whole
    assert "other bits than" not in rest
    first = "first difference in step 0, learning_rate"
    assert f"The replays: numerically equivalent: {first}" in rest
    assert "State after 1 steps (equal after 0)" in rest
    assert "elements differ" in rest and "ULP apart" in rest
    assert "options.learning_rate: 0.1 in A, 0.10000001 in B" in rest


def altered(runs, tmp_path, **options):
    """Return a copy of a run's manifest with other options."""
    found = json.loads((runs / "a" / "manifest.json").read_text())
    found["options"] |= options
    (tmp_path / "manifest.json").write_text(json.dumps(found))
    return tmp_path


def test_options_of_another_version(runs, tmp_path):
    with pytest.raises(
        UsageError, match="a version of rjax with other options .colour"
    ):
        options_of(altered(runs, tmp_path, colour="red"))


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"options": 3}'])
def test_a_manifest_without_options(tmp_path, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match="names no options of `rjax train`: only its"):
        options_of(tmp_path)


def test_what_a_replay_complains_of_is_one_line(runs, tmp_path):
    message = "cannot be replayed: the run has 14 steps, not 15"
    with pytest.raises(UsageError, match=message):
        replay_apart(runs / "a", 10, 15, tmp_path / "out")


@pytest.mark.parametrize("step", ["0", "-3"])
def test_a_step_that_is_none(runs, capsys, step):
    words = ["compare", str(runs / "a"), str(runs / "a"), f"--replay={step}"]
    assert main(words) == 2
    assert "--replay must be a number of steps above 0" in capsys.readouterr().err


def test_records_without_options_are_compared_all_the_same(runs, tmp_path, capsys):
    other = tmp_path / "run"
    (runs / "a" / "record").rename(tmp_path / "record")
    try:
        other.mkdir()
        Path(other / "record").symlink_to(tmp_path / "record")
        assert main(["compare", str(other), str(other), "--replay", "5"]) == 2
        said = capsys.readouterr()
        assert said.out.startswith("bit-identical")
        assert "names no options" in said.err
    finally:
        (tmp_path / "record").rename(runs / "a" / "record")
