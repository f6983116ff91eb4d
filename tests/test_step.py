"""The step as a program: what compiles, what it composes with, what it moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits

import rjax
from rjax.programs import hlo


def _params(seed=0):
    key = jax.random.key(seed)
    return {
        "dense1": {
            "kernel": 0.5 * jax.random.normal(key, (4, 8)),
            "bias": jnp.zeros(8),
        },
        "dense2": {
            "kernel": 0.5 * jax.random.normal(key, (8, 2)),
            "bias": jnp.zeros(2),
        },
    }


def _forward(params, x):
    for name in ("dense1", "dense2"):
        layer = params[name]
        x = rjax.ops.dense(jnp.tanh(x), layer["kernel"], layer["bias"])
    return x.astype(jnp.float32)


def _mse(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(_forward(params, x) - y)), {"count": jnp.int32(len(x))}


LOSS = rjax.stateless_loss(_mse)


def _batch(seed, size=8):
    x = jax.random.normal(jax.random.key(seed), (size, 4))
    return x, jnp.sum(x, axis=1, keepdims=True) * jnp.array([[1.0, -1.0]])


def _make(**changes):
    options = {"learning_rate": 0.05, "ema": rjax.Ema(0.9), **changes}
    plan = rjax.make_plan(_params(), rjax.Config(**options))
    return plan, rjax.make_train_step(LOSS, plan), rjax.init_state(plan, _params())


def test_nothing_recompiles_when_numbers_change(compilations):
    _, step, state = _make()
    step = jax.jit(step, donate_argnums=0)
    batches = [_batch(i) for i in range(5)]
    state, _ = step(state, batches[0])
    rates = [jnp.float32(0.01), jnp.float32(512.0)]
    jax.block_until_ready((state, batches, rates))
    compilations.clear()
    state, _ = step(state, batches[1])
    state, first = step(
        dataclasses.replace(state, learning_rate=rates[0]), batches[2]
    )  # fmt: skip
    state, second = step(dataclasses.replace(state, scale=rates[1]), batches[3])
    state, _ = step(state, batches[4])
    assert not compilations
    assert float(first.learning_rate) == np.float32(0.01)
    assert float(second.scale) == 512.0


def test_replace_keeps_dtypes_so_nothing_recompiles(compilations):
    _, step, state = _make()
    step = jax.jit(step)
    state, _ = step(state, _batch(0))
    batch, changed = _batch(1), state.replace(learning_rate=2, scale=64)
    jax.block_until_ready((batch, changed))
    compilations.clear()
    _, report = step(changed, batch)
    assert (float(report.learning_rate), float(report.scale)) == (2.0, 64.0)
    assert not compilations


def test_structure_and_types_are_the_same_after_every_step():
    for precision in ("fp16", "bf16", "fp32"):
        _, step, state = _make(
            precision=precision, scaling=rjax.scaling.dynamic(), accumulation_steps=2
        )
        new, _ = jax.eval_shape(step, state, _batch(0))
        assert jax.tree.structure(new) == jax.tree.structure(state)
        for old_leaf, new_leaf in zip(
            jax.tree.leaves(state), jax.tree.leaves(new), strict=True
        ):
            assert (old_leaf.shape, old_leaf.dtype) == (new_leaf.shape, new_leaf.dtype)
            assert not new_leaf.weak_type


def test_scan_over_steps_equals_one_by_one_bit_for_bit():
    plan, step, state = _make()
    batches = jax.tree.map(lambda *xs: jnp.stack(xs), *[_batch(i) for i in range(4)])
    scanned, reports = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    jitted, losses = jax.jit(step), []
    for i in range(4):
        state, report = jitted(state, _batch(i))
        losses.append(report.loss)
    assert bits(state) == bits(scanned)
    assert bits(jnp.stack(losses)) == bits(reports.loss)
    assert reports.bad_slots.shape == (4, len(plan.slots))


def test_two_runs_give_the_samebits():
    def run():
        _, step, state = _make(optimizer=rjax.optim.adamw())
        step = jax.jit(step, donate_argnums=0)
        for i in range(10):
            state, report = step(state, _batch(i))
        return bits((state, report))

    assert run() == run()


def test_vmap_over_seeds_trains_each_as_alone():
    plan, step, _ = _make()
    trees = [_params(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
    init = jax.vmap(lambda p, seed: rjax.init_state(plan, p, seed=seed))
    states = init(stacked, jnp.arange(3))
    many = jax.jit(jax.vmap(step, in_axes=(0, None)))
    for i in range(3):
        states, reports = many(states, _batch(i))
    alone = rjax.init_state(plan, trees[2], seed=2)
    for i in range(3):
        alone, report = jax.jit(step)(alone, _batch(i))
    # Batched and single products sum in another order.
    bound = 3 * 8 * np.spacing(np.float32(jnp.max(jnp.abs(alone.master)))) * 100
    np.testing.assert_allclose(states.master[2], alone.master, atol=bound, rtol=0)
    assert reports.loss.shape == (3,) and np.all(reports.applied)


def test_checkpoint_inside_the_loss_changes_nothing_but_memory():
    plan, step, state = _make(precision="fp32", optimizer=rjax.optim.sgd())

    def rematerialised(params, batch):
        x, y = batch
        return jnp.mean(jnp.square(jax.checkpoint(_forward)(params, x) - y))

    other = rjax.make_train_step(rjax.stateless_loss(rematerialised), plan)
    a, _ = jax.jit(step)(state, _batch(0))
    b, _ = jax.jit(other)(state, _batch(0))
    bound = 8 * np.spacing(np.float32(jnp.max(jnp.abs(a.master))))
    np.testing.assert_allclose(a.master, b.master, atol=bound, rtol=0)
    jaxpr = str(jax.make_jaxpr(other)(state, _batch(0)))
    assert "checkpoint" in jaxpr or "remat" in jaxpr


@pytest.mark.parametrize("k", [2, 4])
def test_accumulation_under_jit_equals_the_whole_batch(k):
    _, whole, state = _make(precision="fp32", optimizer=rjax.optim.sgd())
    _, parts, _ = _make(
        precision="fp32", optimizer=rjax.optim.sgd(), accumulation_steps=k
    )
    a, report_a = jax.jit(whole)(state, _batch(0))
    b, report_b = jax.jit(parts)(state, _batch(0))
    bound = 8 * np.spacing(np.float32(jnp.max(jnp.abs(a.master))))
    np.testing.assert_allclose(a.master, b.master, atol=bound, rtol=0)
    np.testing.assert_allclose(report_a.loss, report_b.loss, rtol=1e-6)
    assert int(report_b.metrics["count"]) == int(report_a.metrics["count"]) == 8


def test_a_key_among_metrics_is_that_of_the_last_micro_batch():
    params = {"w": jnp.ones(3)}
    plan = rjax.make_plan(params, rjax.Config(accumulation_steps=2))

    def loss_fn(params, batch_stats, batch, key):
        return jnp.mean(params["w"]) * jnp.mean(batch), (batch_stats, {"key": key})

    step = rjax.make_train_step(loss_fn, plan)
    state = rjax.init_state(plan, params)
    _, report = jax.jit(step)(state, jnp.ones((4, 1)))
    last = jax.random.fold_in(jax.random.fold_in(state.key, state.step), 1)
    assert report.metrics["key"] == last


def test_no_two_fields_share_a_buffer_and_donation_is_complete():
    _, step, state = _make(optimizer=rjax.optim.adamw())
    step = jax.jit(step, donate_argnums=0)

    def pointers(state):
        leaves = [x for x in jax.tree.leaves(state) if x.size]
        typed = jax.dtypes.prng_key
        return [
            (
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, typed) else x
            ).unsafe_buffer_pointer()
            for x in leaves
        ]

    assert len(set(pointers(state))) == len(pointers(state))
    new, _ = step(state, _batch(0))
    assert all(x.is_deleted() for x in (state.master, state.compute, state.mu))
    assert len(set(pointers(new))) == len(pointers(new))


def test_a_growing_scale_unscales_with_the_scale_of_its_step():
    """The next scale is known before the update, which must not use it."""
    _, still, state = _make(precision="fp32", scaling=rjax.scaling.off())
    growing = rjax.scaling.dynamic(init=1.0, interval=1)
    _, grown, other = _make(precision="fp32", scaling=growing)
    still, grown = jax.jit(still), jax.jit(grown)
    for i in range(4):
        state, _ = still(state, _batch(i))
        other, report = grown(other, _batch(i))
        assert float(report.scale) == 2.0**i
    assert bits(state.master) == bits(other.master)


def test_casts_survive_two_steps_in_one_program():
    """The copy of 1.0004 is 1.0 also where no array boundary lies between."""
    params = {"w": jnp.full((1, 1), 1.0)}
    config = rjax.Config(optimizer=rjax.optim.sgd(), learning_rate=-0.0004)
    plan = rjax.make_plan(params, config)
    loss = rjax.stateless_loss(lambda p, b: jnp.sum(p["w"].astype(jnp.float32)))
    step = rjax.make_train_step(loss, plan)

    def two(state):
        state, _ = step(state, {})
        return step(state, {})[1].loss

    assert float(jax.jit(two)(rjax.init_state(plan, params))) == 1.0


# ---- the compiled program of a tree with many leaves


def _many_leaves():
    """Return 91 leaves of about 0.5 M elements, a third of them kernels."""
    rng = np.random.default_rng(0)
    tree = {}
    for i in range(30):
        shape = (96 + i, 128 + 2 * i)
        tree[f"layer{i}"] = {
            "kernel": rng.standard_normal(shape, np.float32) * np.float32(0.01),
            "scale": np.ones(shape[1], np.float32),
            "bias": np.zeros(shape[1], np.float32),
        }
    tree["last"] = {"kernel": rng.standard_normal((64, 64), np.float32)}
    return tree


def test_bytes_outside_forward_and_backward_stay_near_the_arenas():
    params = _many_leaves()
    plan = rjax.make_plan(params, rjax.Config())

    def loss(params, batch):
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True)
        return sum(jnp.sum((p * b).astype(jnp.float32)) for p, b in pairs)

    half = {slot.leaf for slot in plan.slots if slot.half}
    batch = [
        np.ones(np.shape(x), np.float16 if i in half else np.float32)
        for i, x in enumerate(jax.tree.leaves(params))
    ]
    step = jax.jit(
        rjax.make_train_step(rjax.stateless_loss(loss), plan), donate_argnums=0
    )
    text = step.lower(rjax.init_state(plan, params), batch).compile().as_text()
    program = hlo.parse(text or "")
    outside = [
        (times * program.moved(i), i.opcode)
        for i, times in program.launched()
        if "forward_backward" not in i.path
    ]
    assert not [r for r in outside if r[1] == "pad"]
    assert not [r for r in outside if r[1] == "copy" and r[0] > plan.n]
    assert sum(r[1] == "concatenate" for r in outside) <= 1  # in a fusion on GPU
    # In units of a float32 arena, read and written: gradients read in half and packed
    # 1.5, checked 1, then gradients, momentum and masters read, the last two written,
    # and the copy 5.5. XLA on CPU writes one array a fusion, so it casts (1.5) before
    # it packs (2), and updates momentum (3), masters (4) and copy (1.5) in turn.
    arenas = 8.0 if jax.default_backend() == "gpu" else 13.0
    assert sum(r[0] for r in outside) <= 1.3 * arenas * 4 * plan.n
