"""Clipping: after the check, in true-gradient units, on top of any optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BAD, BOTH, MODES, both, config, make_rig, unmoved

import rjax
from rjax.ops import check_finite, unscale

CLIPS = {
    "value": rjax.Clip(value=1.0),
    "norm": rjax.Clip(norm=1.0),
    "wide": rjax.Clip(norm=10.0),
    "clamp": rjax.Clip(value=1.0, on_inf="clamp"),
}
# Which parameter is pulled: the gradient of a kernel passes through half precision.
PATHS = ("kernel", "bias")


def pull(path, *g):
    """Return the batch that pulls one parameter by g and the other by 0."""
    return both(*g, kernel=path == "kernel", bias=path == "bias")


def rig_of(clip, **options):
    return make_rig(BOTH, config(clip=CLIPS[clip], **options))


def assert_weights(rig, state, path, want, rtol=1e-6):
    """Compare the weights pulled; the others never moved."""
    [other] = set(PATHS) - {path}
    np.testing.assert_allclose(rig.get(state, path), want, rtol=rtol)
    assert (rig.get(state, other) == 1.0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", ["value", "norm"])
def test_clipping_hides_no_bad_gradient(mode, clip):
    rig = rig_of(clip)
    state = rig.state()
    before = unmoved(state)
    for path in PATHS if mode == "jit" else PATHS[:1]:
        for bad in BAD:
            for where in range(3) if mode == "jit" else [0]:
                g = [1.0, 2.0, 3.0]
                g[where] = bad
                state = state.replace(scale=8192.0)
                state, [report] = rig.run(state, [pull(path, *g)], mode)
                assert not report.applied and np.isnan(report.grad_norm)
                assert state.scale == 4096.0 and unmoved(state) == before


@pytest.mark.parametrize("clip", ["value", "norm"])
def test_clipping_hides_no_overflow_in_half_precision(clip):
    rig = rig_of(clip)
    state, [report] = rig.run(rig.state(), [pull("kernel", 9.0, 1.0, 1.0)])
    assert not report.applied and state.scale == 4096.0
    assert (rig.both(state) == 1.0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("clip", "g", "want"),
    [
        ("wide", [3.0, 4.0, 0.0], [0.7, 0.6, 1.0]),
        ("norm", [3.0, 4.0, 0.0], [0.94, 0.92, 1.0]),
        ("norm", [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        ("norm", [0.25, 0.0, -0.5], [0.975, 1.0, 1.05]),
        ("value", [0.5, -3.0, 1.0], [0.95, 1.1, 0.9]),
        ("clamp", [0.5, -3.0, 1.0], [0.95, 1.1, 0.9]),
    ],
)
def test_bounds_are_in_true_gradient_units(mode, path, clip, g, want):
    rig = rig_of(clip)
    for scale in (8192.0, 64.0, 1.0) if mode == "jit" else (8192.0,):
        state, [report] = rig.run(rig.state(scale=scale), [pull(path, *g)], mode)
        assert report.applied and state.scale == scale
        # The norm is that before the clip.
        assert report.grad_norm == pytest.approx(np.linalg.norm(g), rel=1e-6)
        assert_weights(rig, state, path, want)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_clipping_in_other_precisions(precision):
    rig = rig_of("norm", precision=precision)
    for path in PATHS:
        state, _ = rig.run(rig.state(), [pull(path, 3.0, -4.0, 0.0)])
        assert_weights(rig, state, path, [0.94, 1.08, 1.0])
        state, [report] = rig.run(rig.state(), [pull(path, np.inf, 1.0, 0.0)])
        assert not report.applied and (rig.both(state) == 1.0).all()


@pytest.mark.parametrize("path", PATHS)
def test_clamping_takes_infinities_to_the_bound_and_skips_on_nan(path):
    rig = rig_of("clamp")
    state, [report] = rig.run(rig.state(), [pull(path, np.inf, -np.inf, 0.5)])
    assert report.applied and not report.bad_slots.any() and report.offender == -1
    assert state.scale == 8192.0 and state.applied_steps == 1
    assert_weights(rig, state, path, [0.9, 1.1, 0.95])

    before = unmoved(state)
    state, [report] = rig.run(state, [pull(path, np.inf, np.nan, 0.5)])
    assert not report.applied and rig.plan.slots[report.offender].path == path
    assert unmoved(state) == before and state.scale == 4096.0


def test_clamping_does_not_name_an_infinite_slot_beside_a_nan():
    rig = rig_of("clamp")
    for nan, inf in (PATHS, PATHS[::-1]):
        batch = {**both(1.0), nan: pull(nan, np.nan)[nan], inf: pull(inf, np.inf)[inf]}
        _, [report] = rig.run(rig.state(), [batch])
        named = [rig.plan.slots[i].path for i in np.flatnonzero(report.bad_slots)]
        assert not report.applied and named == [nan]


def test_clamping_takes_a_half_precision_overflow_to_the_bound():
    rig = rig_of("clamp")
    state, [report] = rig.run(rig.state(), [pull("kernel", 9.0, -70000.0, 0.0)])
    assert report.applied and state.scale == 8192.0
    assert_weights(rig, state, "kernel", [0.9, 1.1, 1.0])


@pytest.mark.parametrize("scale", [1.0, 8192.0])
@pytest.mark.parametrize("size", [1e19, 1e20, 1e30, 1e34, 1e38])
def test_a_norm_whose_square_overflows(size, scale):
    # At 1e38 the ratio of bound and norm is subnormal.
    rig = rig_of("norm")
    batch = pull("bias", 1.5 * size / scale, 2.0 * size / scale, 0.0)
    state, [report] = rig.run(rig.state(scale=scale), [batch])
    assert report.applied
    assert report.grad_norm == pytest.approx(2.5 * size / scale, rel=1e-6)
    assert_weights(rig, state, "bias", [0.94, 0.92, 1.0])


@pytest.mark.parametrize("scale", [1.0, 8192.0])
def test_a_norm_whose_square_underflows(scale):
    rig = make_rig(BOTH, config(clip=rjax.Clip(norm=1e-30)))
    state = rig.state(scale=scale, learning_rate=1e30)
    state, [report] = rig.run(state, [pull("bias", 3e-25, 4e-25, 0.0)])
    assert report.grad_norm == pytest.approx(5e-25, rel=1e-5)
    assert_weights(rig, state, "bias", [0.4, 0.2, 1.0], rtol=1e-5)


def test_the_norm_is_over_all_parameters():
    rig = rig_of("norm")
    state, [report] = rig.run(rig.state(learning_rate=1.0), [both(2.0, 2.0, 0.0)])
    assert report.grad_norm == 4.0
    assert rig.both(state).tolist() == [[0.5, 0.5, 1.0]] * 2


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"value": 0.0}, "`value` must be a finite number > 0, got 0.0"),
        ({"norm": 0.0}, "`norm` must be a finite number > 0, got 0.0"),
        ({"value": -1.0}, "`value` must be a finite number > 0"),
        ({"norm": np.nan}, "`norm` must be a finite number > 0"),
        ({"norm": np.inf}, "`norm` must be a finite number > 0"),
        ({}, "exactly one of `value` and `norm`"),
        ({"value": 1.0, "norm": 1.0}, "exactly one of `value` and `norm`"),
        ({"norm": 1.0, "on_inf": "clamp"}, "`on_inf`='clamp' works with a `value`"),
        ({"value": 1.0, "on_inf": "drop"}, "`on_inf` must be 'skip' or 'clamp'"),
    ],
)
def test_bounds_that_are_refused(bound, message):
    with pytest.raises(ValueError, match=message):
        rjax.Clip(**bound)


@pytest.mark.parametrize("n", [1, 3, 127, 128, 129, 391])
def test_the_check_sees_the_last_element_of_any_length(n):
    grads, check = (
        np.zeros(n, np.float32),
        jax.jit(check_finite, static_argnames="on_inf"),
    )
    grads[-1] = -2.0
    flag, norm = check(grads, jnp.float32(4.0))
    assert not flag and norm == 0.5
    for bad in BAD:
        grads[-1] = bad
        flag, norm = check(grads, jnp.float32(4.0))
        assert flag and np.isnan(norm)
        flag, _ = check(grads, jnp.float32(4.0), on_inf="clamp")
        assert flag == np.isnan(bad)


def test_the_gradient_is_unscaled_before_the_clip():
    u = unscale(jnp.array([8.0, -32.0]), jnp.float32(8.0), clip_value=2.0)
    assert u.tolist() == [1.0, -2.0]
    g, norm = jnp.array([24.0, -32.0]), jnp.float32(5.0)
    u = unscale(g, jnp.float32(8.0), clip_norm=1.0, norm=norm)
    np.testing.assert_allclose(u, [0.6, -0.8], rtol=1e-6)
