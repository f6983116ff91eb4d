"""What makes two real runs differ is found, at its step and where it lies."""

import dataclasses
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIX, config, make_rig

import rjax
from rjax import repro
from rjax.digests import ARENAS
from rjax.repro import format as on_disk
from rjax.trees import flatten

CONFIG = config(
    optimizer=rjax.optim.adam(weight_decay=0.01),
    ema=rjax.Ema(0.9),
    scaling=rjax.scaling.halving(),
)
STEPS, AT = 8, 5


def loss_fn(params, batch_stats, batch, key):
    """A loss whose value depends on the order of its additions."""
    order = batch["order"]
    terms = [
        jnp.sum(leaf.astype(jnp.float32) * batch[path])
        for path, leaf in flatten(params)[0]
    ]
    ordered = jnp.where(order, jnp.stack(terms), jnp.stack(terms[::-1]))
    loss = functools.reduce(operator.add, list(ordered))
    return loss, (batch_stats, {"largest": jnp.max(ordered)})


def rig():
    return make_rig(SIX, CONFIG, loss_fn)


def batch(i, order=True):
    rng = np.random.default_rng(i)
    pulls = {path: rng.normal(size=shape).astype(np.float32) for path, shape in SIX}
    return {**pulls, "order": np.bool_(order)}


def train(folder, batches=None, meddle=None, seed=0):
    """Record a run; `meddle(i, state)` may replace the state after step i."""
    made = rig()
    state = rjax.init_state(made.plan, made.params, made.batch_stats, seed=seed)
    batches = [batch(i) for i in range(STEPS)] if batches is None else batches
    options = {"every": 1, "snapshot_every": 1, "facts": {"seed": seed}}
    with repro.record(folder, made.plan, state, **options) as recording:
        for i, one in enumerate(batches):
            state, report = made.jitted(state, one)
            state = state if meddle is None else meddle(i, state)
            recording.add(state, report)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run")


def test_the_same_again_is_bit_identical(plain, tmp_path):
    assert repro.compare(plain, train(tmp_path)).verdict == "bit-identical"


NAMES = list(ARENAS)
PATHS = [path for path, _ in SIX]


@pytest.mark.parametrize(
    ("field", "path"), [(f, p) for f, p in itertools.product(NAMES, PATHS)]
)
def test_a_flipped_mantissa_bit(plain, tmp_path, field, path):
    plan = rig().plan
    [slot] = [slot for slot in plan.slots if slot.path == path]
    short = field.endswith("compute")
    if short and not slot.half:
        pytest.skip("it has no copy in half precision")
    step = NAMES.index(field) + 1
    element = (7 * step) % slot.size
    at = slot.offset + element - (plan.bias_like if short else 0)

    def flip(i, state):
        if i + 1 != step:
            return state
        host = np.array(getattr(state, field))
        host.view(f"u{host.dtype.itemsize}")[at] ^= 1
        return dataclasses.replace(state, **{field: jnp.asarray(host)})

    found = repro.compare(plain, train(tmp_path, meddle=flip)).state
    assert found is not None and found.step == step and found.equal == step - 1
    [tensor] = found.tensors
    assert (tensor.field, tensor.path) == (field, path)
    assert tensor.region == plan_region(field, slot)
    assert found.element is not None and found.element.flat == element
    assert found.element.ulps == 1 and found.element.count == 1


def plan_region(field, slot):
    letter = {"compute": "A", "mu": "M", "nu": "V", "ema": "E", "ema_compute": "E"}
    name = f"{letter.get(field, 'W')}_{slot.part.name}"
    return f"{name}_FP16" if field == "ema_compute" else name


def first_of(plain, folder):
    found = repro.compare(plain, folder)
    assert found.verdict != "bit-identical" and found.first is not None
    return found


def test_a_swapped_batch(plain, tmp_path):
    order = [0, 1, 2, 3, 4, 6, 5, 7]
    found = first_of(plain, train(tmp_path, [batch(i) for i in order]))
    assert found.first.step == AT and found.first is found.columns[0]
    assert found.state.step == AT + 1 and found.state.equal == AT


def test_another_seed(plain, tmp_path):
    found = first_of(plain, train(tmp_path, seed=1))
    assert found.state.step == 0 and found.state.tensors[0].field == "key"
    assert found.causes.found[0].name == "seed"


def test_a_rate_off_by_one_ulp(plain, tmp_path):
    def nudge(i, state):
        near = jnp.nextafter(state.learning_rate, jnp.float32(1))
        return state.replace(learning_rate=near) if i + 1 == AT else state

    found = first_of(plain, train(tmp_path, meddle=nudge))
    assert found.state.step == AT and found.state.tensors[0].name == "learning_rate"
    assert found.state.element.ulps == 1
    [rate] = [c for c in found.columns if c.name == "learning_rate"]
    assert rate.step == AT and rate.count == STEPS - AT


def test_another_order_of_additions(plain, tmp_path):
    found = first_of(plain, train(tmp_path, [batch(i, i < AT) for i in range(STEPS)]))
    names = {column.name: column.step for column in found.columns}
    assert names["loss"] >= AT and found.first.step >= AT


def test_one_skipped_step_more(plain, tmp_path):
    bad = [batch(i) for i in range(STEPS)]
    bad[AT]["fc/kernel"] = bad[AT]["fc/kernel"] * np.float32(np.nan)
    found = first_of(plain, train(tmp_path, bad))
    assert found.first.step == AT and found.first.name == "loss"
    assert {"applied", "offender", "skipped"} <= {c.name for c in found.columns}
    assert found.state.step == AT + 1


def test_a_scan_records_what_a_loop_records(tmp_path):
    """The digest is pure: inside a scan it gives what the recording took."""
    made = rig()
    folder = train(tmp_path)
    inner = folder / "record"
    layout = on_disk.read_layout(inner)
    rows = on_disk.Rows(inner / "digests.bin", layout.digest_row)

    def body(state, one):
        state, _ = made.eager(state, one)
        return state, repro.digest(made.plan, state)

    stacked = jax.tree.map(lambda *x: np.stack(x), *map(batch, range(STEPS)))
    _, digests = jax.jit(lambda s, b: jax.lax.scan(body, s, b))(made.state(), stacked)
    np.testing.assert_array_equal(rows.read(1, STEPS)["words"], np.asarray(digests))
