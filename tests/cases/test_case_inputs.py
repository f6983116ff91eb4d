"""Sizes and inputs at the edge: too large, empty, scalar, of the wrong kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import config

import rjax

LIMIT = 2**31


def planned(*sizes):
    params = {
        f"layer{i}/kernel": jax.ShapeDtypeStruct((n, 1), jnp.float32)
        for i, n in enumerate(sizes)
    }
    return rjax.make_plan(params, rjax.Config())


@pytest.mark.parametrize(
    "sizes",
    [[LIMIT + 256], [LIMIT], [LIMIT - 135], [2**30, 2**30], [2**40], [2**28] * 8],
)
def test_too_many_elements_are_refused_before_any_allocation(sizes):
    with pytest.raises(ValueError, match=r"more than 2\^31 - 1 on one device"):
        planned(*sizes)


def test_the_largest_arena_that_can_be_indexed():
    plan = planned(LIMIT - 136)
    assert plan.n == LIMIT - 128
    assert planned(2**30, 2**30 - 264).n < LIMIT


def test_legal_oddities_train():
    """Zero-size leaves, scalars, `None` subtrees and an empty batch."""
    params = {
        "empty": jnp.zeros((0, 3)),
        "gain": jnp.float16(2.0),
        "nothing": None,
        "inner": {"kernel": np.ones((1, 1), np.float32), "none": {}},
    }

    def loss(params, batch):
        assert batch == {} and params["nothing"] is None
        leaves = jax.tree.leaves(params)
        return sum((jnp.sum(x.astype(jnp.float32)) for x in leaves), jnp.float32(0))

    plan = rjax.make_plan(params, config())
    state = rjax.init_state(plan, params)
    step = rjax.make_train_step(rjax.stateless_loss(loss), plan)
    state, report = jax.jit(step, donate_argnums=0)(state, {})
    new = rjax.get_params(plan, state)
    assert report.applied and new["nothing"] is None and new["empty"].shape == (0, 3)
    np.testing.assert_allclose([new["gain"], new["inner"]["kernel"].item()], [1.9, 0.9])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_parameters_of_any_floating_kind_are_stored_in_float32(kind):
    params = {"kernel": jnp.full((2, 2), 1.5, kind), "bias": jnp.full(2, 0.5, kind)}
    plan = rjax.make_plan(params, rjax.Config())
    state = rjax.init_state(plan, params)
    assert state.master.dtype == jnp.float32 and state.compute.dtype == jnp.float16
    leaves = jax.tree.leaves(rjax.get_params(plan, state))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
