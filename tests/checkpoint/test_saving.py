"""Which checkpoints there are, what is kept with them, and what a save refuses."""

import errno
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.states import assert_same, copied, rig, trained

from rjax import checkpoint
from rjax.checkpoint import CheckpointError, Checkpoints, files, saving


@pytest.fixture(scope="module")
def made():
    return rig("sgd")


def save_steps(saved, made, losses):
    """Save a checkpoint for every step, with its loss."""
    for step, loss in losses.items():
        saved.save(made.state(step=step), data={"at": step}, metrics={"loss": loss})


def test_the_last_ones_and_the_best_stay(made, tmp_path):
    nan = float("nan")
    losses = {1: nan, 2: 0.5, 3: 0.1, 5: 0.4, 8: 0.1, 11: jnp.float32(0.3), 12: nan}
    with Checkpoints(tmp_path, made.plan, keep=2, best="loss", mode="min") as saved:
        save_steps(saved, made, losses)
        assert saved.best() == 3 and saved.steps() == (3, 11, 12)
        assert saved.restore(step=3).metrics == {"loss": 0.1}
        assert saved.restore().metrics == {"loss": None}
    with Checkpoints(tmp_path, made.plan, keep=1, best="loss") as largest:
        largest.save(made.state(step=20))
        assert largest.steps() == (11, 20)  # no metric: the rest of them count


def test_all_stay_without_a_bound(made, tmp_path):
    with Checkpoints(tmp_path, made.plan, keep=None) as saved:
        save_steps(saved, made, dict.fromkeys(range(5), 0.0))
        assert saved.steps() == (0, 1, 2, 3, 4) and saved.best() is None


def test_steps_and_not_clocks_say_what_is_new(made, tmp_path, monkeypatch):
    """The clock goes back between two saves: the later step is still the newest."""
    now = iter(range(10**9, 0, -1000))
    monkeypatch.setattr("time.time", lambda: float(next(now)))
    with Checkpoints(tmp_path, made.plan, keep=2) as saved:
        save_steps(saved, made, dict.fromkeys((9, 10, 100), 0.0))
        assert saved.steps() == (10, 100) and saved.restore().step == 100


def test_a_run_that_went_back_removes_what_it_left_behind(made, tmp_path):
    with Checkpoints(tmp_path, made.plan, keep=3, best="loss", mode="min") as saved:
        save_steps(saved, made, {1: 0.5, 2: 0.4, 3: 0.1})
        save_steps(saved, made, {2: 0.3})
        assert saved.steps() == (1, 2) and saved.best() == 2


def test_the_same_step_is_replaced(made, tmp_path):
    with Checkpoints(tmp_path, made.plan) as saved:
        saved.save(made.state(), data="old")
        saved.save(made.state(learning_rate=0.5), data="new")
        found = saved.restore()
    assert saved.steps() == (0,) and found.data == "new"
    assert float(found.state.learning_rate) == 0.5


def test_data_are_those_of_the_call(made, tmp_path):
    data = {"epoch": 3, "order": [1, 2], "name": "ä", "none": None, "share": 0.1}
    with Checkpoints(tmp_path, made.plan) as saved:
        saved.save(made.state(), data=data)
        data["order"] = "changed"
        found = saved.restore()
    assert found.data == {**data, "order": [1, 2]}
    checkpoint.save(tmp_path / "other", made.plan, made.state())
    assert checkpoint.restore(tmp_path / "other", made.plan).data is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": {"x": np.ones(2)}}, "`data` must be plain data"),
        ({"data": float("inf")}, "`data` must be plain data"),
        ({"data": {"x": object()}}, "`data` must be plain data"),
        ({"metrics": {"loss": "low"}}, "`metrics` entry 'loss' must be a number"),
        ({"metrics": {"loss": np.ones(2)}}, "must be a number"),
        ({"metrics": {"accuracy": 1.0}}, "`metrics` must hold 'loss'.*got accuracy"),
    ],
)
def test_what_a_save_refuses(made, tmp_path, arguments, words):
    with Checkpoints(tmp_path, made.plan, best="loss") as saved:
        with pytest.raises(ValueError, match=words):
            saved.save(made.state(), **arguments)
        assert saved.steps() == ()


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "3"])
def test_how_many_to_keep_is_a_whole_number(made, tmp_path, keep):
    with pytest.raises(ValueError, match="`keep` must be a whole number >= 1"):
        Checkpoints(tmp_path, made.plan, keep=keep)


