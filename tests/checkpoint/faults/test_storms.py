"""Overflow storms over thousands of steps: nothing compiles, grows or loses count."""

import gc
import itertools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.states import assert_same
from helpers import BOTH, both, config, make_rig

import rjax
from rjax.checkpoint import Checkpoints

CONFIG = config(
    optimizer=rjax.optim.adamw(weight_decay=0.01),
    scaling=rjax.scaling.dynamic(init=2.0**20, interval=5),
    learning_rate=1e-3,
    ema=rjax.Ema(0.99),
)
GOOD, INF, NAN = both(0.5), both(np.inf), both(np.nan)


def storms(seed):
    """Yield, for ever, whether a step is good: calm, and storms of bad ones."""
    draw = random.Random(seed)
    while True:
        yield from itertools.repeat(True, draw.randrange(1, 60))
        # Each may be good in a storm: the scale falls, and rises again.
        yield from (draw.random() < 0.2 for _ in range(draw.randrange(1, 25)))


class Counted:
    """What the counters of a state have to be, by a loop in Python."""

    def __init__(self):
        self.steps = self.applied = self.skipped = self.run = self.calm = 0
        self.scale = 2.0**20

    def take(self, good):
        """Count a step of a finite or a bad batch; return whether it is applied."""
        # A gradient of 0.5 in float16, scaled.
        good = good and 0.5 * self.scale < 65520.0
        self.steps += 1
        self.applied += good
        self.skipped += not good
        self.run = 0 if good else self.run + 1
        self.calm = self.calm + 1 if good else 0
        if not good:
            self.scale = max(self.scale * 0.5, 1.0)
        elif self.calm == 5:
            self.scale, self.calm = min(self.scale * 2.0, 2.0**24), 0
        return good

    def check(self, state):
        assert int(state.step) == self.steps
        assert int(state.applied_steps) == int(state.results.count) == self.applied
        assert int(state.skipped) == self.skipped
        assert int(state.consecutive_skips) == self.run
        assert float(state.scale) == self.scale


def resident():
    """Return the bytes of memory that this process occupies."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return 1024 * int(line.split()[1])


def soak(folder, steps, every, compilations):
    """Train through storms, saving; return bytes and live arrays at every save."""
    made, weather, counted = make_rig(BOTH, CONFIG), storms(0), Counted()
    draw, seen = random.Random(1), []
    state = made.state()
    with Checkpoints(folder, made.plan, keep=2) as saved:
        for i in range(1, steps + 1):
            good = next(weather)
            batch = GOOD if good else draw.choice((INF, NAN))
            state, report = made.jitted(state, batch)
            good = counted.take(good)
            if i % every == 0:
                assert bool(report.applied) == good
                counted.check(state)
                saved.save(state, data={"step": i})
                saved.wait()
                jax.block_until_ready((state, report))
                gc.collect()
                seen.append((resident(), len(jax.live_arrays()), len(compilations)))
        found = saved.restore(state)
        assert_same(found.state, state)
        assert saved.steps() == (steps - every, steps)
    assert np.isfinite(np.asarray(state.master)).all()
    assert made.jitted._cache_size() == 1
    return seen, counted


def assert_flat(arrays):
    """No array is left behind by a save; some are still on their way out at times."""
    half = len(arrays) // 2
    assert min(arrays[half:]) == min(arrays[1:half])


def test_a_storm(tmp_path, compilations):
    seen, counted = soak(tmp_path, 400, 50, compilations)
    assert counted.skipped > 60 and counted.run < counted.steps
    _, arrays, compiled = zip(*seen, strict=True)
    assert_flat(arrays)
    assert len(set(compiled[1:])) == 1, "something was compiled anew"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_twenty_thousand_steps(tmp_path, compilations):
    seen, counted = soak(tmp_path, 20_000, 500, compilations)
    assert counted.skipped > 3000
    memory, arrays, compiled = zip(*seen, strict=True)
    assert_flat(arrays)
    assert len(set(compiled[1:])) == 1, "something was compiled anew"
    grown = memory[-1] - memory[len(memory) // 4]
    assert grown < 10e6, f"memory grew by {grown / 1e6:.1f} MB in 15,000 steps"
    print(f"{counted.skipped} of 20,000 skipped, memory grew by {grown / 1e6:.2f} MB")


def test_storms_in_one_program_are_counted_alike(tmp_path):
    """A checkpoint between two scans: the second goes on as one scan would."""
    made, weather = make_rig(BOTH, CONFIG), storms(3)
    good = [next(weather) for _ in range(200)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *(GOOD if g else INF for g in good))
    right, _ = made.scan(made.state(), stacked)
    first, second = (jax.tree.map(lambda x, s=s: x[s], stacked)
                     for s in (slice(100), slice(100, 200)))  # fmt: skip
    state, _ = made.scan(made.state(), first)
    rjax.checkpoint.save(tmp_path, made.plan, state)
    found = rjax.checkpoint.restore(tmp_path, made.plan, made.state()).state
    state, _ = made.scan(found, second)
    assert_same(state, right)
    counted = Counted()
    for each in good:
        counted.take(each)
    counted.check(state)
    assert jnp.isfinite(state.master).all()
