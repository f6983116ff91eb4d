"""The pipeline stage by stage: names, order, bits, one decision."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits

import rjax
from rjax import stages
from rjax.state import GATED

STAGES = (
    "forward_backward", "cast_deep_grads", "reduce_deep", "cast_first_grads",
    "reduce_first", "check_and_scale", "reconcile_stats", "commit_stats", "update",
    "update_ema", "cast_to_compute", "cast_ema_to_compute",
)  # fmt: skip


def _params():
    """Return one parameter for every region, and more than one deep conv."""
    rng = np.random.default_rng(0)

    def kernel(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape, np.float32))

    return {
        "stem": {"kernel": kernel(3, 3, 1, 4)},
        "bn": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
        "conv1": {"kernel": kernel(3, 3, 8, 4)},
        "conv2": {"kernel": kernel(1, 1, 8, 4)},
        "head": {"kernel": kernel(8, 3), "bias": jnp.zeros(3)},
    }


STATS = {"bn": {"mean": jnp.zeros(4), "var": jnp.ones(4)}}


def _loss(params, batch_stats, batch, key):
    x, poison = batch
    half = params["head"]["kernel"].dtype
    x = x.astype(half)
    conv = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = conv(x, params["stem"]["kernel"])
    x, mean, var = rjax.ops.batch_norm(
        x, params["bn"]["scale"], params["bn"]["bias"], relu=True
    )
    x = conv(jnp.concatenate([x, x], -1), params["conv1"]["kernel"])
    x = conv(jnp.concatenate([x, x], -1), params["conv2"]["kernel"])
    features = jnp.concatenate([x.mean((1, 2)), x.max((1, 2))], -1)
    keep = jax.random.bernoulli(key, 0.8, features.shape)
    features = jnp.where(keep, features, jnp.zeros_like(features))
    logits = rjax.ops.dense(
        features, params["head"]["kernel"], params["head"]["bias"]
    ).astype(jnp.float32)
    old = batch_stats["bn"]
    stats = {"bn": {"mean": 0.9 * old["mean"] + 0.1 * mean,
                    "var": 0.9 * old["var"] + 0.1 * var}}  # fmt: skip
    loss = jnp.mean(jnp.square(logits)) + jnp.sum(params["bn"]["bias"]) * poison
    return loss, (stats, {"largest": jnp.max(logits)})


def _batch(seed=0, poison=0.0):
    x = np.random.default_rng(seed).standard_normal((4, 6, 6, 1), np.float32)
    return jnp.asarray(x), jnp.float32(poison)


def _plan(**changes):
    options = {"ema": rjax.Ema(0.9), "optimizer": rjax.optim.adamw(), **changes}
    return rjax.make_plan(_params(), rjax.Config(**options), batch_stats=STATS)


# One object, so that jit compiles it once for a plan.
_FORWARD_BACKWARD = functools.partial(stages.forward_backward, loss_fn=_loss)


def _one_by_one(plan, state, batch):
    """Run every stage in a jit of its own."""
    flow = jax.jit(stages.begin, static_argnums=0)(plan, state, batch)
    for name in STAGES:
        stage = getattr(stages, name)
        if name == "forward_backward":
            stage = _FORWARD_BACKWARD
        flow = jax.jit(stage)(flow)
    return jax.jit(stages.finish)(flow)


OPTIMIZERS = {
    "nesterov": rjax.optim.nesterov(weight_decay=1e-3),
    "adamw": rjax.optim.adamw(),
    "lars": rjax.optim.lars(weight_decay=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stage_by_stage_equals_composed_bit_for_bit(name):
    plan = _plan(optimizer=OPTIMIZERS[name], clip=rjax.Clip(norm=0.5))
    step = jax.jit(rjax.make_train_step(_loss, plan))
    state = rjax.init_state(plan, _params(), STATS)
    other = state
    for i, poison in enumerate([0.0, np.nan, 0.0]):
        state, report = step(state, _batch(i, poison))
        other, other_report = _one_by_one(plan, other, _batch(i, poison))
        assert bits((state, report)) == bits((other, other_report))
    assert int(state.skipped) == 1


@pytest.mark.parametrize("clip", [None, rjax.Clip(value=1.0)])
def test_every_stage_name_is_in_the_lowered_program(clip):
    plan = _plan(clip=clip)
    state = rjax.init_state(plan, _params(), STATS)
    lowered = jax.jit(rjax.make_train_step(_loss, plan)).lower(state, _batch())
    text = lowered.as_text(debug_info=True)
    for name in STAGES:
        assert re.search(rf"[/\"]{name}[/\"]", text), name


def test_stages_with_nothing_to_do_still_show_their_name():
    params = {"w": jnp.ones((2, 2))}
    plan = rjax.make_plan(params, rjax.Config(precision="fp32"))
    step = rjax.make_train_step(rjax.stateless_loss(lambda p, b: p["w"].sum()), plan)
    state = rjax.init_state(plan, params)
    text = jax.jit(step).lower(state, {}).as_text(debug_info=True)
    for name in STAGES:
        assert re.search(rf"[/\"]{name}[/\"]", text), name


def _count(jaxpr, wanted):
    """Count equations whose primitive is in `wanted`, call bodies included."""
    found = 0
    for eqn in jaxpr.eqns:
        found += wanted(eqn)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += _count(inner, wanted)
    return found


def test_one_conditional_moves_the_model_and_one_concatenation_packs_gradients():
    plan = _plan()
    state = rjax.init_state(plan, _params(), STATS)
    step = rjax.make_train_step(_loss, plan, implementation="xla")
    jaxpr = jax.make_jaxpr(step)(state, _batch()).jaxpr
    moving = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "cond"
        and any(v.aval.shape == (plan.n,) for v in eqn.outvars)
    ]
    assert len(moving) == 1
    packs = _count(
        jaxpr,
        lambda eqn: (
            eqn.primitive.name == "concatenate"
            and eqn.outvars[0].aval.shape == (plan.n,)
        ),
    )
    assert packs == 1


def test_in_flight_shows_half_gradients_before_the_casts():
    plan = _plan()
    state = rjax.init_state(plan, _params(), STATS)
    flow = jax.jit(_FORWARD_BACKWARD)(stages.begin(plan, state, _batch()))
    half = flow.grads_half
    assert half.shape == state.compute.shape and half.dtype == jnp.float16
    start, stop = plan.bounds(rjax.Region.G_DEEP_CONV_FP16)
    assert np.any(np.asarray(half[start:stop]))
    for name in STAGES[1:5]:
        flow = getattr(stages, name)(flow)
    assert flow.grads_half is None and flow.grads.dtype == jnp.float32
    start32, stop32 = plan.bounds(rjax.Region.G_DEEP_CONV)
    np.testing.assert_array_equal(
        np.asarray(half[start:stop], np.float32), np.asarray(flow.grads[start32:stop32])
    )


def test_dense_kernel_gradient_reaches_the_arena_in_float32():
    """1 + 2^-12 has more bits than fp16: it must arrive unrounded."""
    params = {"kernel": jnp.ones((1, 1))}
    config = rjax.Config(optimizer=rjax.optim.sgd(), scaling=rjax.scaling.off())
    plan = rjax.make_plan(params, config)

    def loss(params, batch):
        return jnp.mean(rjax.ops.dense(batch, params["kernel"]).astype(jnp.float32))

    x = jnp.full((4, 1), 1.0, jnp.float16).at[0].set(1 + 2.0**-10)
    flow = stages.begin(plan, rjax.init_state(plan, params), x)
    flow = stages.forward_backward(flow, rjax.stateless_loss(loss))
    assert flow.cotangents[0].dtype == jnp.float32
    assert flow.cotangents[0].item() == 1 + 2.0**-12


def test_a_skip_moves_nothing_stage_by_stage():
    plan = _plan()
    state = rjax.init_state(plan, _params(), STATS)
    new, report = _one_by_one(plan, state, _batch(0, np.inf))
    for name in GATED:
        assert bits(getattr(new, name)) == bits(getattr(state, name)), name
    assert not report.applied and float(new.scale) == 4096.0
    assert plan.slots[int(report.offender)].path == "bn/bias"
    assert np.flatnonzero(report.bad_slots).tolist() == [int(report.offender)]


def test_a_skip_keeps_a_compute_copy_that_differs_from_the_masters():
    """The casts hang on the decision too: a skip does not even refresh a copy."""
    plan = _plan()
    state = rjax.init_state(plan, _params(), STATS)
    state = state.replace(compute=state.compute * 2, ema_compute=state.compute * 3)
    new, _ = jax.jit(rjax.make_train_step(_loss, plan))(state, _batch(0, np.nan))
    assert bits(new.compute) == bits(state.compute)
    assert bits(new.ema_compute) == bits(state.ema_compute)


def test_eager_gate_compiles_once(compilations):
    plan = _plan()
    state = rjax.init_state(plan, _params(), STATS)
    step, batch = rjax.make_train_step(_loss, plan), _batch(1)
    state, _ = step(state, _batch())
    compilations.clear()
    step(state, batch)
    assert not compilations
