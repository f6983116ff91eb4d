"""Another layout is refused, slot by slot; other hyperparameters are told."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BOTH, both, config, make_rig

import rjax
from rjax import checkpoint
from rjax.checkpoint import CheckpointError

BASE = config(optimizer=rjax.optim.momentum(), scaling=rjax.scaling.halving())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint after a good step, a skip and a good step."""
    made = make_rig(BOTH, BASE)
    batches = [both(1.0), both(np.nan), both(1.0)]
    state, _ = made.run(made.state(), batches)
    path = tmp_path_factory.mktemp("base") / "checkpoints"
    checkpoint.save(path, made.plan, state)
    return path


def changed(**options):
    return config(**{"optimizer": BASE.optimizer, "scaling": BASE.scaling, **options})


def restored(folder, chosen):
    made = make_rig(BOTH, chosen)
    return made, checkpoint.restore(folder, made.plan, made.state())


def test_equal_configurations_have_no_changes(folder):
    _, found = restored(folder, changed())
    assert found.changes == ()
    assert float(found.state.scale) == 4096.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"learning_rate": 0.05}, ("learning_rate: 0.1 -> 0.05",)),
        ({"clip": rjax.Clip(norm=1.0)}, ("clip: null -> {.*1.0.*}",)),
        (
            {"optimizer": rjax.optim.momentum(momentum=0.5, weight_decay=0.1)},
            ("optimizer.momentum: 0.9 -> 0.5", "optimizer.weight_decay: 0.0 -> 0.1"),
        ),
        ({"accumulation_steps": 3}, ("accumulation_steps: 1 -> 3",)),
        (
            {"optimizer": rjax.optim.nesterov()},
            ("optimizer.nesterov: false -> true",),
        ),
    ],
)
def test_changed_hyperparameters_are_told(folder, options, told):
    _, found = restored(folder, changed(**options))
    assert len(found.changes) >= len(told)
    for words in told:
        assert any(re.fullmatch(words, change) for change in found.changes), (
            found.changes
        )


def test_a_new_rate_is_that_of_the_state(folder):
    made, found = restored(folder, changed(learning_rate=0.05))
    assert found.state.learning_rate == jnp.float32(0.05)
    _, [report] = made.run(found.state, [both(1.0)])
    assert report.learning_rate == jnp.float32(0.05)
    assert float(restored(folder, changed())[1].state.learning_rate) == np.float32(0.1)


def test_a_rate_that_was_replaced_by_hand_stays(tmp_path):
    made = make_rig(BOTH, BASE)
    checkpoint.save(tmp_path, made.plan, made.state(learning_rate=0.02))
    _, found = restored(tmp_path, changed())
    assert float(found.state.learning_rate) == np.float32(0.02)


def test_a_schedule_in_the_place_of_a_number(folder):
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    made, found = restored(folder, changed(learning_rate=schedule))
    assert any(change.startswith("learning_rate") for change in found.changes)
    _, [report] = made.run(found.state, [both(1.0)])
    assert float(report.learning_rate) == pytest.approx(0.8)  # after two applied steps


def test_another_rule_of_the_loss_scale_starts_anew(folder):
    rule = rjax.scaling.dynamic(init=256.0, interval=1)
    made, found = restored(folder, changed(scaling=rule))
    assert any(change.startswith("scaling") for change in found.changes)
    assert float(found.state.scale) == 256.0
    state, _ = made.run(found.state, [both(1.0)])
    assert float(state.scale) == 512.0
    assert int(state.skipped) == 1


LAYOUTS = {
    "shape": ((("kernel", (4, 1)), ("bias", (3,))), BASE, "kernel has shape .3, 1., "),
    "more": ((*BOTH, ("head/kernel", (2, 2))), BASE, "head/kernel is not in it"),
    "less": (BOTH[:1], BASE, "bias is in it alone"),
    "moments": (BOTH, changed(optimizer=rjax.optim.adam()), "nu is not in it"),
    "average": (BOTH, changed(ema=rjax.Ema(0.9)), "ema is not in it"),
    "precision": (BOTH, changed(precision="bf16"), "precision"),
    "float32": (BOTH, changed(precision="fp32"), "compute is in it alone|precision"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_is_refused_with_what_differs(folder, name):
    shapes, chosen, words = LAYOUTS[name]
    made = make_rig(shapes, chosen)
    with pytest.raises(CheckpointError, match=words) as error:
        checkpoint.restore(folder, made.plan, made.state())
    text = str(error.value)
    assert text.count(". ") == 1 and "\n" not in text
    assert "another layout than `plan`" in text and "load_weights" in text


def test_a_long_list_of_slots_is_cut(folder):
    shapes = tuple((f"layer{i}/kernel", (2, 2)) for i in range(9))
    made = make_rig(shapes, BASE)
    with pytest.raises(CheckpointError, match="and 6 more"):
        checkpoint.restore(folder, made.plan)


def test_the_order_of_a_tree_does_not_matter(folder):
    made = make_rig(BOTH[::-1], BASE)
    assert checkpoint.restore(folder, made.plan, made.state()).step == 3


def test_a_role_by_rule_is_a_layout(folder):
    def rule(path, leaf):
        return rjax.Param(precision="float32" if path == "kernel" else None)

    made = make_rig(BOTH, BASE, None, rule)
    with pytest.raises(CheckpointError, match="kernel has half True, not False"):
        checkpoint.restore(folder, made.plan, made.state())


def test_other_statistics_are_a_layout(tmp_path):
    def loss_fn(params, stats, batch, key):
        return jnp.sum(params["bias"]), (stats, {})

    made = make_rig(BOTH, BASE, loss_fn, None, (("bn/mean", (3,), 0.0),))
    checkpoint.save(tmp_path, made.plan, made.state())
    other = make_rig(BOTH, BASE, loss_fn, None, (("bn/mean", (4,), 0.0),))
    with pytest.raises(CheckpointError, match="bn/mean has shape .3., not .4."):
        checkpoint.restore(tmp_path, other.plan, other.state())
