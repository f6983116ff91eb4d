"""Only one process writes the folder of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from run_helpers import complaint

from rjax.cli import main
from rjax.runs.errors import UsageError
from rjax.runs.lock import NAME, only_writer

pytestmark = pytest.mark.standard_promotion

HOLD = """
import sys
from pathlib import Path
from rjax.runs.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_until_the_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        sentence = "is being written by another process: wait for its end"
        with pytest.raises(UsageError, match=sentence), only_writer(tmp_path):
            pass
        other.kill()
    with only_writer(tmp_path):  # what was killed holds nothing
        assert (tmp_path / NAME).exists()
    with only_writer(tmp_path):
        pass


def test_a_run_under_way_is_not_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    words = ["--epochs", "1", "--hidden", "4", "--batch-size", "256"]
    assert main(["train", *words, "--out", run]) == 0
    capsys.readouterr()
    with only_writer(Path(run)):
        assert main(["train", "--resume", run, "--epochs", "2"]) == 2
    assert f"{run} is being written by another process" in complaint(capsys)
    assert main(["train", "--resume", run, "--epochs", "2"]) == 0
