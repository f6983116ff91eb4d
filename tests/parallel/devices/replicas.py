"""What devices see differently, and what all of them do then: the same."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BAD, BOTH, bits, config, unmoved
from parallel.rigs import (
    EIGHT,
    LARS,
    NESTEROV,
    ROWS,
    SHARDED,
    THREE,
    Over,
    assert_replicated,
    noted,
    pull,
    rows,
)

import rjax
from rjax.parallel import data_parallel

RIGS = [(Over(4), NESTEROV), (EIGHT, LARS), (SHARDED, LARS), (THREE, LARS)]
PULLED = config()
# Micro-batches that each device makes.
STEPS = {EIGHT: 3, SHARDED: 1}


@pytest.mark.parametrize(("over", "chosen"), RIGS, ids=range(len(RIGS)))
def test_one_bad_gradient_on_one_device_skips_on_all(over, chosen):
    rig = pull(over, chosen)
    state, _ = rig.run(rows(0))
    for i, slot in enumerate(rig.plan.slots):
        batch = rows(1)
        at = (0, slot.size - 1)[i % 2]
        batch[slot.path][13].reshape(-1)[at] = BAD[i % 3]
        before, scale = unmoved(state), float(state.scale)
        state, report = rig.jitted(state, batch)
        assert not report.applied and np.isnan(report.grad_norm)
        assert report.bad_slots.tolist() == [j == i for j in range(len(rig.plan.slots))]
        assert int(report.offender) == i and not report.bad_stats
        assert unmoved(state) == before
        assert float(state.scale) == scale / 2
        assert_replicated((state, report))
    state, report = rig.jitted(state, rows(2))
    assert report.applied and int(state.skipped) == len(rig.plan.slots)
    assert int(state.consecutive_skips) == 0


@pytest.mark.parametrize("over", [EIGHT, SHARDED], ids=str)
def test_statistics_that_are_bad_on_one_device_skip_on_all(over: Over):
    rig = noted(over, STEPS[over])
    state, _ = rig.run(np.ones(ROWS, np.float32))
    before = unmoved(state)
    batch = np.ones(ROWS, np.float32)
    batch[11] = np.nan  # the last that device 3 has
    state, report = rig.jitted(state, batch)
    assert not report.applied and report.bad_stats
    assert unmoved(state) == before and float(state.scale) == 4096.0
    assert_replicated((state, report))


@pytest.mark.parametrize("over", [EIGHT, SHARDED], ids=str)
def test_statistics_and_metrics_become_those_of_all(over: Over):
    k = STEPS[over]
    rig = noted(over, k)
    batch = np.linspace(0.0, 1.0, ROWS, dtype=np.float32)
    state, [_, report] = rig.run(batch, batch)
    # [devices, micro-batches, examples]: each device cuts its own share.
    shares = batch.reshape(8, k, 3 // k)
    key = rig.state().key
    keys = [
        [jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 1), i), device)
         for i in range(k)]
        for device in range(8)
    ]  # fmt: skip
    draws = {float(jax.random.uniform(each)) for row in keys for each in row}
    found, last = report.metrics, shares[:, -1, -1].mean()
    assert len(draws) == 8 * k
    assert np.isclose(found["draw"], np.mean(list(draws)), rtol=1e-6)
    assert np.isclose(found["mean"], 0.5, rtol=1e-6)
    halves = shares.mean(2).astype(np.float16)
    assert np.isclose(found["half"], np.mean(halves, dtype=np.float32), rtol=1e-6)
    assert found["half"].dtype == found["above"].dtype == jnp.float32
    assert int(found["examples"]) == ROWS and found["examples"].dtype == jnp.int32
    assert np.isclose(found["above"], np.mean(shares[..., 0] > 0.5), rtol=1e-6)
    if k == 1:
        assert bits({"": found["key"]}) == bits({"": keys[0][0]})
    assert np.isclose(state.batch_stats["last"], last, rtol=1e-6)
    assert int(state.batch_stats["seen"]) == 2 * ROWS / 8
    assert np.isclose(state.ema_batch_stats["last"], 0.19 * last, rtol=1e-6)
    assert bits({"": state.key}) == bits({"": key})
    assert_replicated((state, report))


@pytest.mark.parametrize("sharded", [False, True])
class TestHalfGradientsAreAveragedInFloat32:
    def both(self, g, n):
        """Return rows that pull the kernel alone."""
        g = np.broadcast_to(np.asarray(g, np.float32).reshape(-1, 1, 1), (n, 3, 1))
        return {"kernel": g, "bias": np.zeros((n, 3), np.float32)}

    def test_two_of_40000(self, sharded):
        rig = pull(Over(2, sharded), PULLED, BOTH)
        state, [report] = rig.run(self.both(40000.0 / 8192.0, 2))
        assert report.applied and float(state.scale) == 8192.0
        kernel = rjax.get_params(rig.plan, state)["kernel"]
        wanted = np.float32(1.0) - np.float32(0.1) * np.float32(4.8828125)
        np.testing.assert_allclose(kernel, wanted, rtol=2.0**-23)

    def test_one_that_overflows_before_the_mean(self, sharded):
        rig = pull(Over(2, sharded), PULLED, BOTH)
        state, [report] = rig.run(self.both([70000.0 / 8192.0, 0.0], 2))
        assert not report.applied and float(state.scale) == 4096.0
        assert report.bad_slots.tolist() == [False, True]

    def test_the_smallest(self, sharded):
        n = 2 if sharded else 8
        rig = pull(Over(n, sharded), PULLED, BOTH)
        _, [report] = rig.run(self.both(2.0**-24 / 8192.0, n))
        assert report.applied
        np.testing.assert_allclose(report.grad_norm, 3**0.5 * 2.0**-37, rtol=1e-6)


class Norms(nn.Module):
    """Both norms of `rjax.nn`, on columns of their own."""

    axes: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        for i in range(2):
            how: dict = {"use_running_average": not train}
            if i:
                how["kernel"] = jnp.ones((1, 1), x.dtype)
            norm = rjax.nn.BatchNorm(axis_name=self.axes)
            y = norm(x[:, i : i + 1], **how)
        return y


@pytest.mark.parametrize(
    ("axes", "statistics", "var"),
    [
        (None, "global", 8.0),
        (("data",), "global", 8.0),
        (("data",), "device", 8.0),
        (None, "device", 10.0),
        ((), "global", 10.0),
    ],
)
def test_batch_norms_see_the_whole_batch(axes, statistics, var):
    model = Norms(axes)
    batch = np.repeat(np.array([[1], [3], [1], [7]], np.float32), 2, axis=1)
    stats = jax.eval_shape(model.init, jax.random.key(0), batch)["batch_stats"]
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), stats)
    one = {"scale": np.ones(1, np.float32), "bias": np.zeros(1, np.float32)}
    params = {name: one for name in stats}
    plan = rjax.make_plan(params, config(precision="fp32"), batch_stats=stats)
    loss_fn = rjax.linen_loss(model, lambda y, t: jnp.mean(jnp.square(y - t)))
    how = {"batch_statistics": statistics}
    step = data_parallel(loss_fn, plan, Over(2).mesh(), **how)
    state = step.place(rjax.init_state(plan, params, stats))
    state, report = jax.jit(step)(state, (batch, batch[:, :1]))
    for norm in state.batch_stats.values():
        np.testing.assert_allclose(norm["mean"], 0.3, rtol=1e-6)
        np.testing.assert_allclose(norm["var"], 0.1 * var, rtol=1e-6)
    assert_replicated((state, report))
