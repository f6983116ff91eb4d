"""Batch norm within a step: statistics gated, unbiased, safe from cancellation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import config, make_rig, unmoved

import rjax

NORM = (("scale", (1,)), ("bias", (1,)))
STATS = (("mean", (1,), 0.0), ("var", (1,), 1.0))
STATS_NAMES = ("mean", "var")
EMA = {"average": rjax.Ema(decay=0.9), "copy": rjax.Ema(decay=0.9, batch_stats="copy")}


def norm_loss(params, batch_stats, batch, key):
    """Normalise the batch; `pull` reaches the backward pass and nothing else."""
    del key
    y, new = rjax.nn.BatchNorm().apply(
        {"params": params, "batch_stats": batch_stats},
        batch["x"].reshape(-1, 1),
        use_running_average=False,
        mutable=["batch_stats"],
    )
    pull = jnp.sum(params["bias"] * jnp.mean(batch["pull"]))
    return jnp.mean(y.astype(jnp.float32)) + pull, (new["batch_stats"], y)


def norm_rig(**options):
    options = {"ema": EMA["average"], **options}
    return make_rig(NORM, config(**options), norm_loss, stats=STATS)


def values(*x, pull: float | list[float] = 0.0, dtype="f4"):
    pulls = np.broadcast_to(np.asarray(pull, np.float32), len(x))
    return {"x": jnp.asarray(x, dtype), "pull": pulls}


def running(state):
    return state.batch_stats["mean"].item(), state.batch_stats["var"].item()


@pytest.mark.parametrize(
    ("mode", "dtype"), [("jit", "float16"), ("jit", "float32"), ("eager", "float32")]
)
def test_a_skipped_step_leaves_the_running_statistics(mode, dtype):
    rig = norm_rig()
    good, bad = values(1, 3, dtype=dtype), values(np.inf, 1, dtype=dtype)
    seen, state = [], rig.state()
    for batch in (good, bad, good):
        state, [report] = rig.run(state, [batch], mode)
        seen.append((*running(state), float(state.scale), bool(report.applied)))
    want = [(0.2, 1.1, 8192, True), (0.2, 1.1, 4096, False), (0.38, 1.19, 4096, True)]
    np.testing.assert_allclose(seen, want, rtol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_backward_pass_freezes_the_statistics_too(precision, bad):
    rig = norm_rig(precision=precision)
    state, _ = rig.run(rig.state(), [values(1, 3)])
    before = unmoved(state)
    state, [report] = rig.run(state, [values(5, 9, pull=bad)])
    assert np.isfinite(report.metrics).all() and not report.bad_stats
    assert rig.plan.slots[report.offender].path == "bias"
    assert unmoved(state) == before and state.scale == 4096.0
    np.testing.assert_allclose(running(state), (0.2, 1.1), rtol=1e-6)


def test_evaluation_after_a_skip_is_finite():
    rig = norm_rig()
    state = rig.state({"bias": 0.0})
    state, reports = rig.run(state, [values(np.nan, 1), values(np.inf, 1)])
    assert not reports[0].applied and reports[0].bad_stats

    def predict(params, batch_stats, batch):
        variables = {"params": params, "batch_stats": batch_stats}
        module = rjax.nn.BatchNorm()
        return module.apply(variables, batch, use_running_average=True)

    for which in ("master", "compute", "ema", "ema_compute"):
        evaluate = jax.jit(rjax.make_eval_step(predict, rig.plan, which))
        y = evaluate(state, jnp.array([[1.0], [3.0]]))
        np.testing.assert_allclose(y, [[1.0], [3.0]], rtol=1e-4)


@pytest.mark.parametrize("kind", EMA)
def test_averaged_statistics_share_the_gate(kind):
    rig = norm_rig(ema=EMA[kind])
    state, _ = rig.run(rig.state(), [values(1, 3), values(np.nan, 1), values(1, 3)])
    mean, var = (rjax.get_batch_stats(rig.plan, state, "ema")[k] for k in STATS_NAMES)
    # running mean 0.2, then 0.38; its average 0.02, then 0.9 * 0.02 + 0.1 * 0.38
    want = {"average": (0.056, 0.9 * 1.01 + 0.119), "copy": (0.38, 1.19)}[kind]
    np.testing.assert_allclose((mean.item(), var.item()), want, rtol=1e-5)


def test_the_running_variance_is_unbiased():
    rig = norm_rig()
    state, [report] = rig.run(rig.state({"bias": 0.0}), [values(1, 3)])
    np.testing.assert_allclose(report.metrics.ravel(), [-0.999995, 0.999995], 1e-6)
    np.testing.assert_allclose(running(state), (0.2, 1.1), rtol=1e-6)


def test_one_value_per_channel_is_refused():
    rig = norm_rig()
    with pytest.raises(ValueError, match="at least 2 values per channel, got 1"):
        rig.run(rig.state(), [values(1)])


def test_statistics_flow_through_the_micro_batches_in_order():
    rig = norm_rig(accumulation_steps=2)
    state, [report] = rig.run(rig.state(), [values(1, 3, 5, 9)])
    # means 2 then 7; unbiased variances 2 then 8
    want = (0.9 * 0.2 + 0.7, 0.9 * 1.1 + 0.8)
    np.testing.assert_allclose(running(state), want, rtol=1e-6)
    before = unmoved(state)
    for x in ((np.inf, 3, 1, 3), (1, 3, np.nan, 3)):
        state, [report] = rig.run(state, [values(*x)])
        assert not report.applied and unmoved(state) == before
    state, _ = rig.run(state, [values(1, 3, 5, 9, pull=[np.nan, 0, 0, 0])])
    assert unmoved(state) == before and state.skipped == 3


CONV = (("conv/kernel", (1, 1, 1, 1)), ("bn/scale", (1,)), ("bn/bias", (1,)))
CONV_STATS = (("bn/mean", (1,), 0.0), ("bn/var", (1,), 1.0))


def block_loss(params, batch_stats, batch, key):
    """A 1x1 convolution, batch norm and ReLU."""
    del key
    block = rjax.nn.ConvBNReLU(1, kernel_size=1)
    y, new = block.apply(
        {"params": params, "batch_stats": batch_stats},
        batch,
        train=True,
        mutable=["batch_stats"],
    )
    loss = jnp.mean(y.astype(jnp.float32))
    return loss, (new["batch_stats"], (jnp.min(y), jnp.max(y), loss))


def test_variance_far_below_the_mean_survives_in_a_step():
    # 802,816 values: E[x^2] - E[x]^2 in float32 gives 0.125, or a negative number.
    x = np.where(np.arange(16 * 224 * 224) % 2, 1001.5, 1000.5).astype(np.float16)
    x = x.reshape(16, 224, 224, 1)
    rig = make_rig(CONV, config(), block_loss, stats=CONV_STATS)
    state, [report] = rig.run(rig.state({"bn/bias": 0.0}), [x])
    assert report.applied
    low, high, mean = map(float, report.metrics)
    assert (low, high) == (0.0, 1.0) and mean == pytest.approx(0.5, rel=1e-3)
    stats = {k: float(v.item()) for k, v in state.batch_stats["bn"].items()}
    assert stats["mean"] == pytest.approx(100.1, rel=1e-6)
    # The factor n / (n - 1) is 1.00000125: a half-precision n would be infinite.
    assert stats["var"] == pytest.approx(0.9 + 0.1 * 0.25 * 1.00000125, rel=1e-6)


def test_the_state_keeps_its_structure_and_dtypes():
    rig = norm_rig(ema=EMA["copy"])
    state = rig.state()
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), dataclasses.replace(state))
    state, _ = rig.run(state, [values(1, 3), values(np.nan, 3)])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == kinds
