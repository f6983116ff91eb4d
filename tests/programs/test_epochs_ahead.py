"""Batches made ahead, reports stacked as one row, and what an epoch's skips were of."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, bits, both, config, make_rig
from jax.extend.core import jaxprs_in_params

import rjax
from rjax import repro
from rjax.programs.epoch_report import summarize
from rjax.programs.epochs import _Epoch
from rjax.programs.sampling import Sampling, nearest_divisor
from rjax.repro import format as on_disk

EXAMPLES, BATCH, STEPS = 50, 6, 8  # two examples are left over


def changed(key, x):
    """Scale each image by a number of its own, in half precision."""
    drawn = jax.random.uniform(key, (len(x), 1), jnp.float32, minval=-1, maxval=1)
    return (x.astype(jnp.float32) * drawn + 0.1 * drawn).astype(x.dtype)


def _loss(params, batch):
    x, y = batch
    logits = rjax.ops.dense(x, params["kernel"], params["bias"])
    return jnp.mean(rjax.ops.softmax_cross_entropy(logits, y)), {"mean": jnp.mean(x)}


@functools.cache
def made():
    """Return step, the step jitted, first parameters and data."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(25, 3)).astype(np.float32)
    params = {"kernel": kernel, "bias": np.zeros(3, np.float32)}
    plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
    step = rjax.make_train_step(rjax.stateless_loss(_loss), plan)
    images = rng.uniform(size=(EXAMPLES, 25)).astype(np.float16)
    data = images, rng.integers(0, 3, EXAMPLES).astype(np.int32)
    return step, jax.jit(step, donate_argnums=0), params, data


def fresh(**changes):
    step, _, params, _ = made()
    return rjax.init_state(step.plan, params, seed=1).replace(**changes)


@functools.cache
def captured():
    """Return an epoch of two blocks of batches, with two digests in each."""
    step, _, _, data = made()
    options = {"augment": changed, "ahead": 4, "every": 2}
    return rjax.capture_epoch(step, fresh(), data, BATCH, **options)


@pytest.mark.parametrize("start", [0, 2, 4])
def test_an_epoch_made_ahead_is_its_steps_one_by_one(tmp_path, start):
    """Bit for bit, its record too; also from within a block and an epoch."""
    epoch, (step, jitted, *_) = captured(), made()
    with repro.record(tmp_path / "a", step.plan, fresh(step=start), every=2) as kept:
        state, report = epoch(fresh(step=start))
        kept.add_scanned(state, report.reports, report.digests)
    wanted, reports = fresh(step=start), []
    with repro.record(tmp_path / "b", step.plan, wanted, every=2) as kept:
        for _ in range(STEPS):
            wanted, one = jitted(wanted, epoch.batch(wanted))
            kept.add(wanted, one)
            reports.append(one)
    stacked = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(reports))
    assert bits(state) == bits(wanted)
    assert bits(report.reports) == bits(stacked)
    for name in (on_disk.STEPS, on_disk.DIGESTS):
        a, b = (tmp_path / x / on_disk.FOLDER / name for x in "ab")
        assert a.read_bytes() == b.read_bytes() != b""


def test_it_goes_through_the_same_batches_as_one_that_is_not():
    """But for the last place of what is augmented, which other kernels may round."""
    plain = Sampling(EXAMPLES, BATCH, augment=changed)
    one, ahead = jax.jit(plain.batch), jax.jit(replace(plain, ahead=4).batch)
    data, key = made()[3], jax.random.key(1)
    for step in range(0, 2 * STEPS, 3):
        found, wanted = ahead(data, key, step), one(data, key, step)
        np.testing.assert_array_equal(found[1], wanted[1])
        assert found[0].dtype == jnp.float16
        np.testing.assert_allclose(
            found[0].astype(np.float32), wanted[0].astype(np.float32), atol=1e-3
        )


def loops(jaxpr, path=()):
    """Yield every scan of a program with those around it, the innermost last."""
    for equation in jaxpr.eqns:
        inner = path
        if equation.primitive.name == "scan":
            inner = (*path, equation)
            yield inner
        for sub in jaxprs_in_params(equation.params):
            yield from loops(sub, inner)


def test_a_step_stacks_one_row_and_draws_nothing():
    """Batches are made outside the loop over steps, whose reports are one array."""
    step, _, _, data = made()
    epoch = _Epoch(step, Sampling(EXAMPLES, BATCH, augment=changed, ahead=4), None,
                   None, 0, True)  # fmt: skip
    found = list(loops(jax.make_jaxpr(epoch)(fresh(), data).jaxpr))
    [(outer, steps)] = [path for path in found if len(path) == 2]
    assert (outer.params["length"], steps.params["length"]) == (2, 4)
    stacked = [x.aval for x in steps.outvars if x.aval.shape[:1] == (4,)]
    assert len(stacked) == 1 and stacked[0].dtype == jnp.uint32
    assert "random_bits" in str(outer) and "random_bits" not in str(steps)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ahead": 0}, "`ahead` must be a whole number >= 1, got 0"),
        ({"ahead": 2.0}, "`ahead` must be a whole number >= 1, got 2.0"),
        ({"ahead": 3}, "must divide the 8 steps of an epoch, got 3; take 2, or 1"),
        ({"ahead": 2, "every": 4}, "a multiple of every=4, got 2; take 4, or 1"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(options, sentence):
    step, _, _, data = made()
    with pytest.raises(ValueError, match=sentence):
        rjax.capture_epoch(step, fresh(), data, BATCH, **options)


@pytest.mark.parametrize(
    ("number", "wanted", "of", "found"),
    [(44, 10, 1, 11), (300, 10, 1, 10), (12, 5, 1, 4), (7, 3, 1, 1), (300, 70, 20, 60)],
)
def test_the_nearest_divisor(number, wanted, of, found):
    assert nearest_divisor(number, wanted, of) == found


class TestTheDiagnosisOfAnEpoch:
    """It is of the step that ends the longest run, not of the means."""

    OVERFLOW = both(100.0, bias=False)  # at scale 8192 beyond half precision

    def said(self, batches, limit):
        rig = make_rig(BOTH, config())
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        state, reports = rig.scan(rig.state(), stacked)
        report = summarize(reports)
        with pytest.raises(rjax.NonFiniteGradientsError) as caught:
            rjax.check(report, rig.plan, state, max_consecutive_skips=limit)
        return report, str(caught.value)

    def test_a_mean_that_is_nan_is_not_the_loss_of_the_step(self):
        """All are skipped; the mean is over all of them, and one has no loss."""
        report, said = self.said([both(np.nan), *[self.OVERFLOW] * 3], limit=4)
        assert np.isnan(report.loss) and np.isfinite(report.step_loss)
        assert "the loss itself" not in said and "a lower scale may do" in said
        assert "4 steps in a row were skipped" in said and "Step 3 was" in said

    def test_a_loss_that_is_nan_is_named_though_the_mean_is_finite(self):
        batches = [both(1.0), *[both(np.nan)] * 3, both(1.0)]
        report, said = self.said(batches, limit=3)
        assert np.isfinite(report.loss) and np.isnan(report.step_loss)
        assert "the loss itself is nan" in said and "may do" not in said
        assert "Step 3 was skipped" in said
