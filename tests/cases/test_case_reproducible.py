"""The same bits again: in a fresh process, stage by stage, by loop and by scan."""

import numpy as np
import pytest
from helpers import (
    BOTH,
    both,
    config,
    digest,
    fresh_process,
    make_rig,
)

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


@pytest.mark.parametrize("g", [0.3, np.nan])
def test_a_step_does_the_same_on_a_second_run(g):
    rig = make_rig(BOTH, config())
    batches = [both(0.7), both(g), both(0.1)]
    states = [rig.run(rig.state(), batches)[0] for _ in range(2)]
    assert digest(states[0]) == digest(states[1])
