"""A skipped step moves nothing of the model, and says what was wrong."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    BAD,
    BOTH,
    MODES,
    SIX,
    both,
    config,
    injected,
    make_rig,
    nested,
    ones,
    pulled,
    unmoved,
)

import rjax
from rjax.state import GATED

STATS = (("bn1/mean", (1,), 0.0), ("bn1/var", (1,), 1.0), ("bn1/extra", (5,), 0.0))
ADAM = {
    "optimizer": rjax.optim.adam(weight_decay=0.01),
    "ema": rjax.Ema(decay=0.9),
    "clip": rjax.Clip(norm=100.0),
}
CONFIGS = {
    "adam": ADAM,
    "adam-bf16": {**ADAM, "precision": "bf16"},
    "adam-fp32": {**ADAM, "precision": "fp32", "clip": rjax.Clip(value=1.0)},
    "lars": {"optimizer": rjax.optim.lars(weight_decay=0.01)},
    "nesterov": {
        "optimizer": rjax.optim.nesterov(weight_decay=0.01),
        "scaling": rjax.scaling.dynamic(init=8192.0),
        "ema": rjax.Ema(decay=0.9, batch_stats="copy"),
    },
    "optax": {
        "optimizer": rjax.optim.from_optax(optax.adam(0.1)),
        "learning_rate": None,
    },
}

OPTAX = pytest.param("optax", marks=pytest.mark.standard_promotion)
NATIVE = [name for name in CONFIGS if name != "optax"]


def freeze_one(path, leaf):
    del leaf
    return rjax.Param(trainable=path != "frozen/kernel")


def model(params, batch_stats, batch, key):
    """Pull every parameter, take the statistics from the batch, draw a number."""
    trained = {k: v for k, v in params.items() if k != "frozen"}
    loss = pulled(trained, batch["g"])
    steps = jax.tree.map(lambda old, new: old + new, batch_stats, nested(batch["new"]))
    return loss, (steps, jax.random.uniform(key))


def six(name):
    """Return the rig of the model with every region, statistics and a frozen part."""
    shapes = (*SIX, ("frozen/kernel", (2, 2)))
    return make_rig(shapes, config(**CONFIGS[name]), model, freeze_one, STATS)


def clean_batch():
    new = {path: np.full(shape, 0.5, np.float32) for path, shape, _ in STATS}
    return {"g": ones(SIX, 0.5), "new": new}


@functools.cache
def warm_state(name):
    rig = six(name)
    state, _ = rig.run(rig.state(), [clean_batch()] * 2)
    assert state.applied_steps == 2 and state.scale == 8192.0
    return state


def warm(name):
    """Return a state of its own in which every arena has moved."""
    return jax.tree.map(jnp.copy, warm_state(name))


def elements(slot, every=False):
    """Return positions in a slot: all, or the first and those before the end."""
    few = sorted({0, slot.size // 2, max(slot.size - 2, 0), slot.size - 1})
    return range(slot.size) if every else few


def assert_skipped(report, after, before, number):
    assert not report.applied
    assert unmoved(after) == before
    assert after.scale == 4096.0 and report.scale == 8192.0
    assert after.step == 2 + number
    assert after.skipped == after.consecutive_skips == number
    assert report.skipped == report.consecutive_skips == number
    assert np.isnan(report.grad_norm)


def test_what_a_skip_keeps_is_what_the_library_says_it_keeps():
    fields = {field.name for field in dataclasses.fields(rjax.RegionState)}
    kept = {path.split("/")[0] for path in unmoved(warm("adam"))}
    kept |= {"opt_state"}  # there with Optax only
    constant = {"frozen", "learning_rate", "key"}
    moving = {"scale", "scaling_state", "step", "skipped", "consecutive_skips"}
    assert kept == fields - moving
    assert set(GATED) == kept - constant


@pytest.mark.parametrize("name", [*NATIVE, OPTAX])
def test_one_bad_element_anywhere_skips_the_step(name):
    """For every slot of every region, element by element."""
    rig, state, clean = six(name), warm(name), clean_batch()
    before, number = unmoved(state), 0
    for index, slot in enumerate(rig.plan.slots):
        every = name == "adam"
        for i, where in enumerate(elements(slot, every)):
            bad = BAD[i % 3] if every else BAD[index % 3]
            g = injected(clean["g"], slot.path, where, bad)
            state = state.replace(scale=8192.0)
            state, [report] = rig.run(state, [{**clean, "g": g}])
            number += 1
            assert_skipped(report, state, before, number)
            assert report.offender == index
            assert np.flatnonzero(report.bad_slots).tolist() == [index]
            assert not report.bad_stats
    parts = {slot.part for slot in rig.plan.slots}
    assert parts == set(rjax.Role)

    state, [report] = rig.run(state, [clean])
    assert report.applied and state.consecutive_skips == 0 and state.skipped == number
    assert report.offender == -1 and not report.bad_slots.any()
    assert set(GATED) - {"opt_state"} >= {
        path.split("/")[0]
        for path, value in unmoved(state).items()
        if value != before[path] and not path.startswith("opt_state")
    }


@pytest.mark.parametrize("name", [*NATIVE, OPTAX])
def test_skipped_steps_leave_no_trace_in_later_ones(name):
    rig = six(name)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        g = {path: rng.normal(size=shape).astype("f4") for path, shape in SIX}
        batches.append({**clean_batch(), "g": g})
    bad = {**batches[0], "g": ones(SIX, np.nan)}
    want, _ = rig.run(rig.state(), batches)
    state = rig.state()
    for batch in (bad, batches[0], bad, bad, batches[1], bad, batches[2], bad):
        state, _ = rig.run(state.replace(scale=8192.0), [batch])
    assert state.skipped == 5
    assert unmoved(state) == unmoved(want)


@pytest.mark.parametrize("bad", BAD)
def test_every_bad_value_skips_in_every_region(bad):
    rig, state, clean = six("adam"), warm("adam"), clean_batch()
    before = unmoved(state)
    for number, (index, slot) in enumerate(enumerate(rig.plan.slots), 1):
        g = injected(clean["g"], slot.path, slot.size - 1, bad)
        state = state.replace(scale=8192.0)
        state, [report] = rig.run(state, [{**clean, "g": g}])
        assert_skipped(report, state, before, number)
        assert report.offender == index


@pytest.mark.parametrize("path", ["kernel", "bias"])
def test_a_bad_element_skips_an_eager_step(path):
    rig = make_rig(BOTH, config(optimizer=rjax.optim.adam(), ema=rjax.Ema(decay=0.9)))
    state, _ = rig.run(rig.state(), [both(1.0)] * 2)
    before = unmoved(state)
    batch = both(1.0, 1.0, np.nan, kernel=path == "kernel", bias=path == "bias")
    state, [report] = rig.run(state, [batch], "eager")
    assert_skipped(report, state, before, 1)
    assert rig.plan.slots[report.offender].path == path
    state, [report] = rig.run(state, [both(1.0)], "eager")
    assert report.applied and state.consecutive_skips == 0


def test_many_bad_slots_make_one_skip_and_are_all_named():
    rig, clean = six("adam"), clean_batch()
    before, count = unmoved(warm("adam")), len(rig.plan.slots)
    cases = [*itertools.combinations(range(count), 2), range(count)]
    for chosen in cases[::3]:
        g = clean["g"]
        for index, bad in zip(chosen, itertools.cycle(BAD), strict=False):
            g = injected(g, rig.plan.slots[index].path, 0, bad)
        state, [report] = rig.run(warm("adam"), [{**clean, "g": g}])
        assert_skipped(report, state, before, 1)
        assert np.flatnonzero(report.bad_slots).tolist() == list(chosen)
        assert report.offender == chosen[0]


@pytest.mark.parametrize("name", ["adam", "nesterov", OPTAX])
@pytest.mark.parametrize("bad", BAD)
def test_bad_statistics_alone_skip_the_step(name, bad):
    rig, state, clean = six(name), warm(name), clean_batch()
    before = unmoved(state)
    for number, (path, shape, _) in enumerate(STATS, 1):
        new = injected(clean["new"], path, shape[0] - 1, bad)
        state = state.replace(scale=8192.0)
        state, [report] = rig.run(state, [{**clean, "new": new}])
        assert_skipped(report, state, before, number)
        assert report.bad_stats
        assert report.offender == -1 and not report.bad_slots.any()
    assert "batch statistics are not finite" in rjax.diagnose(rig.plan, state, report)


@pytest.mark.parametrize("name", ["adam", "lars"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_learning_rate_alone_skips_the_step(name, bad):
    rig, state = six(name), warm(name)
    state = dataclasses.replace(state, learning_rate=jnp.float32(bad))
    before = unmoved(state)
    state, [report] = rig.run(state, [clean_batch()])
    assert_skipped(report, state, before, 1)
    assert report.offender == -1 and not report.bad_stats
    assert not np.isfinite(report.learning_rate)
    assert "the learning rate is" in rjax.diagnose(rig.plan, state, report)
    state, [report] = rig.run(state.replace(learning_rate=0.1), [clean_batch()])
    assert report.applied


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_learning_rate_cannot_be_put_in_by_hand(bad):
    with pytest.raises(ValueError, match="`learning_rate` must be finite"):
        warm("adam").replace(learning_rate=bad)
    with pytest.raises(ValueError, match="`learning_rate` must be finite"):
        config(learning_rate=bad)


def breaking_schedule(count):
    return jnp.where(count < 1, 0.1, jnp.nan)


def test_a_schedule_that_breaks_skips_from_there_on():
    rig = make_rig(BOTH, config(learning_rate=breaking_schedule))
    state, reports = rig.run(rig.state(), [both(1.0)] * 3)
    assert [bool(r.applied) for r in reports] == [True, False, False]
    assert (state.applied_steps, state.skipped) == (1, 2)
    np.testing.assert_allclose(rig.both(state), 0.9, rtol=1e-6)


@pytest.mark.parametrize("bad", BAD)
def test_a_schedule_that_starts_bad_is_refused(bad):
    with pytest.raises(ValueError, match="finite number at step 0"):
        make_rig(BOTH, config(learning_rate=lambda count: bad))


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_loss_with_good_gradients_is_a_good_step(mode):
    # The loss is only reported: what counts is what would be written.
    def loss(params, batch):
        return pulled(params, batch) + jnp.float32(jnp.inf)

    rig = make_rig(BOTH, config(), rjax.stateless_loss(loss))
    state, [report] = rig.run(rig.state(), [both(1.0)], mode)
    assert report.applied and np.isinf(report.loss)
    np.testing.assert_allclose(rig.both(state), 0.9, rtol=1e-6)


def test_zero_gradients_are_a_good_step():
    for name in ("adam-fp32", "lars", "nesterov"):
        rig = six(name)
        batch = {**clean_batch(), "g": ones(SIX, 0.0)}
        state, [report] = rig.run(rig.state(), [batch])
        assert report.applied and report.grad_norm == 0.0
        assert state.applied_steps == 1 and state.scale == 8192.0


@pytest.mark.parametrize("name", ["adam", OPTAX])
def test_a_skipped_batch_is_not_repeated_with_the_same_random_numbers(name):
    rig, clean = six(name), clean_batch()
    bad = {**clean, "g": injected(clean["g"], "gain", 0, np.nan)}
    state = rig.state()
    want = [
        jax.random.uniform(jax.random.fold_in(jax.random.fold_in(state.key, i), 0))
        for i in range(4)
    ]
    _, reports = rig.run(state, [clean, bad, bad, clean])
    assert [float(r.metrics) for r in reports] == [float(x) for x in want]


def test_results_count_applied_steps_only():
    rig = make_rig(BOTH, config())
    batches = [both(1.0), both(np.nan), both(0.0), both(np.inf)]
    state, reports = rig.run(rig.state(), batches)
    assert state.results.count == 2
    assert state.results.loss_sum == reports[0].loss + reports[2].loss == 6.0


@pytest.mark.parametrize("name", [*NATIVE, OPTAX])
def test_padding_stays_zero_and_the_rest_moves(name):
    rig, state = six(name), warm(name)
    inside = np.zeros(rig.plan.n, bool)
    for slot in rig.plan.slots:
        inside[slot.offset : slot.offset + slot.size] = True
    b = rig.plan.bias_like
    for arena in (state.master, state.mu, state.nu, state.ema):
        if arena is not None:
            assert (np.asarray(arena)[~inside] == 0).all()
            assert not np.isin(np.asarray(arena)[inside], [0, 1]).any()
    for arena in (state.compute, state.ema_compute):
        if arena is not None:
            assert (np.asarray(arena, np.float32)[~inside[b:]] == 0).all()


NAN_RUN = [np.nan] * 6 + [1.0, np.nan, 1.0]


def scanned():
    rig = make_rig(BOTH, config())
    batches = [both(g) for g in NAN_RUN]
    return rig, rig.scan(rig.state(), jax.tree.map(lambda *x: np.stack(x), *batches))


def test_check_raises_at_the_limit_and_not_before():
    rig = make_rig(BOTH, config())
    state = rig.state()
    for n in range(1, 51):
        state, [report] = rig.run(state, [both(np.nan)])
        if n < 50:
            rjax.check(report, rig.plan, state)
    with pytest.raises(rjax.NonFiniteGradientsError, match="50 steps in a row") as e:
        rjax.check(report, rig.plan, state)
    assert rjax.diagnose(rig.plan, state, report) in str(e.value)
    for part in ("Step 49 was skipped at loss scale 1 ", "2 of 2", "'bias', 'kernel'"):
        assert part in str(e.value)
    rjax.check(report, rig.plan, max_consecutive_skips=51)
    with pytest.raises(ValueError, match="`max_consecutive_skips` must be >= 1"):
        rjax.check(report, rig.plan, max_consecutive_skips=0)


def test_check_counts_the_longest_run_of_stacked_reports():
    rig, (state, reports) = scanned()
    assert np.asarray(reports.consecutive_skips).tolist() == [1, 2, 3, 4, 5, 6, 0, 1, 0]
    assert np.asarray(reports.skipped).tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 7]
    assert np.asarray(reports.step).tolist() == list(range(9))
    assert np.asarray(reports.applied).tolist() == [not np.isnan(g) for g in NAN_RUN]
    assert state.consecutive_skips == 0
    rjax.check(reports, rig.plan, state, max_consecutive_skips=7)
    with pytest.raises(rjax.NonFiniteGradientsError, match="^6 steps in a row.*Step 5"):
        rjax.check(reports, rig.plan, state, max_consecutive_skips=6)
    epochs = jax.tree.map(lambda x: x.reshape(3, 3, *x.shape[1:]), reports)
    with pytest.raises(rjax.NonFiniteGradientsError, match="^6 steps in a row.*Step 5"):
        rjax.check(epochs, rig.plan, max_consecutive_skips=6)


def test_a_loop_and_a_scan_take_the_same_steps():
    rig, (scanned_state, reports) = scanned()
    state, each = rig.run(rig.state(), [both(g) for g in NAN_RUN])
    assert unmoved(state) == unmoved(scanned_state)
    assert state.scale == scanned_state.scale == 64.0
    losses = np.asarray([r.loss for r in each])
    np.testing.assert_array_equal(losses, reports.loss)


def test_diagnosis_names_a_master_beyond_the_half_range():
    rig = make_rig(BOTH, config())
    with pytest.warns(
        UserWarning, match="'kernel' has values beyond the range of fp16"
    ):
        state = rig.state({"kernel": 70000.0})
    batch = both(np.nan)
    state, [report] = rig.run(state, [batch])
    said = rjax.diagnose(rig.plan, state, report)
    assert "Masters beyond the range of fp16" in said and "'kernel'" in said
    assert "the loss itself is nan" in said
