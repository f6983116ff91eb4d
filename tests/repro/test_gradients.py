"""Gradients in a record, and where two runs' gradients part before their weights."""

import dataclasses
import functools
import html
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SIX, config, make_rig

import rjax
from rjax import repro
from rjax.repro import RecordError, compare
from rjax.repro import format as on_disk
from rjax.repro.comparison import GradientDifference, StateDifference
from rjax.trees import flatten

STEPS, AT = 14, 12
PATHS = [path for path, _ in SIX]
# Rates that are lower let an ULP of a gradient vanish in the weight.
CONFIG = config(optimizer=rjax.optim.sgd(), precision="fp32", learning_rate=1e-9)
MOVING = config(optimizer=rjax.optim.momentum(), precision="fp32")


def loss_fn(params, batch_stats, batch, key):
    """A loss whose gradient, but not whose value, has `nudge` added to it."""
    loss = jnp.zeros(())
    for path, leaf in flatten(params)[0]:
        loss += jnp.sum(leaf * batch[path])
        loss += jnp.sum((leaf - jax.lax.stop_gradient(leaf)) * batch["nudge"][path])
    return loss, (batch_stats, {})


def batch(i, nudge=None, by=2.0**-23):
    """Return a batch; `nudge` is the slot whose last element it pulls harder.

    By one ULP of numbers from 1 to 2, if not more.
    """
    rng = np.random.default_rng(i)
    pulls = {p: 1 + rng.random(shape).astype(np.float32) for p, shape in SIX}
    nudges = {p: np.zeros(shape, np.float32) for p, shape in SIX}
    if nudge is not None:
        nudges[nudge].reshape(-1)[-1] = by
    return {**pulls, "nudge": nudges}


@functools.cache
def steps(config):
    """Return a rig and its step with digests of the gradients."""
    made = make_rig(SIX, config, loss_fn)
    digesting = rjax.make_train_step(loss_fn, made.plan, digest_grads=True)
    return made, jax.jit(digesting, donate_argnums=0)


def train(folder, nudge=None, every=1, config=CONFIG, digests=True, begin=0):
    """Record a run; `nudge` is (step, path). Return the folder and the reports."""
    made, digesting = steps(config)
    step = digesting if digests else made.jitted
    state, reports = made.state(step=jnp.int32(begin)), []
    with repro.record(folder, made.plan, state, every=every) as recording:
        for i in range(begin, STEPS):
            path = nudge[1] if nudge is not None and nudge[0] == i else None
            by = 2.0**-23 if config is CONFIG else 2.0**-6
            state, report = step(state, batch(i, path, by))
            recording.add(state, report)
            reports.append(report)
    return folder, reports


def rows(folder):
    """Return layout and rows of the gradients of a record."""
    inner = Path(folder) / on_disk.FOLDER
    layout = on_disk.read_layout(inner)
    found = on_disk.Rows(inner / on_disk.GRADIENTS, layout.gradient_row)
    return layout, found.read(0, found.count)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run")[0]


@pytest.mark.parametrize(
    ("every", "begin", "seen"),
    [(1, 0, range(STEPS)), (5, 0, (0, 5, 10)), (5, 3, (3, 5, 10)), (7, 0, (0, 7))],
)
def test_rows_are_those_of_the_steps_that_follow_a_digest(tmp_path, every, begin, seen):
    folder, reports = train(tmp_path / "run", every=every, begin=begin)
    layout, found = rows(folder)
    assert found["step"].tolist() == list(seen)
    for step, words in zip(found["step"], found["words"], strict=True):
        np.testing.assert_array_equal(words, reports[step - begin].grad_digests)
    plan = steps(CONFIG)[0].plan
    assert [t.path for t in layout.gradients] == [slot.path for slot in plan.slots]
    for tensor, slot in zip(layout.gradients, plan.slots, strict=True):
        start, stop = plan.bounds(rjax.Region[tensor.region])
        assert tensor.region.startswith("G_") and start <= slot.offset < stop


