"""Arenas in ranges: what is read of them, and what moves between devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BOTH as SMALL
from helpers import bits, config, nested
from jax.sharding import PartitionSpec
from parallel.rigs import (
    ADAMW,
    EIGHT,
    FOUR,
    LARS,
    ONE,
    SHARDED,
    THREE,
    Over,
    pull,
    rows,
    weights,
)

import rjax
from rjax.parallel import bytes_per_device, collectives, data_parallel, gather
from rjax.parallel.placement import SHARDED as CUT
from rjax.parallel.sharded import slot_norms
from rjax.parallel.shards import Shards

THRICE = [EIGHT, SHARDED, THREE]
_get_params = jax.jit(rjax.get_params, static_argnums=(0, 2))
_digest = jax.jit(rjax.repro.digest, static_argnums=0)


@pytest.fixture(scope="module")
def trained():
    """A state of every layout, and that of one device, with the same bits of LARS."""
    rig = pull(ONE, LARS)
    state, _ = rig.run(rows(0), rows(1))
    return state, {over: pull(over, LARS).step.place(state) for over in THRICE}


@pytest.mark.parametrize("over", THRICE, ids=str)
def test_a_state_reads_the_same_wherever_it_lies(trained, over):
    one, states = trained
    plan, state = pull(over, LARS).plan, states[over]
    for which in ("master", "ema_compute"):
        found, right = (_get_params(plan, s, which) for s in (state, one))
        assert bits(found) == bits(right)
    back = gather(plan, state)
    assert bits(back) == bits(one)
    assert len(back.master.devices()) == 1
    adopted = rjax.adopt_ema(plan, state)
    assert bits({"": weights(pull(over, LARS), adopted)}) == bits(
        {"": weights(pull(ONE, LARS), one, "ema")}
    )
    assert (_digest(plan, state) == _digest(plan, one)).all()


def test_a_range_is_a_part_of_the_arena(trained):
    _, states = trained
    plan = pull(SHARDED, LARS).plan
    assert plan.n % 8 == 0 and plan.n % 3
    for over, length in ((SHARDED, plan.n), (THREE, -(-plan.n // 384) * 384)):
        for name in ("master", "mu", "ema"):
            arena = getattr(states[over], name)
            assert arena.shape == (length,)
            assert not np.asarray(arena)[plan.n :].any()
            shards = arena.addressable_shards
            assert [s.data.size for s in shards] == [length // over.devices] * len(
                shards
            )
        assert states[over].compute.sharding.is_fully_replicated
    again = pull(SHARDED, LARS).step.place(states[THREE])
    assert bits(again) == bits(states[SHARDED])


def test_padding_stays_zero_in_every_shard():
    state, _ = pull(THREE, LARS).run(*map(rows, range(3)))
    plan = pull(THREE, LARS).plan
    inside = np.zeros(len(state.master), bool)
    for slot in plan.slots:
        inside[slot.offset : slot.offset + slot.size] = True
    for name in ("master", "mu", "ema"):
        arena = np.asarray(getattr(state, name))
        assert not arena[~inside].any() and arena[inside].all()


@pytest.mark.parametrize("over", THRICE, ids=str)
def test_bytes_per_device_are_those_that_lie_there(trained, over):
    _, states = trained
    plan, state = pull(over, LARS).plan, states[over]
    there: dict[str, int] = {}
    for field in dataclasses.fields(state):
        for leaf in jax.tree.leaves(getattr(state, field.name)):
            if field.name == "key":
                leaf = jax.random.key_data(leaf)
            nbytes = leaf.addressable_shards[0].data.nbytes
            there[field.name] = there.get(field.name, 0) + nbytes
    options = {"devices": over.devices, "shard_optimizer": over.sharded}
    assert bytes_per_device(plan, state, **options) == there
    shapes = jax.eval_shape(lambda: rjax.init_state(plan, pull(ONE, LARS).params))
    assert bytes_per_device(plan, shapes, **options) == there


def test_gradients_are_digested_over_all_ranges():
    found = []
    for over in (ONE, EIGHT, THREE):
        # One gradient for all, so that no device rounds anything.
        batch = {path: np.repeat(x[:1], 24, axis=0) for path, x in rows(0).items()}
        batch = {path: np.round(4 * x) / 4 for path, x in batch.items()}
        _, [report] = pull(over, LARS).run(batch)
        assert report.grad_digests.shape == (len(FOUR), 2)
        found.append(np.asarray(report.grad_digests).tolist())
    assert found[0] == found[1] == found[2]


def test_new_weights_are_placed_again():
    rig = pull(THREE, LARS)
    state, _ = rig.run(rows(0))
    params = nested({path: jnp.full(shape, 2.0) for path, shape in FOUR})
    state = rjax.replace_params(rig.plan, state, params, ema="copy")
    with pytest.raises(ValueError, match=r"step\.place\(state\)"):
        rig.jitted(state, rows(1))
    state = rig.step.place(state)
    assert bits(_get_params(rig.plan, state, "ema")) == bits(params)
    state, report = rig.jitted(state, rows(1))
    assert report.applied


def test_a_placed_state_owns_its_buffers():
    rig = pull(EIGHT, LARS)
    state = rjax.init_state(rig.plan, rig.params)
    before = bits(state)
    rig.jitted(rig.step.place(state), rows(0))
    assert bits(state) == before


def test_explicit_axes_are_as_good():
    chosen, batch = config(), {path: np.ones((2, *s), np.float32) for path, s in SMALL}
    for sharded in (False, True):
        right, [report] = pull(Over(2, sharded), chosen, SMALL).run(batch)
        rig = pull(Over(2, sharded, explicit=True), chosen, SMALL)
        state, [found] = rig.run(rig.step.shard_batch(batch))
        assert bits((state, found)) == bits((right, report))
        _get_params(rig.plan, state, "master")
        _digest(rig.plan, state)
    whole = pull(Over(2, explicit=True), chosen, SMALL)
    plain, given = pull(ONE, chosen, SMALL).state(), whole.state()
    with jax.set_mesh(Over(2, explicit=True).mesh()):
        with pytest.raises(ValueError, match=r"AxisType\.Auto"):
            rig.step.place(plain)
        with pytest.raises(ValueError, match=r"AxisType\.Auto"):
            rig.step(plain, batch)
        state, found = whole.jitted(given, batch)
        _get_params(whole.plan, state, "master")
    right, [report] = pull(Over(2), chosen, SMALL).run(batch)
    assert bits((state, found)) == bits((right, report))


def test_what_optax_keeps_is_not_cut():
    params = {"w": jnp.ones((2, 2))}
    tx = rjax.optim.from_optax(optax.sgd(0.1))
    plan = rjax.make_plan(params, rjax.Config(optimizer=tx, learning_rate=None))
    with pytest.raises(NotImplementedError, match="shard_optimizer"):
        data_parallel(lambda *_: None, plan, EIGHT.mesh(), shard_optimizer=True)


def over_devices(f, n):
    """Run f(part) on n devices, each with one row of an array; return the first's."""
    mesh = Over(n).mesh()

    def run(x):
        return jax.shard_map(
            lambda part: f(part[0]),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x)

    return jax.jit(run)


