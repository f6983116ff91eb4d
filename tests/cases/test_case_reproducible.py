"""The same bits again: in a fresh process, stage by stage, by loop and by scan."""

import functools

import jax
import numpy as np
import pytest
from helpers import (
    BOTH,
    SIX,
    both,
    config,
    digest,
    fresh_process,
    injected,
    make_rig,
    ones,
    pulled,
)

import rjax
from rjax import stages

TWENTY_STEPS = """
import numpy as np
from helpers import *
options = config(optimizer=rjax.optim.adam(weight_decay=0.1), ema=rjax.Ema(decay=0.9),
                 clip=rjax.Clip(norm=0.5))
rig = make_rig(SIX, options)
rng = np.random.default_rng(0)
state = rig.state()
for number in range(20):
    g = {path: rng.normal(size=shape).astype("f4") for path, shape in SIX}
    g = injected(g, "gain", 0, np.nan) if number == 7 else g
    state, [report] = rig.run(state, [g])
    assert bool(report.applied) == (number != 7)
print(digest(state))
"""


def test_two_fresh_processes_give_the_same_bits():
    first, second = (fresh_process(TWENTY_STEPS) for _ in range(2))
    assert len(first) == 64 and first == second


def staged(loss_fn, plan):
    """Return a step that runs every stage as a program of its own."""
    first = [
        functools.partial(stages.forward_backward, loss_fn=loss_fn),
        stages.cast_deep_grads,
        stages.reduce_deep,
        stages.cast_first_grads,
        stages.reduce_first,
        stages.check_and_scale,
        stages.reconcile_stats,
        stages.commit_stats,
        stages.update,
        stages.update_ema,
        stages.cast_to_compute,
        stages.cast_ema_to_compute,
    ]
    programs = [jax.jit(stage) for stage in first]
    start, end = jax.jit(functools.partial(stages.begin, plan)), jax.jit(stages.finish)

    def step(state, batch):
        flow = start(state, batch)
        for program in programs:
            flow = program(flow)
        return end(flow)

    return step


def test_stage_by_stage_under_jit_is_the_composed_step():
    options = config(
        optimizer=rjax.optim.adam(weight_decay=0.1),
        ema=rjax.Ema(decay=0.9),
        clip=rjax.Clip(norm=0.5),
    )
    rig = make_rig(SIX, options)
    step = staged(rjax.stateless_loss(pulled), rig.plan)
    clean = ones(SIX, 0.3)
    bad = injected(clean, "conv2/kernel", 119, np.inf)
    state, other = rig.state(), rig.state()
    for batch in (clean, bad, clean, clean):
        state, [report] = rig.run(state, [batch])
        other, found = step(other, batch)
        assert digest(state) == digest(other)
        for a, b in zip(jax.tree.leaves(report), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("g", [0.3, np.nan])
def test_a_step_does_the_same_on_a_second_run(g):
    rig = make_rig(BOTH, config())
    batches = [both(0.7), both(g), both(0.1)]
    states = [rig.run(rig.state(), batches)[0] for _ in range(2)]
    assert digest(states[0]) == digest(states[1])
