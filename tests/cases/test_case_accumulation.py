"""Micro-batches: a mean in float32, one check, one halving, no trace of a bad set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BAD, BOTH, MODES, PRECISIONS, config, make_rig, unmoved

import rjax
from rjax.trees import flatten


def mean_pull(params, batch_stats, batch, key):
    """Pull by the mean over the batch; report the first pull, a count and a draw."""
    g = jnp.mean(batch["g"])
    views = (leaf.astype(jnp.float32) for _, leaf in flatten(params)[0])
    loss = sum((jnp.sum(view * g) for view in views), start=jnp.zeros((), jnp.float32))
    metrics = {
        "first": batch["g"][0],
        "examples": jnp.int32(batch["g"].size),
        "draw": jax.random.uniform(key),
    }
    return loss, (batch_stats, metrics)


def rig_of(k=4, **options):
    return make_rig(BOTH, config(accumulation_steps=k, **options), mean_pull)


def pulls(*g):
    return {"g": np.asarray(g, np.float32)}


@pytest.mark.parametrize(
    ("mode", "precision"), [("eager", "fp16"), *(("jit", p) for p in PRECISIONS)]
)
def test_gradients_are_averaged_over_micro_batches(mode, precision):
    rig = rig_of(precision=precision)
    state, [report] = rig.run(rig.state(), [pulls(1, 2, 3, 4)], mode)
    np.testing.assert_allclose(rig.both(state), 0.75, rtol=1e-6)
    assert report.loss == 15.0
    assert report.grad_norm == pytest.approx(2.5 * 6**0.5, rel=1e-6)
    assert (state.step, state.applied_steps) == (1, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", range(4))
def test_a_bad_micro_batch_skips_the_set_and_leaves_no_trace(precision, where):
    rig = rig_of(precision=precision)
    for bad in BAD:
        state = rig.state()
        before = unmoved(state)
        g = [1.0, 2.0, 3.0, 4.0]
        g[where] = bad
        state, [report] = rig.run(state, [pulls(*g)])
        assert not report.applied and state.scale == 4096.0
        assert unmoved(state) == before
        assert (state.step, state.skipped) == (1, 1)
        state, [report] = rig.run(state, [pulls(1, 2, 3, 4)])
        assert report.applied and state.scale == 4096.0
        np.testing.assert_allclose(rig.both(state), 0.75, rtol=1e-6)


def test_opposite_infinities_do_not_cancel():
    state, [report] = rig_of().run(rig_of().state(), [pulls(np.inf, -np.inf, 1, 1)])
    assert not report.applied and report.bad_slots.all()


@pytest.mark.parametrize("mode", MODES)
def test_the_sum_is_in_float32(mode):
    # Scaled, each is 20000: the sum of 80000 is infinite in fp16.
    rig = rig_of()
    state, [report] = rig.run(rig.state(), [pulls(*[20000 / 8192] * 4)], mode)
    assert report.applied and state.scale == 8192.0
    np.testing.assert_allclose(rig.both(state), 0.755859, rtol=1e-6)


def test_small_gradients_are_not_lost_beside_a_large_one():
    # Scaled: 32768 and three times 8; in fp16 the sum would round to 32768.
    rig = rig_of()
    g = np.asarray([32768, 8, 8, 8]) / 8192
    state, _ = rig.run(rig.state(learning_rate=1.0), [pulls(*g)])
    np.testing.assert_array_equal(rig.both(state), 1 - g.sum() / 4)


def test_one_micro_batch_that_overflows_in_half_precision():
    rig = rig_of()
    state, [report] = rig.run(rig.state(), [pulls(1, 9, 1, 1)])
    named = [rig.plan.slots[i].path for i in np.flatnonzero(report.bad_slots)]
    assert named == ["kernel"] and state.scale == 4096.0
    state, [report] = rig.run(state, [pulls(1, 9, 1, 1)])
    assert report.applied
    np.testing.assert_allclose(rig.both(state), 0.7, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_the_number_of_micro_batches_does_not_change_the_step(k):
    rig = rig_of(k)
    state, [report] = rig.run(rig.state(), [pulls(1, 2, 3, 6, 0, -1, 4, 1)])
    np.testing.assert_allclose(rig.both(state), 0.8, rtol=1e-6)
    assert report.loss == 12.0
    assert report.metrics["examples"] == 8


def test_metrics_and_random_numbers_of_each_micro_batch():
    rig = rig_of()
    state = rig.state()
    step_key = jax.random.fold_in(state.key, 0)
    draws = [jax.random.uniform(jax.random.fold_in(step_key, i)) for i in range(4)]
    assert len({float(x) for x in draws}) == 4
    _, [report] = rig.run(state, [pulls(1, 2, 3, 4)])
    assert report.metrics["first"] == 2.5
    assert report.metrics["draw"] == pytest.approx(np.mean(draws), rel=1e-6)


def test_clip_and_ema_see_the_mean():
    rig = rig_of(clip=rjax.Clip(value=1.0), ema=rjax.Ema(decay=0.9))
    state, _ = rig.run(rig.state(), [pulls(4, -2, 0, 0)])
    np.testing.assert_allclose(rig.both(state), 0.95, rtol=1e-6)
    np.testing.assert_allclose(rig.both(state, "ema"), 0.995, rtol=1e-6)
    state, _ = rig.run(rig.state(), [pulls(4, 4, 0, 0)])
    np.testing.assert_allclose(rig.both(state), 0.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pulls(1, 2, 3), "'g' must have a leading size divisible by .*=4, got 3"),
        ({"g": np.float32(1)}, "got no leading axis"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, message):
    rig = rig_of()
    with pytest.raises(ValueError, match=message):
        rig.run(rig.state(), [batch])


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_micro_batches_that_is_refused(steps):
    with pytest.raises(ValueError, match="`accumulation_steps` must be a whole number"):
        rjax.Config(accumulation_steps=steps)
