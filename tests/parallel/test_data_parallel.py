"""What `rjax.parallel` says to what it cannot use, and one device as a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, bits, config
from jax.sharding import AbstractMesh
from parallel.rigs import ONE, Over, noted, pull, rows

import rjax
from rjax.parallel import bytes_per_device, data_parallel, replicate, shard_batch

PARAMS = {"w": jnp.ones((3, 100)), "b": jnp.ones(3)}
PLAN = rjax.make_plan(PARAMS, rjax.Config(accumulation_steps=2))
LOSS = rjax.stateless_loss(lambda params, batch: jnp.mean(params["b"]))
MESH = Over(1).mesh()


def grid(*shape: int) -> jax.sharding.Mesh:
    """Return a mesh of any shape, as if there were devices for it."""
    devices = np.full(shape, jax.devices()[0])
    return jax.sharding.Mesh(devices, ("data", "model")[: len(shape)])


def test_one_device_has_the_bits_of_the_plain_step():
    right, reports = pull(ONE, config(), BOTH).run(rows(0, BOTH), rows(1, BOTH))
    state, found = pull(Over(1), config(), BOTH).run(rows(0, BOTH), rows(1, BOTH))
    assert bits((state, found)) == bits((right, reports))


@pytest.mark.parametrize(
    ("mesh", "axis", "said"),
    [
        (AbstractMesh((2,), ("data",)), "data", "must be a jax.sharding.Mesh"),
        ([jax.devices()[0]], "data", "got list; make one with"),
        (grid(2), "batch", r"has \('data',\), each once, got 'batch'"),
        (grid(2), (), r"got \(\)"),
        (grid(2, 2), ("data", "data"), "each once"),
        (grid(2, 3), "data", r"3 devices along 'model'.*axis=\('data', 'model'\)"),
    ],
)
def test_a_mesh_that_does_not_fit(mesh, axis, said):
    with pytest.raises(ValueError, match=said):
        data_parallel(LOSS, PLAN, mesh, axis)
    with pytest.raises(ValueError, match=said):
        shard_batch({}, mesh, axis)


def test_axes_of_one_device_need_no_name():
    assert data_parallel(LOSS, PLAN, grid(2, 1)).layout.devices == 2
    assert data_parallel(LOSS, PLAN, grid(2, 3), ("data", "model")).layout.devices == 6


def test_arguments_of_the_wrong_kind():
    with pytest.raises(ValueError, match=r"`plan` must be an rjax.Plan, got Config"):
        data_parallel(LOSS, rjax.Config(), MESH)  # pyright: ignore[reportArgumentType]
    wrong: dict = {"batch_statistics": "local"}
    with pytest.raises(ValueError, match="'global' or 'device', got 'local'"):
        data_parallel(LOSS, PLAN, MESH, **wrong)
    with pytest.raises(ValueError, match="must be a jax.sharding.Mesh"):
        replicate(PARAMS, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("batch", [np.ones(12), {"x": np.ones(8), "y": np.ones(9)}])
def test_a_batch_that_devices_cannot_share(batch):
    step = data_parallel(LOSS, PLAN, grid(4))
    state = rjax.init_state(PLAN, PARAMS)
    leaf = "'y' must.*got 9" if isinstance(batch, dict) else "'array' must.*got 12"
    with pytest.raises(
        ValueError, match=rf"{leaf[:5]}.*4 devices times accum.*steps=2"
    ):
        step(state, batch)
    with pytest.raises(ValueError, match=leaf):
        step(state, batch)


def test_a_batch_without_examples():
    step = data_parallel(LOSS, PLAN, grid(4))
    with pytest.raises(ValueError, match="no leading axis"):
        step(rjax.init_state(PLAN, PARAMS), {"x": np.ones(8), "weight": np.ones(())})
    with pytest.raises(ValueError, match="divisible by 4 devices, as all"):
        step.shard_batch(np.ones(6))


def test_states_of_other_plans():
    step = data_parallel(LOSS, PLAN, MESH)
    for params, chosen in (
        ({"w": jnp.ones(3)}, PLAN.config),
        (PARAMS, rjax.Config(ema=rjax.Ema(0.9))),
        (PARAMS, rjax.Config(precision="fp32")),
        ({**PARAMS, "v": jnp.ones((30, 30))}, PLAN.config),
    ):
        other = rjax.init_state(rjax.make_plan(params, chosen), params)
        for use in (step.place, lambda state: step(state, {})):
            with pytest.raises(ValueError, match="another plan"):
                use(other)
    with pytest.raises(ValueError, match=r"from `rjax.init_state`, got dict"):
        step.place(PARAMS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="another plan"):
        bytes_per_device(PLAN, other, 2)


def test_a_longer_state_in_float32_is_no_padding():
    chosen = rjax.Config(precision="fp32", optimizer=rjax.optim.sgd())
    plan = rjax.make_plan(PARAMS, chosen)
    more = {**PARAMS, "x": jnp.ones((30, 30))}
    other = rjax.init_state(rjax.make_plan(more, chosen), more)
    with pytest.raises(ValueError, match="elements in an arena"):
        data_parallel(LOSS, plan, MESH).place(other)
    with pytest.raises(ValueError, match=r"step\.place\(state\)"):
        data_parallel(LOSS, plan, MESH)(other, {})


def test_bytes_of_shards_are_those_of_the_longest():
    state = rjax.init_state(PLAN, PARAMS)
    whole = bytes_per_device(PLAN, state, 3)
    shard = bytes_per_device(PLAN, state, 3, shard_optimizer=True)
    assert PLAN.n == 512 and whole["master"] == whole["mu"] == 2048
    # 512 elements are no three equal ranges: two rows of 128 for each.
    assert shard["master"] == shard["mu"] == 1024
    assert shard["compute"] == whole["compute"] == 2 * 384
    assert sum(shard.values()) == sum(whole.values()) - 2048
    with pytest.raises(ValueError, match="at least 1"):
        bytes_per_device(PLAN, state, 0)


def test_an_eager_step_is_a_jitted_one():
    rig = noted(Over(1))
    batch = np.arange(4, dtype=np.float32)
    assert bits(rig.step(rig.state(), batch)) == bits(rig.jitted(rig.state(), batch))
