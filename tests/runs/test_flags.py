"""`rjax train` sets the flags of XLA that suit it, where it is not too late."""

import pytest

pytest.importorskip("tyro")

import rjax
from rjax.cli import main
from rjax.runs.errors import UsageError


@pytest.mark.parametrize("late", [False, True])
def test_flags_are_set_before_anything_runs(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook JAX has started, and the run goes on without them."""
    done = []

    def flags() -> None:
        done.append("flags")
        if late:
            raise RuntimeError("too late")

    def prepare(options: object) -> None:
        done.append("job")
        raise UsageError("that is enough")

    monkeypatch.setattr(rjax, "set_xla_flags", flags)
    monkeypatch.setattr("rjax.runs.train.prepare_job", prepare)
    assert main(["train", "--no-compile-cache"]) == 2
    assert done == ["flags", "job"]
