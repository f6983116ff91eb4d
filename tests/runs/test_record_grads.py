"""`rjax train --record-grads`: more in the record, nothing else changes."""

from pathlib import Path

import pytest
from run_helpers import complaint

from rjax.cli import main
from rjax.repro import compare
from rjax.repro import format as on_disk
from rjax.runs.replay import options_of

TRAIN = (
    "train", "--hidden", "8", "--no-plan", "--limit-steps", "6", "--eval-every", "0",
    "--record-every", "2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_gradients_are_recorded_and_change_nothing(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for run, words in zip(
        runs, ([], ["--record-grads"], ["--record-grads", "--seed=1"]), strict=True
    ):
        assert main([*TRAIN, "--out", str(run), *words]) == 0
    assert not (runs[0] / on_disk.FOLDER / on_disk.GRADIENTS).exists()
    assert options_of(runs[1]).output.record_grads
    found = compare(runs[0], runs[1])
    assert found.verdict == "bit-identical" and not found.causes.found
    assert (found.a.gradients, found.b.gradients) == (0, 3)
    lines = [(run / "metrics.jsonl").read_text() for run in runs[:2]]
    assert lines[0] == lines[1]
    found = compare(runs[1], runs[2])
    assert found.first is found.state and found.gradients.step == 0
    assert "(the first in common): 4 of 4 differ" in found.text()


def test_gradients_need_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN[:-1], "0", "--record-grads"]) == 2
    assert "--record-grads needs a record: give --record-every" in complaint(capsys)
