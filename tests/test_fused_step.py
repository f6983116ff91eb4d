"""The train step with its kernels: the same step, without a conditional."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIX, bits, config, injected, nested, ones, pulled, unmoved
from ops.range_kernels import needs_kernels

import rjax
from rjax import stages
from rjax.ops import mosaic, tuned
from rjax.regions import Role
from rjax.trees import flatten

STATS = {"bn1": {"mean": jnp.zeros(1), "var": jnp.ones(1), "count": jnp.int32(0)}}
FULL = {"optimizer": rjax.optim.nesterov(0.9, 0.02), "ema": rjax.Ema(0.9)}
CONFIGS = {
    "nesterov": FULL,
    "adamw, norm clip": {
        "optimizer": rjax.optim.adamw(weight_decay=0.02),
        "clip": rjax.Clip(norm=2.0),
        "ema": rjax.Ema(0.9),
    },
    "lars in bf16": {
        "optimizer": rjax.optim.lars(weight_decay=0.02),
        "precision": "bf16",
    },
    "clamp, copied statistics": {
        **FULL,
        "clip": rjax.Clip(value=0.5, on_inf="clamp"),
        "ema": rjax.Ema(0.9, batch_stats="copy"),
    },
    "sgd in fp32": {"precision": "fp32"},
}


def loss_fn(params, batch_stats, batch, key):
    old = batch_stats["bn1"]
    pull = jnp.mean(batch["gain"])
    stats = {"mean": 0.9 * old["mean"] + 0.1 * pull, "var": old["var"] * 1.5}
    stats["count"] = old["count"] + 1
    return pulled(params, batch), ({"bn1": stats}, {"pull": pull})


def normal(seed):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in SIX}


# A clean step, NaN in the last slot, Inf in the first, two clean ones.
BATCHES = (
    normal(0),
    injected(normal(1), "conv10/kernel", 15, np.nan),
    injected(normal(2), "bn1/bias", 0, np.inf),
    normal(3),
    normal(4),
)


@functools.cache
def made(name, implementation):
    params = nested({path: jnp.asarray(x) for path, x in normal(9).items()})
    plan = rjax.make_plan(params, config(**CONFIGS[name]), STATS)
    step = rjax.make_train_step(loss_fn, plan, implementation)
    return plan, params, step, jax.jit(step, donate_argnums=0)


def run(name, implementation, batches=BATCHES):
    """Return the state and the reports; interpreted unless there is a GPU."""
    plan, params, _, step = made(name, implementation)
    state, reports = rjax.init_state(plan, params, STATS), []
    target = "device" if jax.default_backend() == "gpu" else "interpret"
    with mosaic.mode(target, 256):
        for batch in batches:
            state, report = step(state, batch)
            reports.append(report)
    return state, reports


def near(found, wanted):
    """Compare floats within the roundings of a few steps, all else by its bits."""
    found, wanted = (dict(flatten(tree)[0]) for tree in (found, wanted))
    assert found.keys() == wanted.keys()
    for path, a in found.items():
        b = wanted[path]
        if not jnp.issubdtype(a.dtype, jnp.floating):
            assert bits(a) == bits(b), path
            continue
        unit = float(jnp.finfo(a.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64),
            rtol=32 * unit, atol=32 * unit, err_msg=path,
        )  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_step_of_xla(name):
    state, reports = run(name, "mosaic_gpu")
    wanted, wanted_reports = run(name, "xla")
    near(state, wanted)
    for report, other in zip(reports, wanted_reports, strict=True):
        near(report, other)
    applied = [bool(report.applied) for report in reports]
    assert applied == [True, False, "clamp" in name, True, True]
    if jax.default_backend() == "gpu" and not ("lars" in name or "norm" in name):
        # The norm, a sum in another order, decides these two; the report shows it.
        assert bits(state) == bits(wanted)


@needs_kernels
@pytest.mark.parametrize("name", ["nesterov", "lars in bf16"])
def test_a_skip_moves_nothing_and_names_the_slots(name):
    plan = made(name, "mosaic_gpu")[0]
    before, _ = run(name, "mosaic_gpu", BATCHES[:1])
    kept = unmoved(before)
    state, reports = run(name, "mosaic_gpu", BATCHES[:3])
    assert unmoved(state) == kept
    paths = [plan.slots[int(report.offender)].path for report in reports[1:]]
    assert paths == ["conv10/kernel", "bn1/bias"]
    assert [int(report.bad_slots.sum()) for report in reports] == [0, 1, 1]


@needs_kernels
def test_bad_statistics_or_a_bad_rate_skip_as_well():
    _, params, step, _ = made("nesterov", "mosaic_gpu")
    plan = made("nesterov", "mosaic_gpu")[0]
    state = rjax.init_state(plan, params, STATS)
    with mosaic.mode("interpret", 256):
        odd = injected(ones(SIX), "gain", 0, 1.0)
        wrong = state.replace(learning_rate=state.learning_rate * np.float32(np.inf))
        new, report = jax.jit(step)(wrong, odd)
    assert not report.applied and int(report.offender) == -1
    assert unmoved(new) == unmoved(wrong)


def kernels(jaxpr):
    """Return the names of conditionals over arenas, and of launched kernels."""
    text = str(jaxpr)
    names = ("rjax_update", "rjax_check_finite", "rjax_nonfinite_slots", "rjax_ema")
    return {name: text.count(f"name={name}") for name in names if name in text}


@needs_kernels
def test_one_launch_moves_the_model_and_nothing_is_conditional():
    plan, params, _, _ = made("nesterov", "mosaic_gpu")
    step = rjax.make_train_step(loss_fn, plan, "mosaic_gpu")  # never traced before
    state = rjax.init_state(plan, params, STATS)
    with mosaic.mode("lower"):
        traced = jax.jit(step, donate_argnums=0).trace(state, BATCHES[0])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    primitives = {eqn.primitive.name for eqn in traced.jaxpr.eqns}
    assert "cond" not in primitives
    launches = text.count("mosaic_gpu_v2")
    assert launches == 3, "one checks, one updates, one names slots"
    arenas = [state.master, state.compute, state.mu, state.ema, state.ema_compute]
    aliases = text.count("#stablehlo.output_operand_alias")
    assert aliases == len([x for x in arenas if x is not None])


@needs_kernels
def test_it_runs_inside_scan():
    plan, params, step, _ = made("nesterov", "mosaic_gpu")
    state = rjax.init_state(plan, params, STATS)
    stacked = jax.tree.map(lambda *x: np.stack(x), *BATCHES)
    with mosaic.mode("interpret", 256):
        state, reports = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, stacked)
    wanted, _ = run("nesterov", "mosaic_gpu")
    near(state, wanted)
    assert reports.applied.tolist() == [True, False, False, True, True]


@needs_kernels
def test_chosen_by_measurement_it_still_can_be_batched(monkeypatch):
    """Seeds side by side, under vmap: there XLA serves."""
    monkeypatch.setattr(tuned, "prefers_kernel", lambda op, n: True)
    plan, params, _, _ = made("nesterov", None)
    step = rjax.make_train_step(loss_fn, plan)
    state = rjax.init_state(plan, params, STATS)
    with mosaic.mode("interpret", 256):
        assert kernels(jax.make_jaxpr(step)(state, BATCHES[0]))["rjax_update"] == 1
        both = jax.tree.map(lambda x: jnp.stack([x, x]), state)
        batch = jax.tree.map(lambda a, b: np.stack([a, b]), *BATCHES[:2])
        batched = jax.vmap(step)
        assert not kernels(jax.make_jaxpr(batched)(both, batch))
        new, report = jax.jit(batched)(both, batch)
    assert report.applied.tolist() == [True, False]
    second = jax.tree.map(lambda x: x[1], new)
    assert unmoved(second) == unmoved(state)


@needs_kernels
def test_an_optax_optimizer_keeps_its_conditional():
    import optax

    options = {"learning_rate": None, "optimizer": rjax.optim.from_optax(optax.sgd(1))}
    params = {"w": jnp.ones((2, 64)), "b": jnp.ones(3)}
    plan = rjax.make_plan(params, rjax.Config(**options))
    step = rjax.make_train_step(
        rjax.stateless_loss(lambda p, x: jnp.sum(p["w"].astype(jnp.float32)) * x),
        plan,
        "mosaic_gpu",
    )
    state = rjax.init_state(plan, params)
    with mosaic.mode("interpret", 128):
        jaxpr = jax.make_jaxpr(step)(state, jnp.float32(1))
        assert "rjax_update" not in str(jaxpr) and "cond" in str(jaxpr)
        new, report = jax.jit(step)(state, jnp.float32(1))
    assert report.applied
    np.testing.assert_array_equal(rjax.get_params(plan, new)["w"], 0.0)


def test_a_kernel_that_cannot_run_is_refused_by_name():
    if jax.default_backend() == "gpu":
        pytest.skip("there it can")
    plan, params, step, _ = made("nesterov", "mosaic_gpu")
    state = rjax.init_state(plan, params, STATS)
    with pytest.raises(NotImplementedError, match="has no 'mosaic_gpu' implementation"):
        step(state, BATCHES[0])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_stage_by_stage_it_gives_the_same_bits(implementation):
    plan, params, _, step = made("nesterov", implementation)
    state = rjax.init_state(plan, params, STATS)
    other = state
    forward = functools.partial(stages.forward_backward, loss_fn=loss_fn)
    names = (
        "cast_deep_grads", "reduce_deep", "cast_first_grads", "reduce_first",
        "check_and_scale", "reconcile_stats", "commit_stats", "update", "update_ema",
        "cast_to_compute", "cast_ema_to_compute",
    )  # fmt: skip
    for batch in BATCHES:
        begin = jax.jit(stages.begin, static_argnums=(0, 3))
        flow = jax.jit(forward)(begin(plan, other, batch, implementation))
        for name in names:
            flow = jax.jit(getattr(stages, name))(flow)
        other, other_report = jax.jit(stages.finish)(flow)
        state, report = step(state, batch)
        assert bits((state, report)) == bits((other, other_report))


def test_every_region_is_in_these_models():
    plan = made("nesterov", "xla")[0]
    assert {slot.part for slot in plan.slots} == set(Role)
