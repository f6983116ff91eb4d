"""A checkpoint does not know how many devices it came from."""

import pytest
from helpers import bits
from parallel.rigs import (
    EIGHT,
    LARS,
    ONE,
    SHARDED,
    THREE,
    Over,
    assert_replicated,
    network,
    pull,
    rows,
)

from rjax import checkpoint
from rjax.checkpoint import export_weights, load_weights
from rjax.parallel import gather
from rjax.parallel.placement import SHARDED as CUT
from rjax.trees import flatten

PLACES = (ONE, EIGHT, SHARDED, THREE, Over(4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state of one device, and a folder with the checkpoint of every layout of it."""
    rig = pull(ONE, LARS)
    state, _ = rig.run(rows(0), rows(1))
    folder = tmp_path_factory.mktemp("checkpoints")
    for i, over in enumerate(PLACES):
        other = pull(over, LARS)
        placed = state if over is ONE else other.step.place(state)
        checkpoint.save(folder / str(i), other.plan, placed)
    return bits(state), folder


@pytest.mark.parametrize("to", PLACES, ids=str)
@pytest.mark.parametrize("source", range(len(PLACES)))
def test_from_any_devices_to_any(saved, source, to):
    right, folder = saved
    rig = pull(to, LARS)
    like = rig.state()
    found = checkpoint.restore(folder / str(source), rig.plan, like).state
    for (name, x), (_, y) in zip(flatten(found)[0], flatten(like)[0], strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), name
        if to.sharded and name in CUT:
            assert not x.sharding.is_fully_replicated
    if to is not ONE:
        assert_replicated(found)
        found = gather(rig.plan, found)
    assert bits(found) == right


@pytest.mark.parametrize("over", [EIGHT, SHARDED], ids=str)
def test_the_run_goes_on_as_if_unbroken(tmp_path, over):
    rig = pull(over, LARS)
    state, _ = rig.run(rows(0), rows(1))
    checkpoint.save(tmp_path, rig.plan, state)
    right, _ = rig.jitted(state, rows(2))
    programs = rig.jitted._cache_size()
    found = checkpoint.restore(tmp_path, rig.plan, rig.state()).state
    again, _ = rig.jitted(found, rows(2))
    assert bits(again) == bits(right)
    assert rig.jitted._cache_size() == programs, "the step was compiled anew"


def test_states_of_explicit_axes(tmp_path):
    rig = pull(Over(8, explicit=True), LARS)
    state = rig.state()
    checkpoint.save(tmp_path, rig.plan, state)
    found = checkpoint.restore(tmp_path, rig.plan, state).state
    assert bits(found) == bits(state)
    rig.jitted(found, rows(0))


def test_weights_of_ranges_are_whole(tmp_path):
    one, cut = pull(ONE, LARS), pull(SHARDED, LARS)
    state, _ = one.run(rows(0))
    placed = cut.step.place(state)
    for which in ("master", "ema"):
        export_weights(tmp_path / "one.npz", one.plan, state, which)
        export_weights(tmp_path / "cut.npz", cut.plan, placed, which)
        assert bits(load_weights(tmp_path / "one.npz")) == bits(
            load_weights(tmp_path / "cut.npz")
        )


def test_statistics_of_a_network(tmp_path):
    rig = network(SHARDED, LARS)
    state = rig.state()
    checkpoint.save(tmp_path, rig.plan, state)
    found = checkpoint.restore(tmp_path, rig.plan, state).state
    assert bits(found) == bits(state)