AXES = ("data",)


def test_norms_of_slots_are_safe_and_add_up():
    plan = pull(SHARDED, LARS).plan
    arena = np.zeros(plan.n, np.float32)
    right = []
    for slot, size in zip(plan.slots, (1e25, 1.0, 1e-3, 1e30), strict=True):
        x = size * np.random.default_rng(0).random(slot.size)
        arena[slot.offset : slot.offset + slot.size] = x
        right.append(np.linalg.norm(x))
    for n in (8, 3):
        length = -(-plan.n // (128 * n)) * 128 * n if plan.n % n else plan.n
        sizes = tuple(slot.size for slot in plan.slots)
        shards = Shards(plan.slot_table, sizes, length, n, AXES)
        run = over_devices(functools.partial(slot_norms, shards=shards), n)
        found = run(np.pad(arena, (0, length - plan.n)).reshape(n, -1))
        np.testing.assert_allclose(found, right, rtol=1e-5)


class TestCollectives:
    def test_norms_are_safe(self):
        rows = [[3e30, 4e30], [0, 0], [3e-30, 4e-30], [np.inf, 1], [3, 4]]
        run = over_devices(jax.vmap(lambda x: collectives.norm(x, AXES)), 2)
        found = run(np.array(rows, np.float32).T)
        np.testing.assert_allclose(found, [5e30, 0, 5e-30, np.inf, 5], rtol=1e-6)

    def test_statistics_that_agree_keep_their_bits(self):
        stats = np.array([0.1, -0.7, 1e-30, 3e38], np.float32)
        run = over_devices(lambda x: collectives.reconcile({"s": x}, AXES), 3)
        assert bits(run(np.stack([stats] * 3))) == bits({"s": stats})
        found = run(np.stack([stats[:3], 2 * stats[:3], 6 * stats[:3]]))
        np.testing.assert_allclose(found["s"], 3 * stats[:3], rtol=1e-6)

    @pytest.mark.parametrize("size", [0, 1, 4, 5, 11, 12])
    def test_a_prefix_has_the_bits_of_all(self, size):
        x = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0
        x[1, 1] = -0.0
        run = over_devices(
            functools.partial(collectives.prefix, size=size, axes=AXES), 3
        )
        assert bits({"": run(x)}) == bits({"": x.reshape(-1)[:size]})

    @pytest.mark.parametrize("dtype", ["float16", "bool", "int32", "uint8"])
    def test_the_first_device_is_followed(self, dtype):
        x = np.array([[1, 0], [0, 1], [1, 1]]).astype(dtype)
        run = over_devices(lambda x: collectives.of_first(x, AXES), 3)
        assert bits({"": run(x)}) == bits({"": x[0]})


def test_adamw_padding_and_second_moments_are_cut():
    state = pull(SHARDED, ADAMW).state()
    for name in CUT:
        arena = getattr(state, name)
        if arena is not None:
            assert not arena.sharding.is_fully_replicated, name
    assert state.compute is None
