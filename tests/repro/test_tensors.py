"""Every tensor of a state has a name, a region and a digest of its bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import SIX, config, make_rig, ones

import rjax
from rjax.digests import ARENAS, values
from rjax.repro import digest, tensors
from rjax.trees import flatten

STATS = (("bn1/mean", (1,), 0.0), ("bn1/var", (1,), 1.0), ("bn1/count", (2,), 0.0))
EMA = rjax.Ema(decay=0.9)
CONFIGS = {
    "adam": {"optimizer": rjax.optim.adam(), "ema": EMA},
    "momentum in bf16": {"optimizer": rjax.optim.momentum(), "precision": "bf16"},
    "sgd in fp32": {"precision": "fp32", "ema": EMA},
    "optax": {
        "optimizer": rjax.optim.from_optax(optax.adam(0.1)),
        "learning_rate": None,
    },
    "dynamic": {"scaling": rjax.scaling.dynamic()},
}
every_config = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.standard_promotion)
        if name == "optax"
        else name
        for name in CONFIGS
    ],
)


def made(name):
    """Return a plan and a state after one step."""
    rig = make_rig(SIX, config(**CONFIGS[name]), _loss, stats=STATS)
    state, _ = rig.jitted(rig.state(), ones(SIX, 0.5))
    return rig.plan, state


def _loss(params, batch_stats, batch, key):
    pairs = ((leaf, batch[path]) for path, leaf in flatten(params)[0])
    loss = sum(jnp.sum(leaf.astype(jnp.float32) * g) for leaf, g in pairs)
    return loss, (jax.tree.map(lambda x: x + 1, batch_stats), {})


jitted = jax.jit(digest, static_argnums=0)


@every_config
def test_names_are_distinct_and_cover_the_state(name):
    plan, state = made(name)
    found = tensors(plan, state)
    assert len({tensor.name for tensor in found}) == len(found)
    for field in dataclasses.fields(state):
        covered = [t for t in found if t.field == field.name]
        leaves = jax.tree.leaves(getattr(state, field.name))
        if field.name not in ARENAS:
            assert len(covered) == len(leaves), field.name
        elif leaves:
            wanted = [s for s in plan.slots if s.half or leaves[0].size == plan.n]
            assert [t.path for t in covered] == [s.path for s in wanted]
            assert all(t.region for t in covered)
    assert jitted(plan, state).shape == (len(found), 2)


@every_config
def test_regions_are_those_of_the_plan(name):
    plan, state = made(name)
    for tensor in tensors(plan, state):
        if tensor.field in ARENAS:
            start, stop = plan.bounds(rjax.Region[tensor.region])
            [slot] = [s for s in plan.slots if s.path == tensor.path]
            short = getattr(state, tensor.field).size < plan.n
            at = slot.offset - (plan.bias_like if short else 0)
            assert start <= at and at + slot.capacity <= stop, tensor


def flipped(state, field, path, where):
    """Return the state with the lowest bit of one element of a leaf flipped."""
    leaves, treedef = flatten(getattr(state, field))
    new = []
    for leaf_path, leaf in leaves:
        if leaf_path == path:
            key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            host = np.array(jax.random.key_data(leaf) if key else leaf)
            raw = host.reshape(-1).view(f"u{host.dtype.itemsize}")
            raw[where] ^= 1
            leaf = jnp.asarray(host)
            leaf = jax.random.wrap_key_data(leaf) if key else leaf
        new.append(leaf)
    return dataclasses.replace(state, **{field: jax.tree.unflatten(treedef, new)})


@every_config
def test_one_flipped_bit_changes_the_digest_of_its_tensor_and_no_other(name):
    plan, state = made(name)
    before = np.asarray(jitted(plan, state))
    for i, tensor in enumerate(tensors(plan, state)):
        path, at = tensor.path, max(0, int(np.prod(tensor.shape)) - 1)
        if tensor.field in ARENAS:
            [slot] = [s for s in plan.slots if s.path == path]
            short = getattr(state, tensor.field).size < plan.n
            at, path = slot.offset + slot.size - 1, ""
            at -= plan.bias_like if short else 0
        after = np.asarray(jitted(plan, flipped(state, tensor.field, path, at)))
        changed = np.flatnonzero((before != after).any(axis=1))
        assert changed.tolist() == [i], tensor


def test_padding_counts_for_nothing():
    plan, state = made("adam")
    [slot] = [s for s in plan.slots if s.path == "fc/kernel"]
    dirty = state.replace(master=state.master.at[slot.offset + slot.size].set(1.0))
    np.testing.assert_array_equal(jitted(plan, state), jitted(plan, dirty))


def test_a_tensor_alone_has_the_digest_it_has_in_the_arena():
    plan, state = made("adam")
    found = np.asarray(jitted(plan, state))
    for i, tensor in enumerate(tensors(plan, state)):
        if tensor.field in ("master", "compute", "mu"):
            host = values(plan, state)[i]
            np.testing.assert_array_equal(rjax.ops.digest(jnp.asarray(host)), found[i])


def test_it_serves_inside_a_jitted_function_and_a_scan():
    plan, state = made("adam")
    alone = np.asarray(jitted(plan, state))
    _, many = jax.lax.scan(lambda s, _: (s, digest(plan, s)), state, length=3)
    np.testing.assert_array_equal(np.asarray(many), np.stack([alone] * 3))


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([True, False]),
        np.array([1, -2], np.int8),
        np.array([1, 65535], np.uint16),
        np.array([1.5, np.nan], np.float16),
    ],
    ids=lambda leaf: str(leaf.dtype),
)
def test_statistics_of_any_type(leaf):
    plan, state = made("adam")
    state = state.replace(batch_stats={"x": jnp.asarray(leaf)})
    other = leaf.copy()
    other.view(f"u{leaf.dtype.itemsize}")[1] ^= 1
    changed = state.replace(batch_stats={"x": jnp.asarray(other)})
    a, b = (np.asarray(digest(plan, s)) for s in (state, changed))
    names = [t.name for t in tensors(plan, state)]
    assert [names[i] for i in np.flatnonzero((a != b).any(axis=1))] == ["batch_stats x"]