def test_other_arguments_that_cannot_be(made, tmp_path):
    with pytest.raises(ValueError, match="`mode` must be 'max' or 'min', got 'low'"):
        Checkpoints(tmp_path, made.plan, mode="low")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_save_waits_for_nothing_but_the_one_before(made, tmp_path, monkeypatch):
    gate, original = threading.Event(), files.seal

    def slow(*arguments):
        assert gate.wait(60)
        original(*arguments)

    monkeypatch.setattr(files, "seal", slow)
    with Checkpoints(tmp_path, made.plan) as saved:
        assert not saved.busy
        saved.save(made.state(step=1))
        assert saved.busy and not (tmp_path / "1" / files.SEAL).exists()
        second = threading.Thread(target=saved.save, args=(made.state(step=2),))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it did not wait for the save before"
        gate.set()
        second.join(60)
        assert saved.steps() == (1, 2) and not saved.busy


class FullDisk:
    """Refuses the seal of one step as a full disk does."""

    def __init__(self, step):
        self.step, self.original = str(step), files.seal

    def __call__(self, folder, content):
        if folder.name == self.step:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.original(folder, content)


def test_a_full_disk_is_told_and_leaves_the_others(made, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "seal", FullDisk(2))
    with Checkpoints(tmp_path, made.plan, keep=1) as saved:
        saved.save(made.state(step=1))
        saved.save(made.state(step=2))
        with pytest.raises(OSError, match="No space left") as error:
            saved.save(made.state(step=3))
        assert error.value.errno == errno.ENOSPC
        assert saved.steps() == (1,) and saved.restore(step=1).step == 1
        saved.save(made.state(step=3))  # there is room again
        assert saved.steps() == (3,)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["3", files.MARKER]


def test_room_is_told_by_its_number_whoever_says_so(made, tmp_path, monkeypatch):
    def full(*_):
        raise ValueError("RESOURCE_EXHAUSTED: write failed: No space left on device")

    monkeypatch.setattr(saving, "to_host", full)
    with pytest.raises(OSError, match="No space left") as error:
        checkpoint.save(tmp_path, made.plan, made.state())
    assert error.value.errno == errno.ENOSPC


def test_the_error_of_the_loop_comes_first(made, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "seal", FullDisk(1))
    with (
        pytest.warns(UserWarning, match="The last save failed: .*No space"),
        pytest.raises(ZeroDivisionError),
        Checkpoints(tmp_path, made.plan) as saved,
    ):
        saved.save(made.state(step=1))
        _ = 1 / 0


def test_the_last_save_is_told_at_the_end(made, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "seal", FullDisk(1))
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, made.plan, made.state(step=1))


def test_another_process_finds_them(made, tmp_path):
    """Nothing is kept in memory that is not read back from the folder."""
    state = trained(made, 3)
    kept = copied(state)
    with Checkpoints(tmp_path, made.plan, best="loss") as saved:
        saved.save(state, metrics={"loss": 0.5})
    with Checkpoints(tmp_path, made.plan, keep=1, best="loss") as again:
        assert again.steps() == (3,) and again.best() == 3
        again.save(made.state(step=4), metrics={"loss": 0.1})
        again.save(made.state(step=5), metrics={"loss": 0.2})
        assert again.steps() == (3, 5)
        assert_same(again.restore(made.state(), step=3).state, kept)


def test_what_it_says_of_itself_is_strict_json(made, tmp_path):
    checkpoint.save(tmp_path, made.plan, made.state(), metrics={"loss": np.inf})
    text = (tmp_path / "0" / files.SEAL).read_text()
    content = json.loads(text, parse_constant=pytest.fail)["content"]
    assert content["plan"]["fingerprint"] == made.plan.fingerprint
    assert [slot["path"] for slot in content["plan"]["slots"]] == [
        slot.path for slot in made.plan.slots
    ]
    assert content["config"]["learning_rate"] == 0.1
    json.loads((tmp_path / files.MARKER).read_text())


def test_a_folder_with_other_things_is_left_alone(made, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds thesis.tex and no checkpoints"):
        checkpoint.save(tmp_path, made.plan, made.state())
    assert [x.name for x in tmp_path.iterdir()] == ["thesis.tex"]
