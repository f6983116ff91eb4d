"""Digests of the gradients: of the right bits, and nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIX, bits, config, injected, make_rig, ones, pulled

import rjax
from rjax import stages

_DIGEST = jax.jit(rjax.ops.digest)
LOSS = rjax.stateless_loss(pulled)
CONFIGS = {
    "norm": {"clip": rjax.Clip(norm=0.5), "optimizer": rjax.optim.adamw()},
    "lars": {"optimizer": rjax.optim.lars(weight_decay=1e-3), "ema": rjax.Ema(0.9)},
    "fp32": {"precision": "fp32", "accumulation_steps": 2},
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def _loss(params, batch_stats, batch, key):
    """A little of everything: sums, products, statistics, a random mask."""
    x = jax.random.normal(key, (4, 2), jnp.float32) + jnp.mean(batch)
    hidden = jnp.tanh(x @ params["fc"]["kernel"].astype(jnp.float32))
    hidden = hidden * params["bn1"]["scale"][None, :3] + params["fc"]["bias"][None]
    rest = sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in _leaves(params))
    return jnp.mean(hidden**2) + rest * jnp.max(batch), (batch_stats, {})


def _leaves(params):
    return [params[name]["kernel"] for name in ("conv1", "conv2", "conv10")]


def _made(name):
    rig = make_rig(SIX, config(**CONFIGS[name]), _loss)
    digesting = rjax.make_train_step(_loss, rig.plan, digest_grads=True)
    return rig, jax.jit(digesting, donate_argnums=0)


def _batch(i):
    """Return a batch; the third makes a step that is skipped."""
    numbers = np.random.default_rng(i).normal(size=4).astype(np.float32)
    return numbers * np.float32(np.nan) if i == 2 else numbers


@every_config
def test_it_changes_no_bit_of_the_training(name):
    rig, digesting = _made(name)
    plain, state = rig.state(), rig.state()
    for i in range(5):
        plain, report = rig.jitted(plain, _batch(i))
        state, found = digesting(state, _batch(i))
        assert report.grad_digests is None
        assert found.grad_digests.shape == (len(SIX), 2)
        assert bits(state) == bits(plain)
        assert bits(dataclasses.replace(found, grad_digests=None)) == bits(report)
    assert int(state.skipped) == 1


# One object, so that jit compiles it once for a plan.
_FORWARD_BACKWARD = functools.partial(stages.forward_backward, loss_fn=_loss)


def _flow(rig, batch):
    """Return the step under way, just before the check."""
    flow = jax.jit(stages.begin, static_argnums=0)(rig.plan, rig.state(), batch)
    flow = jax.jit(_FORWARD_BACKWARD)(flow)
    for stage in ("cast_deep_grads", "reduce_deep", "cast_first_grads", "reduce_first"):
        flow = jax.jit(getattr(stages, stage))(flow)
    return flow


@every_config
def test_they_are_of_the_bits_that_are_checked_and_stage_by_stage_the_same(name):
    """Scaled and unclipped; of a step that is skipped, too."""
    rig, digesting = _made(name)
    for i in (0, 2):
        state, report = digesting(rig.state(), _batch(i))
        flow = jax.jit(stages.digest_grads)(_flow(rig, _batch(i)))
        for slot, lanes in zip(rig.plan.slots, report.grad_digests, strict=True):
            gradient = flow.grads[slot.offset : slot.offset + slot.size]
            np.testing.assert_array_equal(lanes, _DIGEST(gradient))
        for stage in ("check_and_scale", "reconcile_stats", "apply", "finish"):
            flow = jax.jit(getattr(stages, stage))(flow)
        assert bits(flow) == bits((state, report)) and bool(report.applied) == (i == 0)


def test_left_out_nothing_of_it_is_in_the_program():
    rig, digesting = _made("norm")
    args = rig.state(), _batch(0)

    def train_step(state, batch):
        flow = stages.begin(rig.plan, state, batch)
        flow = stages.forward_backward(flow, _loss)
        for stage in stages_without_digest:
            flow = getattr(stages, stage)(flow)
        return stages.finish(flow)

    stages_without_digest = (
        "cast_deep_grads", "reduce_deep", "cast_first_grads", "reduce_first",
        "check_and_scale", "reconcile_stats", "apply",
    )  # fmt: skip
    without = jax.jit(train_step, donate_argnums=0).lower(*args).as_text()
    assert rig.jitted.lower(*args).as_text() == without
    text = digesting.lower(*args).as_text(debug_info=True)
    assert "digest_grads" in text and "digest" not in without


def test_a_barrier_keeps_it_apart_from_the_check():
    rig, _ = _made("norm")

    def barriers(step):
        eqns = jax.make_jaxpr(step)(rig.state(), _batch(0)).jaxpr.eqns
        apart = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
        shapes = [[v.aval.shape for v in eqn.outvars] for eqn in apart]
        return sum((rig.plan.n,) in found for found in shapes)

    with_digests = rjax.make_train_step(_loss, rig.plan, digest_grads=True)
    assert barriers(with_digests) == barriers(rig.eager) + 1


@pytest.mark.parametrize("slot", range(len(SIX)))
def test_one_element_of_a_gradient_changes_one_digest(slot):
    rig = make_rig(SIX, config(), LOSS)
    path = rig.plan.slots[slot].path
    step = jax.jit(rjax.make_train_step(LOSS, rig.plan, digest_grads=True))
    one = ones(SIX, 0.5)
    near = 0.5 + 2.0**-11  # the next number but one in half precision
    other = injected(one, path, rig.plan.slots[slot].size - 1, near)
    a, b = (step(rig.state(), batch)[1].grad_digests for batch in (one, other))
    assert np.flatnonzero(np.asarray(a != b).any(axis=1)).tolist() == [slot]


def test_a_report_as_plain_numbers_has_none():
    rig, digesting = _made("fp32")
    _, report = digesting(rig.state(), _batch(0))
    assert "grad_digests" not in report.as_dict()


def test_an_empty_gradient_has_a_row_of_zeros():
    params = {"empty": jnp.ones((0, 2)), "w": jnp.ones((2, 2))}
    plan = rjax.make_plan(params, rjax.Config())
    loss = rjax.stateless_loss(lambda p, b: jnp.sum(p["w"]))
    step = jax.jit(rjax.make_train_step(loss, plan, digest_grads=True))
    _, report = step(rjax.init_state(plan, params), {})
    paths = [slot.path for slot in plan.slots]
    found = dict(zip(paths, np.asarray(report.grad_digests), strict=True))
    assert not found["empty"].any() and found["w"].all()
