"""Casts that carry meaning, float32 masters and averages, tiny and huge values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, MODES, PRECISIONS, both, config, fresh_process, make_rig

import rjax
from rjax import ops

HALF = {"fp16": jnp.float16, "bf16": jnp.bfloat16}
# The least number that rounds to infinity, and the largest that does not.
EDGE = {"fp16": (65520.0, 65519.0), "bf16": (3.3961775e38, 3.396177e38)}
# A number next to one that half precision rounds to one.
NEAR_ONE = {"fp16": 1.0004, "bf16": 1.003}


def through(dtype):
    return lambda x: ops.cast(ops.cast(x, dtype), jnp.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("n", [1, 127, 128, 129, 391])
def test_a_cast_to_half_and_back_rounds(mode, precision, n):
    run = through(HALF[precision])
    run = jax.jit(run) if mode == "jit" else run
    over, under = EDGE[precision]
    edge = float(jnp.finfo(HALF[precision]).max)
    near = NEAR_ONE[precision]
    want = {over: np.inf, -over: -np.inf, under: edge, -under: -edge, near: 1.0}
    for x, rounded in {**want, np.inf: np.inf}.items():
        values = np.zeros(n, np.float32)
        values[-1] = x
        got = np.asarray(run(jnp.asarray(values)))
        assert got[-1] == rounded and (got[:-1] == 0).all()
    assert np.isnan(run(jnp.full(n, np.nan, "f4"))).all()


@pytest.mark.parametrize("precision", HALF)
def test_a_cast_is_held_by_a_barrier_of_its_own(precision):
    # XLA may cancel a pair of casts: on some backends only, so ask the program.
    half = HALF[precision]
    for start, end in ((jnp.float32, half), (half, jnp.float32)):
        x = jax.ShapeDtypeStruct((8,), start)
        program = jax.jit(lambda x, end=end: ops.cast(x, end)).lower(x).as_text()
        assert program.count("stablehlo.optimization_barrier") == 1
        assert program.count("stablehlo.convert") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_cast_keeps_subnormals_of_half_precision(mode):
    x = jnp.arange(-1024, 1025, dtype=jnp.float32) * 2.0**-24
    run = jax.jit(through(jnp.float16)) if mode == "jit" else through(jnp.float16)
    np.testing.assert_array_equal(run(x), x)
    half = run(jnp.array([0.5, 0.75, 1.5, 2.5]) * 2.0**-24)
    np.testing.assert_array_equal(half, np.array([0, 1, 2, 2]) * 2.0**-24)


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_overflows_where_half_precision_does(mode):
    # At scale 1 the scaled gradient is g; 65520 rounds to infinity, 65519 to 65504.
    rig = make_rig(BOTH, config())
    for g in (70000.0, 65520.0, -65520.0, 65519.0, -65519.0):
        batch = both(g, 0.0, 0.0)
        state, [report] = rig.run(
            rig.state(scale=1.0, learning_rate=1.0), [batch], mode
        )
        fits = abs(g) < 65520.0
        assert report.applied == fits
        sign = np.sign(g)
        want = [1.0 - 65504.0 * sign, 1.0 - g] if fits else [1.0, 1.0]
        assert rig.both(state)[:, 0].tolist() == want
        if not fits:
            named = [rig.plan.slots[i].path for i in np.flatnonzero(report.bad_slots)]
            assert named == ["kernel"]


def test_a_gradient_overflows_in_bfloat16_where_that_does():
    rig = make_rig(BOTH, config(precision="bf16"))
    over, under = EDGE["bf16"]
    for g, applied in ((over, False), (under, True)):
        batch = both(g, 0.0, 0.0, bias=False)
        _, [report] = rig.run(rig.state(scale=1.0, learning_rate=0.0), [batch])
        assert report.applied == applied


def test_fp32_has_no_half_precision_overflow():
    rig = make_rig(BOTH, config(precision="fp32"))
    state, [report] = rig.run(rig.state(learning_rate=1.0), [both(70000.0)])
    assert report.applied and (rig.both(state) == 1.0 - 70000.0).all()


def seen(params, batch):
    """Return the compute copy, summed in float32."""
    del batch
    return jnp.sum(params["kernel"].astype(jnp.float32))


SEEN = rjax.stateless_loss(seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_forward_pass_sees_the_rounded_copy(mode, precision):
    near = NEAR_ONE.get(precision, 1.0004)
    rig = make_rig(BOTH, config(precision=precision), SEEN)
    state = rig.state({"kernel": near}, learning_rate=0.0)
    want = 3.0 if precision != "fp32" else 3 * np.float32(near)
    for _ in range(2):  # the copy made at the start, and that of a step
        state, [report] = rig.run(state, [{}], mode)
        assert report.loss == pytest.approx(want, rel=1e-7)
    assert (rig.get(state, "kernel") == np.float32(near)).all()
    compute = rig.get(state, "kernel", "compute").astype(np.float32)
    assert compute.sum() == pytest.approx(want, rel=1e-7)


def test_the_copy_after_a_step_is_the_rounded_master():
    rig = make_rig(BOTH, config(ema=rjax.Ema(decay=0.5)))
    state = rig.state({"kernel": 0.1, "bias": 0.1})
    for g in (1.0, -0.3, np.nan, 2.0):
        state, _ = rig.run(state, [both(g, 2 * g, 3 * g)])
        for wide, half in (("master", "compute"), ("ema", "ema_compute")):
            want = rig.get(state, "kernel", wide).astype(np.float16)
            np.testing.assert_array_equal(rig.get(state, "kernel", half), want)
            same = rig.get(state, "bias", wide)
            np.testing.assert_array_equal(rig.get(state, "bias", half), same)


def tiny(params, batch):
    """Pull by 1e-9 through the compute copy."""
    del batch
    views = (jnp.sum(leaf.astype(jnp.float32)) for leaf in params.values())
    return jnp.float32(1e-9) * sum(views, start=jnp.zeros((), jnp.float32))


TINY = rjax.stateless_loss(tiny)


@pytest.mark.parametrize("mode", MODES)
def test_tiny_gradients_survive_as_subnormals(mode):
    rig = make_rig(BOTH, config(), TINY)
    state = rig.state({"kernel": 0.0, "bias": 0.0}, learning_rate=1.0)
    state, [report] = rig.run(state, [{}], mode)
    kernel, bias = rig.both(state)
    np.testing.assert_allclose(kernel, -(137 * 2.0**-24) / 8192, rtol=1e-6)
    np.testing.assert_allclose(bias, -1e-9, rtol=1e-6)
    assert report.grad_norm == pytest.approx(np.hypot(9.968e-10, 1e-9) * 3**0.5, 1e-3)


def test_tiny_gradients_in_the_other_precisions():
    for precision, rtol in (("bf16", 2.0**-8), ("fp32", 1e-6)):
        rig = make_rig(BOTH, config(precision=precision), TINY)
        state = rig.state({"kernel": 0.0, "bias": 0.0}, learning_rate=1.0)
        state, _ = rig.run(state, [{}])
        np.testing.assert_allclose(rig.both(state), -1e-9, rtol=rtol)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_average_is_kept_in_float32(precision):
    rig = make_rig(BOTH, config(precision=precision, ema=rjax.Ema(decay=0.9999)))
    two = jax.tree.map(lambda x: 2 * x, rig.params)
    state = rjax.replace_params(rig.plan, rig.state(), two)
    state, _ = rig.repeat(state, both(0.0), 1000)
    assert (rig.both(state) == 2.0).all()
    np.testing.assert_allclose(rig.both(state, "ema"), 1.09517, atol=3e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_master_is_kept_in_float32(precision):
    rig = make_rig(BOTH, config(precision=precision, ema=rjax.Ema(decay=0.9999)))
    state, _ = rig.repeat(rig.state(learning_rate=1e-4), both(1.0), 1000)
    np.testing.assert_allclose(rig.both(state), 0.9, atol=3e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_average_shares_the_gate(mode, bad):
    # Without it the second average is 0.81.
    rig = make_rig(BOTH, config(ema=rjax.Ema(decay=0.9)))
    state = rig.state(learning_rate=1.0)
    for g in (1.0, bad):
        state, _ = rig.run(state, [both(g)], mode)
        assert (rig.both(state) == 0.0).all()
        np.testing.assert_allclose(rig.both(state, "ema"), 0.9, rtol=1e-6)


def test_adopting_the_average_shares_no_buffer_with_it():
    rig = make_rig(BOTH, config(ema=rjax.Ema(decay=0.9)))
    state, _ = rig.run(rig.state(learning_rate=1.0), [both(1.0)])
    state = rjax.adopt_ema(rig.plan, state)
    for which in ("master", "compute", "ema", "ema_compute"):
        np.testing.assert_allclose(rig.both(state, which), 0.9, rtol=1e-3)
    state, _ = rig.run(state, [both(1.0)])  # donates every buffer once
    np.testing.assert_allclose(rig.both(state), -0.1, rtol=1e-5)
    np.testing.assert_allclose(rig.both(state, "ema"), 0.8, rtol=1e-6)


@pytest.mark.parametrize("ema", ["keep", "copy"])
def test_loaded_weights_are_not_overwritten_by_old_masters(ema):
    rig = make_rig(BOTH, config(ema=rjax.Ema(decay=0.5)))
    three = jax.tree.map(lambda x: 3 * x, rig.params)
    state, _ = rig.run(rig.state(), [both(np.nan)])
    state = rjax.replace_params(rig.plan, state, three, ema=ema)
    assert state.scale == 4096.0
    state, _ = rig.run(state, [both(0.0)])
    for which in ("master", "compute"):
        assert (rig.both(state, which) == 3.0).all()
    assert (rig.both(state, "ema") == (2.0 if ema == "keep" else 3.0)).all()


FAST_MATH = """
import numpy as np
from helpers import *
clips = (None, rjax.Clip(value=1.0), rjax.Clip(norm=1.0),
         rjax.Clip(value=1.0, on_inf="clamp"))
for clip in clips:
    rig = make_rig(BOTH, config(clip=clip, ema=rjax.Ema(decay=0.9)))
    state = rig.state()
    before = unmoved(state)
    clamps = clip is not None and clip.on_inf == "clamp"
    for bad in BAD[:1] if clamps else BAD:
        for path in ("kernel", "bias"):
            batch = both(bad, 1.0, 1.0, kernel=path == "kernel", bias=path == "bias")
            state, [report] = rig.run(state.replace(scale=8192.0), [batch])
            assert not report.applied, (clip, bad, path)
            assert state.scale == 4096.0
            assert unmoved(state) == before, (clip, bad, path)
            assert rig.plan.slots[report.offender].path == path
    state, [report] = rig.run(state, [both(0.5)])
    assert report.applied and np.isfinite(rig.both(state)).all()
print("skipped")
"""


@pytest.mark.parametrize(
    "more",
    ["", "--xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"],
)
def test_no_bad_number_is_written_under_fast_math(more):
    # With the second set of flags even `jnp.isnan` is compiled to False.
    flags = f"--xla_cpu_enable_fast_math=true {more}"
    assert fresh_process(FAST_MATH, XLA_FLAGS=flags) == "skipped"
