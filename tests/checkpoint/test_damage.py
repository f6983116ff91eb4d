"""What is not as it was written is refused, and what lies before it is restored."""

import json
import pickle
import re
import shutil
import warnings
from pathlib import Path

import pytest
from checkpoint.states import assert_same, copied, rig, trained

from rjax import checkpoint
from rjax.checkpoint import CheckpointError, DamagedError, files

SENTENCE = re.compile(r"[^\n]+[^\n.]\.")


@pytest.fixture(scope="module")
def made():
    return rig("adamw")


@pytest.fixture(scope="module")
def original(made, tmp_path_factory):
    """A folder with checkpoints of steps 2 and 4, and both states."""
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    state = trained(made, 2)
    two = copied(state)
    checkpoint.save(folder, made.plan, state)
    four = trained(made, 2, state)
    checkpoint.save(folder, made.plan, four)
    return folder, two, four


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def every_file(checkpoint_folder: Path) -> list[Path]:
    found = [x for x in checkpoint_folder.rglob("*") if x.is_file()]
    assert len(found) > 3
    return sorted(found)


def assert_refused(folder, made, two, match="", kind: type = DamagedError):
    """Step 4 is refused in a sentence; without naming it, step 2 is restored."""
    with pytest.raises(kind, match=match) as error:
        checkpoint.restore(folder, made.plan, step=4)
    assert SENTENCE.fullmatch(str(error.value)), str(error.value)
    with pytest.warns(UserWarning, match="step 2 is restored instead"):
        found = checkpoint.restore(folder, made.plan, made.state())
    assert found.step == 2 and len(found.refused) == 1
    assert_same(found.state, two)


