"""The loss scale: where it is applied, how it moves, what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BAD, BOTH, MODES, PRECISIONS, both, config, make_rig

import rjax
from rjax import scaling

HALF = {"fp16": jnp.float16, "bf16": jnp.bfloat16}


def half_loss(path):
    """Return a loss that sums one parameter and is returned in half precision."""

    def loss(params, batch):
        total = jnp.sum(params[path].astype(jnp.float32)).astype(batch["kind"].dtype)
        return total, jnp.zeros((), total.dtype)

    return rjax.stateless_loss(loss)


HALF_LOSS = {path: half_loss(path) for path in ("kernel", "bias")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", ["kernel", "bias"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_scaled_loss_is_formed_in_float32(mode, path, precision):
    # 8 * 8192 = 65536 is infinite in fp16; the scaled gradient, 8192, is not.
    rig = make_rig(BOTH, config(precision=precision), HALF_LOSS[path])
    batch = {"kind": jnp.zeros((), HALF[precision])}
    state = rig.state({"kernel": 8 / 3, "bias": 8 / 3}, learning_rate=0.5)
    state, [report] = rig.run(state, [batch], mode)
    assert report.metrics.dtype == HALF[precision]
    assert report.loss.dtype == report.scale.dtype == jnp.float32
    assert report.applied and report.loss == 8.0
    assert state.scale == 8192.0 and state.scale.dtype == jnp.float32
    np.testing.assert_allclose(rig.get(state, path), 8 / 3 - 0.5, rtol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", BAD)
def test_the_scale_falls_to_its_floor_and_training_goes_on(precision, bad):
    rig = make_rig(BOTH, config(precision=precision))
    state, scales = rig.state(learning_rate=0.5), {}
    for n in range(1, 21):
        state, [report] = rig.run(state, [both(bad)])
        scales[n] = float(state.scale)
        assert (rig.both(state) == 1.0).all()
        assert not report.applied and report.skipped == n
        assert report.scale == scales.get(n - 1, 8192.0)
    assert [scales[n] for n in (1, 3, 12, 13, 14, 20)] == [4096, 1024, 2, 1, 1, 1]
    assert state.consecutive_skips == state.skipped == 20

    state, [report] = rig.run(state, [both(1.0)])
    assert (rig.both(state) == 0.5).all()
    assert report.applied and report.scale == 1.0
    assert (report.skipped, report.consecutive_skips) == (20, 0)
    assert (state.step, state.applied_steps) == (21, 1)


def test_an_overflow_no_scale_can_help_is_seen_by_the_user():
    rig = make_rig(BOTH, config())
    state, reports = rig.run(rig.state(), [both(70000.0)] * 20)
    assert state.scale == 1.0 and (rig.both(state) == 1.0).all()
    assert [bool(r.applied) for r in reports] == [False] * 20
    assert reports[-1].as_dict()["skipped"] == 20
    rjax.check(reports[-1], rig.plan, state)
    with pytest.raises(rjax.NonFiniteGradientsError, match="'kernel'"):
        rjax.check(reports[-1], rig.plan, state, max_consecutive_skips=20)


@pytest.mark.parametrize("mode", MODES)
def test_one_halving_lets_the_gradient_fit(mode):
    # 9 * 8192 is infinite in fp16, 9 * 4096 is not.
    rig = make_rig(BOTH, config())
    state, reports = rig.run(rig.state(), [both(9.0)] * 2, mode)
    assert [bool(r.applied) for r in reports] == [False, True]
    assert state.scale == 4096.0
    np.testing.assert_allclose(rig.both(state), 0.1, rtol=1e-6)


def test_from_two_to_the_24th_nine_skips_until_the_gradient_fits():
    rig = make_rig(BOTH, config())
    _, reports = rig.run(rig.state(scale=2.0**24), [both(1.0)] * 11)
    applied = [bool(r.applied) for r in reports]
    assert applied == [False] * 9 + [True] * 2
    assert reports[9].scale == 32768.0


def test_a_scale_that_is_no_power_of_two_halves_exactly():
    with pytest.warns(UserWarning, match="`init`=6000.0 is not a power of two"):
        rule = scaling.halving(init=6000.0)
    rig = make_rig(BOTH, config(scaling=rule))
    state, reports = rig.run(rig.state(), [both(np.nan)] * 2)
    assert [float(r.scale) for r in reports] == [6000.0, 3000.0]
    assert state.scale == 1500.0
    state, _ = rig.run(state, [both(1.0)])
    np.testing.assert_allclose(rig.both(state)[0], 0.9, rtol=1e-3)
    np.testing.assert_allclose(rig.both(state)[1], 0.9, rtol=1e-6)


def test_clean_steps_never_raise_the_scale():
    rig = make_rig(BOTH, config())
    state, reports = rig.repeat(rig.state(learning_rate=1e-6), both(1.0), 5000)
    assert state.scale == 8192.0 and state.applied_steps == 5000
    assert set(np.asarray(reports.scale)) == {8192.0}


@pytest.mark.parametrize("bad", [*BAD, 0.0, -1.0])
@pytest.mark.parametrize(
    "rule",
    [
        lambda s: scaling.halving(init=s),
        scaling.static,
        lambda s: scaling.dynamic(init=s),
        lambda s: scaling.halving(floor=s),
        lambda s: scaling.dynamic(floor=s),
        lambda s: scaling.dynamic(ceiling=s),
    ],
)
def test_scales_that_no_step_could_use_are_refused(rule, bad):
    with pytest.raises(ValueError, match="must be a finite number > 0"):
        rule(bad)


@pytest.mark.parametrize(
    "rule", [scaling.halving, scaling.static, lambda s: scaling.dynamic(init=s)]
)
def test_a_start_below_the_floor_is_refused(rule):
    with pytest.raises(ValueError, match="must not be below the floor 1.0, got 0.3"):
        rule(0.3)


@pytest.mark.parametrize("bad", [*BAD, 0, -1])
def test_a_bad_scale_cannot_be_put_into_a_state(bad):
    state = make_rig(BOTH, config()).state()
    with pytest.raises(ValueError, match="`scale` must be a finite number > 0"):
        state.replace(scale=bad)


@pytest.mark.parametrize("init", [8192.0, 2.0**24, 1.0])
def test_good_starts_are_taken_as_they_are(init):
    for rule in (scaling.halving(init), scaling.static(init), scaling.dynamic(init)):
        assert rule.init()[0] == init


@pytest.mark.parametrize("scale", [1.0, 64.0, 8192.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_update_does_not_depend_on_the_scale(scale, precision):
    rig = make_rig(BOTH, config(precision=precision))
    state = rig.state(scale=scale, learning_rate=0.5)
    state, [report] = rig.run(state, [both(1.5)])
    assert (rig.both(state) == 0.25).all() and state.scale == scale
    assert report.grad_norm == pytest.approx(1.5 * 6**0.5, rel=1e-6)
    assert report.loss == 9.0


def test_defaults_follow_the_precision():
    for precision, scale in (("fp16", 8192.0), ("bf16", 1.0), ("fp32", 1.0)):
        rule = rjax.Config(precision=precision).scale_rule
        assert rule.init()[0] == scale
        after = rule.next(*rule.init(), jnp.array(True))[0]
        assert after == (4096.0 if precision == "fp16" else 1.0)


def dynamic_by_hand(flags, init, interval, floor, ceiling):
    """Return the scale of each step under growth 2 and backoff 0.5."""
    scale, clean = init, 0
    for bad in flags:
        yield scale
        clean = 0 if bad else clean + 1
        if bad:
            scale = max(scale / 2, floor)
        elif clean == interval:
            scale, clean = min(scale * 2, ceiling), 0


def test_a_dynamic_scale_grows_and_backs_off():
    rule = scaling.dynamic(init=16.0, interval=2, floor=4.0, ceiling=64.0)
    rig = make_rig(BOTH, config(scaling=rule))
    flags = [0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0]
    batches = [both(np.nan if flag else 1.0) for flag in flags]
    state, reports = rig.run(rig.state(learning_rate=0.25), batches)
    # A step is unscaled by its own scale, not by the one it leads to.
    assert (rig.both(state) == 1.0 - 0.25 * flags.count(0)).all()
    want = list(dynamic_by_hand(flags, 16.0, 2, 4.0, 64.0))
    assert [float(r.scale) for r in reports] == want
    assert [int(not r.applied) for r in reports] == flags
    assert state.skipped == sum(flags)
    # A scale put above the ceiling is not lowered by growing.
    state, _ = rig.run(rig.state(scale=256.0), [both(0.0)] * 2)
    assert state.scale == 256.0


def test_a_static_scale_stays_on_a_skip_which_is_counted():
    rig = make_rig(BOTH, config(scaling=scaling.static(64.0)))
    state, reports = rig.run(rig.state(), map(both, (1.0, np.nan, 1.0)))
    assert [bool(r.applied) for r in reports] == [True, False, True]
    assert [float(r.scale) for r in reports] == [64.0] * 3 and state.scale == 64.0
    assert state.skipped == 1
    np.testing.assert_allclose(rig.both(state), 0.8, rtol=1e-6)


def test_scale_and_rate_are_no_constants_of_the_compiled_step():
    rig = make_rig(BOTH, config())
    rig.run(rig.state(), [both(1.0)])
    compiled = rig.jitted._cache_size()
    for scale, rate in ((4096.0, 0.5), (2.0, 0.25), (8192, 1)):
        state = rig.state(scale=scale, learning_rate=rate)
        state, [report] = rig.run(state, [both(1.0)])
        assert (report.scale, report.learning_rate) == (scale, rate)
        assert (rig.both(state) == 1.0 - rate).all()
    assert rig.jitted._cache_size() == compiled
