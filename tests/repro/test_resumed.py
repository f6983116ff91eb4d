"""A record taken up again is that of an unbroken run, byte for byte, or refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, both, config, make_rig

import rjax
from rjax import repro
from rjax.repro import RecordError
from rjax.repro import format as on_disk

CONFIG = config(optimizer=rjax.optim.momentum())


@pytest.fixture(scope="module")
def made():
    rig = make_rig(BOTH, CONFIG)
    step = rjax.make_train_step(
        rjax.stateless_loss(lambda p, x: jnp.sum(p["bias"] * x["bias"])),
        rig.plan,
        digest_grads=True,
    )
    return rig, jax.jit(step)


def steps(made, state, recording, count, grads):
    """Take steps and record them; return the last state."""
    rig, with_grads = made
    jitted = with_grads if grads else rig.jitted
    for i in range(int(state.step), int(state.step) + count):
        state, report = jitted(state, both(np.nan if i == 4 else 0.1 * i))
        recording.add(state, report)
    return state


def contents(folder):
    inner = folder / on_disk.FOLDER
    return {
        str(x.relative_to(inner)): x.read_bytes()
        for x in inner.rglob("*")
        if x.is_file() and x.suffix != ".npz"
    }


def broken_off(made, folder, at, beyond, **options):
    """Record beyond a step, and return the state at it."""
    grads = options.pop("grads", False)
    rig, _ = made
    state = rig.state()
    with repro.record(folder, rig.plan, state, **options) as recording:
        state = steps(made, state, recording, at, grads)
        kept = jax.tree.map(jnp.copy, state)
        steps(made, state, recording, beyond, grads)
    return kept


@pytest.mark.parametrize("at", [1, 5, 10])
@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("every", [0, 3, 5])
def test_it_is_the_record_of_an_unbroken_run(made, tmp_path, every, grads, at):
    options = {"every": every, "grads": grads}
    broken_off(made, tmp_path / "whole", 14, 0, **options)
    state = broken_off(made, tmp_path / "run", at, 3, **options)
    plan = made[0].plan
    with repro.record(
        tmp_path / "run", plan, state, every=every, resume=True
    ) as recording:
        steps(made, state, recording, 14 - at, grads)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert repro.compare(tmp_path / "run", tmp_path / "whole").verdict in (
        ("bit-identical",) if every else ("incomplete",)
    )


def test_snapshots_of_later_steps_go(made, tmp_path):
    state = broken_off(made, tmp_path / "run", 4, 5, every=2, snapshot_every=2)
    names = lambda: sorted(  # noqa: E731
        int(x.stem) for x in (tmp_path / "run").rglob("*.npz")
    )
    assert names() == [0, 2, 4, 6, 8]
    with repro.record(
        tmp_path / "run", made[0].plan, state, every=2, snapshot_every=2, resume=True
    ) as recording:
        assert names() == [0, 2, 4]
        steps(made, state, recording, 2, False)
    assert names() == [0, 2, 4, 6]


def test_a_row_that_was_cut_off_is_written_anew(made, tmp_path):
    broken_off(made, tmp_path / "whole", 9, 0, every=2)
    state = broken_off(made, tmp_path / "run", 6, 3, every=2)
    path = tmp_path / "run" / on_disk.FOLDER / on_disk.STEPS
    path.write_bytes(path.read_bytes()[:-7])
    plan = made[0].plan
    with repro.record(tmp_path / "run", plan, state, every=2, resume=True) as recording:
        steps(made, state, recording, 3, False)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_from_its_first_step_it_begins_anew(made, tmp_path):
    broken_off(made, tmp_path / "whole", 3, 0)
    broken_off(made, tmp_path / "run", 0, 7, every=2)
    state = made[0].state()
    with repro.record(tmp_path / "run", made[0].plan, state, resume=True) as recording:
        steps(made, state, recording, 3, False)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_without_a_record_it_begins_with_the_state(made, tmp_path):
    state = broken_off(made, tmp_path / "other", 5, 0)
    with repro.record(tmp_path / "run", made[0].plan, state, resume=True) as recording:
        steps(made, state, recording, 2, False)
    opened = repro.compare(tmp_path / "run", tmp_path / "run")
    assert opened.compared[0] == 2


def test_a_record_that_began_later_goes_on(made, tmp_path):
    """Its first digest is of the state it began with, between two turns of `every`."""
    plan = made[0].plan
    state = broken_off(made, tmp_path / "other", 7, 0)
    for name in ("whole", "run"):
        with repro.record(tmp_path / name, plan, state, every=10) as recording:
            after = steps(made, jax.tree.map(jnp.copy, state), recording, 2, False)
            if name == "whole":
                steps(made, after, recording, 3, False)
    with repro.record(tmp_path / "run", plan, after, every=10, resume=True) as again:
        steps(made, after, again, 3, False)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def damaged(inner, what):
    if what == "every":
        layout = json.loads((inner / on_disk.LAYOUT).read_text())
        (inner / on_disk.LAYOUT).write_text(json.dumps({**layout, "every": 4}))
    elif what == "plan":
        layout = json.loads((inner / on_disk.LAYOUT).read_text())
        (inner / on_disk.LAYOUT).write_text(json.dumps({**layout, "plan": "other"}))
    elif what == "layout":
        (inner / on_disk.LAYOUT).unlink()
    elif what == "first":
        path = inner / on_disk.STEPS
        row = on_disk.read_layout(inner).step_row.itemsize
        path.write_bytes(path.read_bytes()[7 * row :])
    else:
        path = inner / what
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 3])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (on_disk.STEPS, "ends before step 6, from which the run is to go on"),
        (on_disk.DIGESTS, "ends before step 6"),
        ("layout", "ends before step 6"),
        ("every", "digests every 4 steps, not 2; go on with `every=4`"),
        ("plan", "a record of another plan"),
        ("first", "begins with step 7, after the 6"),
    ],
)
def test_a_record_that_cannot_go_on_is_refused_and_kept(made, tmp_path, what, words):
    state = broken_off(made, tmp_path / "run", 6, 5, every=2)
    damaged(tmp_path / "run" / on_disk.FOLDER, what)
    before = contents(tmp_path / "run")
    with pytest.raises(RecordError, match=words):
        repro.record(tmp_path / "run", made[0].plan, state, every=2, resume=True)
    assert contents(tmp_path / "run") == before


def test_other_numbers_than_before_are_refused(made, tmp_path):
    """A step with digests of gradients, after one without."""
    state = broken_off(made, tmp_path / "run", 6, 0, every=2)
    plan = made[0].plan
    with repro.record(tmp_path / "run", plan, state, every=2, resume=True) as recording:
        _, report = made[1](state, both(1.0))
        with pytest.raises(ValueError, match="numbers of those recorded before"):
            recording.add(state, report)


def test_only_when_asked_for(made, tmp_path):
    state = broken_off(made, tmp_path / "run", 6, 0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(RecordError, match="holds a record already"):
        repro.record(tmp_path / "copy", made[0].plan, state)