def test_one_flipped_bit_in_any_file(folder, made, original):
    for path in every_file(folder / "4"):
        data = path.read_bytes()
        # At the start, in the middle, at the end: another bit each.
        for at in {0, len(data) // 2, len(data) - 1} if data else ():
            damaged = bytearray(data)
            damaged[at] ^= 1 << (at % 8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError) as error:
                checkpoint.restore(folder, made.plan, step=4)
            assert SENTENCE.fullmatch(str(error.value)), (path, error.value)
        path.write_bytes(data)
    checkpoint.restore(folder, made.plan, step=4)


def test_any_file_cut_short_or_gone_or_grown(folder, made, original):
    for path in every_file(folder / "4"):
        data = path.read_bytes()
        for changed in {data[: len(data) // 2], data[:-2], data + b"\0"} - {data}:
            path.write_bytes(changed)
            with pytest.raises(DamagedError, match="damaged"):
                checkpoint.restore(folder, made.plan, step=4)
        path.unlink()
        with pytest.raises(DamagedError, match="damaged|not written to its end"):
            checkpoint.restore(folder, made.plan, step=4)
        path.write_bytes(data)
    checkpoint.restore(folder, made.plan, step=4)


def test_the_one_before_is_restored(folder, made, original):
    [array] = [x for x in every_file(folder / "4") if "d" in x.parts][:1]
    array.write_bytes(bytes(len(array.read_bytes())))
    name = array.relative_to(folder / "4").as_posix()
    assert_refused(folder, made, original[1], f"4 is damaged: {name} is not as it was")


def test_a_checkpoint_without_its_end(folder, made, original):
    (folder / "4" / files.SEAL).unlink()
    assert_refused(folder, made, original[1], "was not written to its end")


def test_a_seal_that_was_edited(folder, made, original):
    seal = folder / "4" / files.SEAL
    found = json.loads(seal.read_text())
    found["content"]["step"] = 5
    seal.write_text(json.dumps(found))
    assert_refused(folder, made, original[1], f"{files.SEAL} is not as it was")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', "[" * 9999])
def test_a_seal_of_other_contents(folder, made, original, text):
    (folder / "4" / files.SEAL).write_text(text)
    assert_refused(folder, made, original[1], "damaged")


def make_later(checkpoint_folder):
    """Make a checkpoint one of a later format, sealed as such."""
    seal = checkpoint_folder / files.SEAL
    content = json.loads(seal.read_text())["content"] | {"new": 1}
    later = {
        "format": files.FORMAT + 1,
        "sha256": files._sha256_of(files.FORMAT + 1, content),
        "content": content,
    }
    seal.write_text(json.dumps(later))


def test_a_checkpoint_of_a_later_version(folder, made, original):
    make_later(folder / "4")
    words = "format 2, this version of rjax reads 1"
    assert_refused(folder, made, original[1], words, CheckpointError)


def test_a_checkpoint_of_a_later_version_is_not_removed(folder, made, original):
    make_later(folder / "4")
    with checkpoint.Checkpoints(folder, made.plan, keep=1) as saved:
        saved.save(original[1].replace(step=3))
    assert saved.steps() == (3,)
    assert (folder / "4" / files.SEAL).exists()


def test_foreign_things_are_no_checkpoints(folder, made, original, tmp_path):
    shutil.rmtree(folder / "4")
    (folder / "4").mkdir()
    (folder / "4" / "notes.txt").write_text("mine")
    (folder / "007").mkdir()
    (folder / "5").write_text("a file")
    assert_refused(folder, made, original[1], "was not written to its end")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("x")
    for call in (checkpoint.restore, checkpoint.Checkpoints):
        with pytest.raises(CheckpointError, match="no checkpoints of rjax") as error:
            call(tmp_path / "photos", made.plan)
        assert SENTENCE.fullmatch(str(error.value))
    assert [x.name for x in (tmp_path / "photos").iterdir()] == ["1.jpg"]


def test_nothing_to_restore(made, tmp_path):
    checkpoint.Checkpoints(tmp_path / "none", made.plan).close()
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        checkpoint.restore(tmp_path / "none", made.plan)
    with pytest.raises(CheckpointError, match="is not there"):
        checkpoint.restore(tmp_path / "nowhere", made.plan)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.Checkpoints(tmp_path / "file", made.plan)


def test_all_damaged(folder, made):
    for step in (2, 4):
        (folder / str(step) / files.SEAL).write_text("")
    with pytest.raises(DamagedError, match="4 is damaged"):
        checkpoint.restore(folder, made.plan)


def test_no_such_step(folder, made):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3: it has 2, 4"):
        checkpoint.restore(folder, made.plan, step=3)
    assert checkpoint.restore(folder / "2", made.plan).step == 2


def test_what_was_left_half_written_is_removed_by_the_next_save(folder, made, original):
    (folder / "4" / files.SEAL).unlink()
    shutil.copytree(folder / "2" / "state", folder / "3.orbax-checkpoint-tmp" / "state")
    (folder / "9").mkdir()
    with checkpoint.Checkpoints(folder, made.plan, keep=5) as saved:
        assert saved.steps() == (2,)
        saved.save(original[2])
    assert saved.steps() == (2, 4)
    assert sorted(x.name for x in folder.iterdir()) == ["2", "4", files.MARKER]
    assert_same(saved.restore(like=made.state()).state, original[2])


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def test_nothing_is_unpickled(folder, made, original):
    """Pickled data in any file, and a seal that agrees with it, load nothing."""
    bomb = pickle.dumps(Bomb())
    for path in every_file(folder / "4"):
        if path.name == files.SEAL:
            continue
        data = path.read_bytes()
        path.write_bytes(bomb)
        content = json.loads((folder / "4" / files.SEAL).read_text())["content"]
        files.seal(folder / "4", content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = checkpoint.restore(folder, made.plan, step=4)
            except DamagedError as error:
                assert "\n" not in str(error)
            else:  # a file that Orbax does not need
                assert_same(found.state, original[2])
        path.write_bytes(data)
        files.seal(folder / "4", content)
    checkpoint.restore(folder, made.plan, step=4)