def test_without_digests_of_the_state_there_are_none_of_gradients(tmp_path):
    folder, _ = train(tmp_path / "run", every=0)
    inner = Path(folder) / on_disk.FOLDER
    assert on_disk.read_layout(inner).gradients == ()
    assert not (inner / on_disk.GRADIENTS).exists()


def test_the_rest_of_the_record_is_that_of_a_run_without(plain, tmp_path):
    folder, _ = train(tmp_path / "run", digests=False)
    for name in (on_disk.STEPS, on_disk.DIGESTS):
        one, other = (Path(x) / on_disk.FOLDER / name for x in (plain, folder))
        assert one.read_bytes() == other.read_bytes()
    found = compare(plain, folder)
    assert found.verdict == "bit-identical"
    [finding] = found.findings
    assert finding.kind == "note" and finding.text.startswith("Only A has digests of g")
    assert "Only B has" in compare(folder, plain).text()


@pytest.mark.parametrize("path", PATHS)
def test_an_ulp_of_a_gradient_that_moves_no_weight_is_found(plain, tmp_path, path):
    folder, _ = train(tmp_path / "run", (AT, path))
    found = compare(plain, folder)
    gradients = found.gradients
    assert found.first is gradients and isinstance(gradients, GradientDifference)
    assert (gradients.step, gradients.equal, gradients.compared) == (AT, AT - 1, 8)
    [tensor] = gradients.tensors
    assert (tensor.path, tensor.name) == (path, f"gradient of {path}")
    slot = next(s for s in steps(CONFIG)[0].plan.slots if s.path == path)
    assert tensor.region == f"G_{slot.part.name}"
    assert found.state is None and found.verdict == "numerically equivalent"
    said = found.text()
    assert f"first difference in step {AT}, gradient of {path}" in said.splitlines()[0]
    assert f"The state before step {AT} is equal: its batch differs" in said
    assert f"Gradients of step {AT} (those of step {AT - 1} are equal): 1 of 8" in said
    assert f"{tensor.region}: gradient of {path}" in said
    assert f"0x{gradients.a} in A, 0x{gradients.b} in B" in said


@pytest.mark.parametrize("every", [1, 4])
def test_it_comes_before_the_weights_that_it_moves(tmp_path, every):
    a, _ = train(tmp_path / "a", every=every, config=MOVING)
    b, _ = train(tmp_path / "b", (AT, "fc/kernel"), every, config=MOVING)
    found = compare(a, b)
    assert found.first is found.gradients and found.gradients.step == AT
    if every > 1:  # no digest of the state comes later
        assert found.state is None
        return
    state = found.state
    assert isinstance(state, StateDifference) and state.step == AT + 1
    assert state.tensors[0].name == "mu fc/kernel"
    lines = found.text().splitlines()
    order = ("The state before", "Gradients of", "State after")
    places = [
        next(i for i, line in enumerate(lines) if line.strip().startswith(start))
        for start in order
    ]
    assert places == sorted(places)


def test_between_digests_the_state_comes_before_the_next_gradient(tmp_path):
    a, _ = train(tmp_path / "a", every=5, config=MOVING)
    b, _ = train(tmp_path / "b", (7, "fc/kernel"), 5, config=MOVING)
    found = compare(a, b)
    # The norm tells of step 7; what was digested, only of what came of it.
    assert (found.first.step, found.first.name) == (7, "grad_norm")
    assert (found.state.step, found.state.equal) == (10, 5)
    assert found.gradients is None  # the loss is linear


def test_the_loss_of_a_step_comes_before_its_gradient(plain, tmp_path, monkeypatch):
    real = batch
    swapped = {3: 4, 4: 3}
    monkeypatch.setitem(
        globals(), "batch", lambda i, *rest: real(swapped.get(i, i), *rest)
    )
    found = compare(plain, train(tmp_path / "run")[0])
    assert (found.first.step, found.first.name) == (3, "loss")
    assert found.gradients.step == 3 and len(found.gradients.tensors) == 8
    said = found.text()
    assert said.count("The state before step 3 is equal") == 1
    assert said.index("Step 3, loss") < said.index("Gradients of step 3")


