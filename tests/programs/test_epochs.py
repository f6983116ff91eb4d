"""A captured epoch: the bits of the same steps one by one, whatever happens in them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits

import rjax
from rjax.programs import epoch_report
from rjax.programs.sampling import Sampling

summarize = jax.jit(epoch_report.summarize)
EXAMPLES, BATCH, STEPS = 64, 10, 6  # four examples are left over
BROKEN = 17  # the example that makes every step with it a skip


def loss_fn(params, batch_stats, batch, key):
    """One layer, a loss with noise, statistics of the input, metrics of all kinds."""
    x, y = batch
    kernel, bias = params["kernel"], params["bias"]
    logits = (x.astype(kernel.dtype) @ kernel).astype(jnp.float32) + bias[None]
    wanted = jax.nn.one_hot(y, 3, dtype=jnp.float32)
    noise = 1 + jax.random.uniform(key, (), jnp.float32)
    loss = noise * jnp.mean((logits - wanted) ** 2)
    seen = jnp.mean(x.astype(jnp.float32), axis=0)
    metrics = {
        "correct": jnp.sum(jnp.argmax(logits, axis=-1) == y, dtype=jnp.int32),
        "logits": jnp.mean(logits, axis=0),
        "first": y[0] == 0,
    }
    return loss, ({"seen": 0.9 * batch_stats["seen"] + 0.1 * seen}, metrics)


def changed(key, x):
    """Scale each example by a number of its own, in half precision."""
    drawn = jax.random.uniform(key, (len(x), 1), jnp.float32, minval=-1, maxval=1)
    return (x.astype(jnp.float32) * drawn + 0.1 * drawn).astype(x.dtype)


@functools.cache
def made():
    """Return plan, step, the step jitted, first parameters and statistics."""
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(6, 3)), np.zeros(3)
    params = {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}
    stats = {"seen": np.zeros(6, np.float32)}
    config = rjax.Config(learning_rate=lambda n: 0.1 / (1 + n.astype(jnp.float32)))
    plan = rjax.make_plan(params, config, stats)
    step = rjax.make_train_step(loss_fn, plan)
    return plan, step, jax.jit(step, donate_argnums=0), params, stats


def fresh(**changes):
    plan, _, _, params, stats = made()
    return rjax.init_state(plan, params, stats, seed=3).replace(**changes)


@functools.cache
def data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(EXAMPLES, 6)).astype(np.float16)
    x[BROKEN] = np.inf
    return x, rng.integers(0, 3, EXAMPLES)


@functools.cache
def captured(**options):
    """Return an epoch with everything switched on, unless told otherwise."""
    options = {"augment": changed, "reports": True, **options}
    return rjax.capture_epoch(made()[1], fresh(), data(), BATCH, **options)


def one_by_one(epoch, state, steps):
    """Return state and stacked reports after steps of the jitted step."""
    reports = []
    for _ in range(steps):
        state, report = made()[2](state, epoch.batch(state))
        reports.append(report)
    return state, on_host(np.stack, reports)


def on_host(join, trees):
    """Return trees of arrays as one, of host arrays."""
    return jax.tree.map(lambda *x: join(x), *jax.device_get(trees))


@pytest.mark.parametrize("start", [0, 6, 8])
def test_an_epoch_is_its_steps_one_by_one(start):
    """Also one that begins within an epoch, and so ends within the next."""
    epoch = captured()
    state, report = epoch(fresh(step=start))
    wanted, reports = one_by_one(epoch, fresh(step=start), STEPS)
    assert bits(state) == bits(wanted)
    assert bits(report.reports) == bits(reports)
    if start != 8:
        skips = np.flatnonzero(~np.asarray(reports.applied))
        assert len(skips) == 1 and int(state.skipped) == int(report.skips) == 1
        assert not np.isfinite(reports.loss[skips[0]]) and np.isfinite(report.loss)


def test_overflows_with_a_finite_loss_are_skipped_in_the_program_too():
    epoch = captured()
    state, report = epoch(fresh(scale=2.0**18))
    wanted, reports = one_by_one(epoch, fresh(scale=2.0**18), STEPS)
    assert bits(state) == bits(wanted)
    assert bits(report.reports) == bits(reports)
    assert reports.consecutive_skips.tolist() == [1, 2, 0, 1, 0, 0]
    assert np.isfinite(reports.loss).tolist() == [True] * 3 + [False] + [True] * 2
    assert int(report.skips) == 3 and int(report.consecutive_skips) == 2


@pytest.mark.parametrize("start", [0, 2])
def test_several_epochs_are_as_many_calls(start):
    """Byte by byte, the reports too; also where a run of skips spans two of them."""
    one, three = captured(), captured(epochs=3)
    state, reports = fresh(step=start, scale=2.0**27), []
    for _ in range(3):
        state, report = one(state)
        reports.append(report)
    found, together = three(fresh(step=start, scale=2.0**27))
    assert bits(found) == bits(state)
    kept = on_host(np.concatenate, [r.reports for r in reports])
    assert bits(together.reports) == bits(kept)
    stacked = on_host(np.stack, [replace(r, reports=None) for r in reports])
    summary = replace(together, reports=None, digests=None)
    assert bits(summary) == bits(stacked)
    # The scale is too high for the first seven steps and more: one run, two epochs.
    runs = np.asarray(together.consecutive_skips)
    assert runs[0] == STEPS and runs[1] > STEPS


def test_a_run_that_goes_on_later_sees_the_same_epochs():
    epoch = captured()
    state, _ = epoch(fresh())
    kept = jax.device_get(state.replace(key=state.key))
    state, report = epoch(state)
    again, same = epoch(kept)
    assert bits((state, report)) == bits((again, same))


def rows(sampling, first, last, seed=0):
    """Return the examples of some steps, which the data are the numbers of."""
    batch = jax.jit(sampling.batch)
    numbers, key = jnp.arange(EXAMPLES), jax.random.key(seed)
    return np.stack([batch(numbers, key, jnp.int32(i)) for i in range(first, last)])


class TestTheExamples:
    def test_each_epoch_has_an_order_of_its_own(self):
        found = rows(Sampling(EXAMPLES, BATCH), 0, 3 * STEPS).reshape(3, -1)
        assert found.shape[1] == BATCH * STEPS
        for epoch in found:
            assert len({*epoch}) == len(epoch) and {*epoch} <= {*range(EXAMPLES)}
            assert (epoch != np.sort(epoch)).any()
        left_over = [tuple({*range(EXAMPLES)} - {*epoch}) for epoch in found]
        assert len({*left_over}) == 3 and len({tuple(epoch) for epoch in found}) == 3

    def test_another_key_gives_another_order(self):
        sampling = Sampling(EXAMPLES, BATCH)
        assert (rows(sampling, 0, 1) != rows(sampling, 0, 1, seed=1)).any()

    def test_without_shuffling_it_is_that_of_the_data(self):
        found = rows(Sampling(EXAMPLES, BATCH, shuffle=False), 0, 2 * STEPS)
        wanted = np.arange(BATCH * STEPS).reshape(STEPS, BATCH)
        np.testing.assert_array_equal(found, np.concatenate([wanted, wanted]))

    @pytest.mark.parametrize("first", [0, 2, 6, 11])
    def test_those_of_a_call_are_those_of_its_steps(self, first):
        sampling = Sampling(EXAMPLES, BATCH)
        found = jax.jit(sampling.rows)(jax.random.key(0), jnp.int32(first))
        np.testing.assert_array_equal(found, rows(sampling, first, first + STEPS))


class TestTheKeys:
    """Seen by an augmentation that returns what its key gives."""

    batch = staticmethod(
        jax.jit(
            Sampling(
                EXAMPLES, BATCH, augment=lambda key, x: (jax.random.key_data(key), x)
            ).batch
        )
    )

    def drawn(self, step):
        found, _ = self.batch(jnp.arange(EXAMPLES), jax.random.key(0), jnp.int32(step))
        return tuple(found.tolist())

    def test_each_step_has_its_own_and_again_the_same(self):
        assert len({self.drawn(step) for step in range(12)}) == 12
        assert self.drawn(3) == self.drawn(3)

    def test_no_step_has_its_stream(self):
        """The key of a step itself, from which dropout draws, is another one."""
        key = jax.random.key(0)
        for step in range(3):
            own = jax.random.fold_in(key, step)
            for other in (key, own, jax.random.fold_in(own, 0)):
                data = tuple(jax.random.key_data(other).tolist())
                assert data not in {self.drawn(step) for step in range(3)}

    def test_it_gets_the_images_or_the_whole_batch(self):
        def seen(key, x):
            return jax.tree.map(lambda x: x + 1, x)

        sampling = Sampling(4, 4, shuffle=False, augment=seen)
        key, step, x = jax.random.key(0), jnp.int32(0), jnp.arange(4)
        for data, wanted in (
            ((x, x), (x + 1, x)),
            ([x, x, x], [x + 1, x, x]),
            ({"image": x, "label": x}, {"image": x + 1, "label": x + 1}),
            (x, x + 1),
        ):
            found = sampling.batch(data, key, step)
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            assert bits(found) == bits(wanted)


def reports_of(applied, loss, run=0, **fields):
    """Return stacked reports of steps that were applied or not."""
    runs = []
    for one in applied:
        run = 0 if one else run + 1
        runs.append(run)
    n, count = len(applied), np.arange(len(applied), dtype=np.int32)
    values = {
        "applied": np.array(applied),
        "loss": np.array(loss, np.float32),
        "consecutive_skips": np.array(runs, np.int32),
        "scale": np.float32(2.0) ** -count,
        "grad_norm": count.astype(np.float32),
        "learning_rate": count.astype(np.float32),
        "step": count,
        "skipped": np.cumsum(~np.array(applied)).astype(np.int32),
        "offender": count,
        "bad_slots": np.arange(n)[:, None] == np.arange(n)[None],
        "bad_stats": np.zeros(n, bool),
        "metrics": {},
    }
    return rjax.Report(**{**values, **fields})


class TestTheSummary:
    def test_means_are_over_the_steps_that_were_applied(self):
        metrics = {
            "float": np.array([1, np.nan, 2, 6], np.float16),
            "vector": np.array([[1, 2], [np.inf, 0], [3, 4], [5, 9]], np.float32),
            "count": np.array([1, 100, 2, 3], np.int32),
            "flag": np.array([True, True, False, False]),
            "key": jax.random.split(jax.random.key(0), 4),
        }
        reports = reports_of(
            [True, False, True, True], [1, np.nan, 2, 6], metrics=metrics
        )
        found = summarize(reports)
        assert float(found.loss) == float(found.metrics["float"]) == 3.0
        assert found.metrics["float"].dtype == jnp.float32
        assert found.metrics["vector"].tolist() == [3.0, 5.0]
        assert int(found.metrics["count"]) == 6
        assert found.metrics["count"].dtype == jnp.int32
        assert float(found.metrics["flag"]) == pytest.approx(1 / 3)
        assert bits(found.metrics["key"]) == bits(metrics["key"][1])
        assert int(found.skips) == 1 and float(found.last_scale) == 0.125

    def test_where_none_was_applied_they_are_over_all(self):
        found = summarize(reports_of([False] * 4, [1, 2, 3, 6]))
        assert float(found.loss) == 3.0 and int(found.skips) == 4
        assert np.isnan(summarize(reports_of([False] * 4, [1, np.nan, 3, 6])).loss)

    @pytest.mark.parametrize(
        ("applied", "run", "longest", "at"),
        [
            ([1, 1, 1, 1], 9, 0, 3),
            ([1, 0, 1, 1], 0, 1, 1),
            ([0, 0, 1, 0], 0, 2, 1),
            ([0, 1, 0, 0], 0, 2, 3),
            ([0, 1, 1, 0], 0, 1, 3),
            ([0, 0, 1, 0], 5, 7, 1),
            ([0, 1, 0, 0], 5, 6, 0),
            ([0, 0, 0, 0], 2, 6, 3),
        ],
    )
    def test_the_rest_is_of_the_last_step_of_the_longest_run(
        self, applied, run, longest, at
    ):
        found = summarize(reports_of([bool(x) for x in applied], [1.0] * 4, run))
        assert int(found.consecutive_skips) == longest
        assert int(found.step) == int(found.offender) == at
        assert bool(found.applied) == all(applied)
        assert float(found.scale) == 2.0**-at
        assert np.flatnonzero(found.bad_slots).tolist() == [at]

    def test_it_is_plain_numbers_on_request(self):
        found = summarize(reports_of([True, False, True, True], [1.0, 2.0, 1.0, 1.0]))
        found = replace(found, reports=found, digests=jnp.zeros(3))
        plain = found.as_dict()
        assert (
            plain["loss"] == 1.0 and plain["skips"] == 1 and plain["bad_slots"] == [1]
        )
        assert not {"reports", "digests", "grad_digests"} & {*plain}


class TestCheck:
    """A run of skips that is over when the epoch ends, seen by `rjax.check`."""

    def test_of_an_epoch(self):
        plan, state = made()[0], fresh(scale=2.0**20)
        state, report = captured()(state)
        longest = int(report.consecutive_skips)
        assert 1 < longest and int(state.consecutive_skips) < longest
        rjax.check(report, plan, state, max_consecutive_skips=longest + 1)
        said = (
            rf"^{longest} steps in a row were skipped.* Step {int(report.step)} was "
            r"skipped at loss scale .*'(bias|kernel)'"
        )
        with pytest.raises(rjax.NonFiniteGradientsError, match=said):
            rjax.check(report, plan, state, max_consecutive_skips=longest)
        with pytest.raises(rjax.NonFiniteGradientsError, match=said):
            rjax.check(report.reports, plan, state, max_consecutive_skips=longest)

    def test_of_several(self):
        plan = made()[0]
        state, report = captured(epochs=3)(fresh(scale=2.0**27))
        longest = int(np.max(report.consecutive_skips))
        assert longest > STEPS
        rjax.check(report, plan, state, max_consecutive_skips=longest + 1)
        with pytest.raises(
            rjax.NonFiniteGradientsError, match=f"^{longest} steps in a"
        ):
            rjax.check(report, plan, state, max_consecutive_skips=longest)
