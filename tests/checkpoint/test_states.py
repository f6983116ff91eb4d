"""Every field of a state comes back bit for bit, and the step goes on as it was."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint.states import CONFIGS, assert_same, copied, rig, trained
from helpers import BOTH, both, config, host, make_rig

import rjax
from rjax import checkpoint
from rjax.checkpoint import saving


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", CONFIGS)
def test_the_run_goes_on_as_if_unbroken(tmp_path, name):
    made = rig(name)
    state = trained(made)
    kept = copied(state)
    checkpoint.save(tmp_path, made.plan, state)
    right = trained(made, state=state)
    programs = made.jitted._cache_size()
    found = checkpoint.restore(tmp_path, made.plan, like=made.state())
    assert found.step == 4 and not found.changes and not found.refused
    assert int(found.state.skipped) == 1 and int(found.state.applied_steps) == 3
    assert_same(found.state, kept)
    assert_same(trained(made, state=found.state), right)
    assert made.jitted._cache_size() == programs, "the step was compiled anew"


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ["adamw", "optax"])
def test_no_state_is_needed_to_restore_one(tmp_path, name):
    made = rig(name)
    state = trained(made)
    checkpoint.save(tmp_path, made.plan, state)
    found = checkpoint.restore(tmp_path, made.plan)
    assert_same(found.state, state)
    programs = made.jitted._cache_size()
    trained(made, 1, found.state)
    assert made.jitted._cache_size() == programs


def test_what_is_saved_is_the_state_at_the_call(tmp_path, monkeypatch):
    """However late it is fetched: the steps after it have taken the state over."""
    made, gate, original = rig("adamw"), threading.Event(), saving.to_host

    def late(*arguments):
        assert gate.wait(60)
        return original(*arguments)

    monkeypatch.setattr(saving, "to_host", late)
    state = trained(made)
    kept = copied(state)
    with checkpoint.Checkpoints(tmp_path, made.plan) as saved:
        saved.save(state)
        jax.block_until_ready(trained(made, 3, state))
        gate.set()
    assert_same(checkpoint.restore(tmp_path, made.plan, made.state()).state, kept)


def test_two_restored_states_share_no_buffer(tmp_path):
    made = rig("sgd")
    checkpoint.save(tmp_path, made.plan, trained(made))
    like = made.state()
    one = checkpoint.restore(tmp_path, made.plan, like).state
    other = checkpoint.restore(tmp_path, made.plan, like).state
    trained(made, 2, one)
    assert_same(trained(made, 2, other), trained(made, 6))
    assert int(like.step) == 0


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_keep_their_generator(tmp_path, impl):
    made = make_rig(BOTH, config())
    key = jax.random.key(7, impl=impl)
    state = made.state(key=key)
    checkpoint.save(tmp_path, made.plan, state)
    for like in (state, None):
        found = checkpoint.restore(tmp_path, made.plan, like).state.key
        assert found.dtype == key.dtype
        assert host(found).tobytes() == host(key).tobytes()


def test_another_generator_is_another_state(tmp_path):
    made = make_rig(BOTH, config())
    checkpoint.save(tmp_path, made.plan, made.state(key=jax.random.key(7, impl="rbg")))
    with pytest.raises(checkpoint.CheckpointError, match=r"key is rbg.*not .*fry"):
        checkpoint.restore(tmp_path, made.plan, made.state())


def test_nan_payloads_and_signed_zeros_are_kept(tmp_path):
    made = make_rig(BOTH, config())
    words = np.array([0x7FC00123, 0xFFC00001, 0x80000000, 0x00000001], np.uint32)
    state = made.state()
    master = host(state.master).copy()
    master[:4] = words.view(np.float32)
    state = state.replace(master=jnp.asarray(master))
    checkpoint.save(tmp_path, made.plan, state)
    found = checkpoint.restore(tmp_path, made.plan, made.state()).state
    assert host(found.master).tobytes() == master.tobytes()


def test_odd_statistics_come_back_as_they_were(tmp_path):
    """Weak types, other dtypes, tuples, no elements, and none at all."""
    made = make_rig(BOTH, config())
    weak = jax.jit(lambda: 3.5)()
    assert weak.weak_type
    odd = {
        "weak": weak,
        "seen": jnp.int32(3),
        "flags": jnp.array([True, False]),
        "bytes": jnp.arange(3, dtype=jnp.int8),
        "brain": jnp.ones(2, jnp.bfloat16),
        "none": None,
        "empty": jnp.zeros((0, 4)),
        "pair": (jnp.ones(1), [jnp.zeros(())]),
    }
    state = made.state(batch_stats=odd)
    checkpoint.save(tmp_path, made.plan, state)
    assert_same(checkpoint.restore(tmp_path, made.plan, state).state, state)


def test_leaves_without_elements(tmp_path):
    params = {"w": jnp.ones((0, 3)), "b": jnp.ones(2)}
    plan = rjax.make_plan(params, rjax.Config())
    state = rjax.init_state(plan, params)
    checkpoint.save(tmp_path, plan, state)
    assert_same(checkpoint.restore(tmp_path, plan).state, state)


def test_two_leaves_of_one_name_are_refused(tmp_path):
    made = make_rig(BOTH, config())
    odd = {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}
    with pytest.raises(ValueError, match="two leaves of the path 'batch_stats/a/b'"):
        checkpoint.save(tmp_path, made.plan, made.state(batch_stats=odd))


def test_a_state_of_another_plan_is_refused(tmp_path):
    made, other = rig("sgd"), make_rig(BOTH, config(optimizer=rjax.optim.adam()))
    with pytest.raises(ValueError, match="plan"):
        checkpoint.save(tmp_path, made.plan, other.state())
    assert not checkpoint.Checkpoints(tmp_path, made.plan).steps()


@pytest.mark.standard_promotion
def test_optax_state_of_another_transformation_is_refused(tmp_path):
    def of(tx):
        chosen = config(optimizer=rjax.optim.from_optax(tx), learning_rate=None)
        return make_rig(BOTH, chosen)

    sgd, adam = of(optax.sgd(0.1, momentum=0.9)), of(optax.adam(0.1))
    checkpoint.save(tmp_path, sgd.plan, sgd.state())
    with pytest.raises(checkpoint.CheckpointError, match="opt_state/.*is in it alone"):
        checkpoint.restore(tmp_path, adam.plan, adam.state())
    state, _ = sgd.run(sgd.state(), [both(1.0)])
    assert int(state.step) == 1