def test_the_page_has_a_table_of_gradients(tmp_path):
    a, _ = train(tmp_path / "a", config=MOVING)
    b, _ = train(tmp_path / "b", (AT, "fc/kernel"), config=MOVING)
    found = compare(a, b)
    page = html.unescape(found.to_html())
    for name, count in (("of digests", 15), ("of digests of gradients", 14)):
        assert f"<td>rows {name}</td><td>{count}</td><td>{count}</td>" in page
    head, title = f"Gradients that differ in step {AT}: 1 of 8", "Tensors that differ"
    assert page.index(f"<summary>{head}") < page.index(f"<summary>{title}")
    row = "<td>G_FC_WEIGHT</td><td>gradient of fc/kernel</td><td>[2, 3]</td>"
    assert row in page and found._repr_html_() in found.to_html()
    for line in found.text().splitlines()[1:]:  # the verdict has a badge of its own
        if "steps 0 to" not in line:
            assert line.strip() in page


def altered(plain, tmp_path, change):
    """Return a copy of a record after `change(rows)` of its gradients."""
    folder = tmp_path / "altered"
    inner = folder / on_disk.FOLDER
    inner.mkdir(parents=True)
    for path in (Path(plain) / on_disk.FOLDER).iterdir():
        (inner / path.name).write_bytes(path.read_bytes())
    layout, found = rows(plain)
    found = change(found.copy())
    packed = on_disk.pack(layout.gradient_row, found["step"].tolist(), found["words"])
    (inner / on_disk.GRADIENTS).write_bytes(packed)
    return folder


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
@pytest.mark.parametrize("row", [0, 9, STEPS - 1])
def test_any_bit_of_any_digest_of_a_gradient(plain, tmp_path, row, bit):
    def flip(found):
        found["words"][row, 5, bit // 32] ^= np.uint32(1 << bit % 32)
        return found

    found = compare(plain, altered(plain, tmp_path, flip)).gradients
    assert found.step == row and found.equal == (row - 1 if row else None)
    assert int(found.a, 16) ^ int(found.b, 16) == 1 << bit
    assert found.tensors == (rows(plain)[0].gradients[5],)


def test_a_lost_row_of_gradients_is_told(plain, tmp_path):
    found = compare(plain, altered(plain, tmp_path, lambda rows: rows[:-1]))
    assert found.verdict == "incomplete"
    said = "Digests of gradients of steps that both have: 1 of A stand alone."
    assert said in found.text()
    assert "and the gradients of 13 steps" in found.reason


def test_other_steps_are_compared_where_both_have_them(plain, tmp_path):
    folder, _ = train(tmp_path / "run", (10, "gain"), every=5)
    found = compare(plain, folder)
    assert (found.gradients.step, found.gradients.equal) == (10, 5)
    assert "stand alone" not in found.text()


def test_a_file_that_ends_within_a_row_or_is_missing(plain, tmp_path):
    folder = altered(plain, tmp_path, lambda rows: rows)
    path = folder / on_disk.FOLDER / on_disk.GRADIENTS
    with path.open("ab") as file:
        file.write(b"part")
    assert compare(plain, folder).b.cut_off
    path.unlink()
    with pytest.raises(RecordError, match=r"gradients\.bin cannot be read"):
        compare(plain, folder)


def test_a_record_of_before_there_were_gradients(plain, tmp_path):
    folder = altered(plain, tmp_path, lambda rows: rows)
    inner = folder / on_disk.FOLDER
    layout = dataclasses.replace(on_disk.read_layout(inner), gradients=())
    on_disk.write_layout(inner, layout)
    text = (inner / on_disk.LAYOUT).read_text()
    old = text.replace(',\n "gradients": []', "")
    assert old != text
    (inner / on_disk.LAYOUT).write_text(old)
    assert on_disk.read_layout(inner) == layout
    assert compare(plain, folder).verdict == "bit-identical"
