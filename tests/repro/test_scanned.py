"""Epochs in one `lax.scan`: the record is, byte for byte, that of a loop."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits

import rjax
from rjax import repro
from rjax.repro import format as on_disk
from rjax.repro import recording as module
from rjax.repro import scanned, scanned_digest
from rjax.repro.snapshots import load_tensor

FILES = (on_disk.LAYOUT, on_disk.STEPS, on_disk.DIGESTS, on_disk.GRADIENTS)
EVERY = 5


def _loss(params, batch):
    x, y = batch
    for name in ("one", "two"):
        x = jnp.tanh(rjax.ops.dense(x, params[name]["kernel"], params[name]["bias"]))
    return jnp.mean((x.astype(jnp.float32) - y) ** 2)


@functools.cache
def made():
    """Return plan, first parameters, the jitted step, and the epoch of some steps."""
    rng = np.random.default_rng(0)
    params = {
        name: {
            "kernel": rng.normal(size=shape).astype(np.float32),
            "bias": np.zeros(shape[1], np.float32),
        }
        for name, shape in (("one", (6, 8)), ("two", (8, 3)))
    }
    plan = rjax.make_plan(params, rjax.Config(ema=rjax.Ema(0.9)))
    loss_fn = rjax.stateless_loss(_loss)
    step = rjax.make_train_step(loss_fn, plan, digest_grads=True)

    def body(state, batch):
        state, report = step(state, batch)
        return state, (report, scanned_digest(plan, state, EVERY))

    def epoch(state, batches):
        return jax.lax.scan(body, state, batches)

    return plan, params, *(jax.jit(f, donate_argnums=0) for f in (step, epoch))


def fresh():
    plan, params, *_ = made()
    return rjax.init_state(plan, params)


def batch(i):
    """Return a batch; the one of step 7 makes its step a skip."""
    rng = np.random.default_rng(i)
    x, y = rng.normal(size=(4, 6)), rng.normal(size=(4, 3))
    return x.astype(np.float16), np.float32(np.nan if i == 7 else 1) * np.float32(y)


def stacked(first, last):
    return jax.tree.map(lambda *x: np.stack(x), *map(batch, range(first, last)))


def loop(folder, last, **options):
    """Record a loop; return the last state."""
    plan, _, step, _ = made()
    state = fresh()
    with repro.record(folder, plan, state, **options) as recording:
        for i in range(last):
            state, report = step(state, batch(i))
            recording.add(state, report)
    return state


def scans(folder, ends, **options):
    """Record scans up to each of these steps; return the last state."""
    plan, _, _, epoch = made()
    state, first = fresh(), 0
    with repro.record(folder, plan, state, **options) as recording:
        for last in ends:
            state, (reports, digests) = epoch(state, stacked(first, last))
            recording.add_scanned(state, reports, digests)
            first = last
    return state


def content(folder):
    inner = Path(folder) / on_disk.FOLDER
    return {name: (inner / name).read_bytes() for name in FILES}


def written(folder):
    """Return how many rows of steps, digests and gradients there are."""
    inner = Path(folder) / on_disk.FOLDER
    layout = on_disk.read_layout(inner)
    rows = layout.step_row, layout.digest_row, layout.gradient_row
    files = zip(FILES[1:], rows, strict=True)
    return tuple(on_disk.Rows(inner / name, row).count for name, row in files)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def snapshots(folder):
    """Return after how many steps there are snapshots."""
    found = (folder / on_disk.FOLDER / on_disk.SNAPSHOTS).glob("*.npz")
    return sorted(int(path.stem) for path in found)


@jax.jit
def slowly(tree, x):
    """Return the tree, much later than a scan of it is taken."""
    x = jax.lax.fori_loop(0, 3000, lambda _, x: x @ x, x)
    return tree, x.sum()


@pytest.mark.parametrize("ends", [(12,), (6, 12), (4, 8, 12)])
def test_it_is_the_record_of_a_loop(tmp_path, ends):
    one = loop(tmp_path / "a", 12, every=EVERY)
    other = scans(tmp_path / "b", ends, every=EVERY)
    assert bits(one) == bits(other) and int(one.skipped) == 1
    found = content(tmp_path / "a")
    assert content(tmp_path / "b") == found
    layout = on_disk.read_layout(tmp_path / "b" / on_disk.FOLDER)
    assert len(found[on_disk.STEPS]) == 12 * layout.step_row.itemsize
    assert len(found[on_disk.DIGESTS]) == 3 * layout.digest_row.itemsize
    assert len(found[on_disk.GRADIENTS]) == 3 * layout.gradient_row.itemsize
    said = repro.compare(tmp_path / "a", tmp_path / "b")
    assert said.verdict == "bit-identical" and said.compared == (12, 3)


def test_a_scan_under_way_is_not_waited_for(tmp_path):
    plan, _, _, epoch = made()
    state, x = fresh(), jnp.eye(256)
    with repro.record(tmp_path / "b", plan, state, every=EVERY) as recording:
        state, (reports, digests) = epoch(state, stacked(0, 6))
        recording.add_scanned(state, reports, digests)
        late, _ = slowly(epoch(state, stacked(6, 12)), x)
        state, (reports, digests) = late
        recording.add_scanned(state, reports, digests)
        under_way = not any(x.is_ready() for x in (state.step, reports.step, digests))
        rows = written(tmp_path / "b")
        recording.flush()
        assert written(tmp_path / "b") == (12, 3, 3)
    assert under_way and rows == (6, 2, 2)
    loop(tmp_path / "a", 12, every=EVERY)
    assert content(tmp_path / "b") == content(tmp_path / "a")


def test_a_kill_leaves_all_but_the_scan_that_waits(tmp_path):
    """Nothing is buffered: what it leaves is what lies there after a call."""
    plan, _, _, epoch = made()
    state = fresh()
    with repro.record(tmp_path / "b", plan, state, every=EVERY) as recording:
        for last, rows in (4, (0, 0, 0)), (8, (4, 1, 1)), (12, (8, 2, 2)):
            state, (reports, digests) = epoch(state, stacked(last - 4, last))
            recording.add_scanned(state, reports, digests)
            assert written(tmp_path / "b") == rows
        shutil.copytree(tmp_path / "b", tmp_path / "killed")
    loop(tmp_path / "a", 12, every=EVERY)
    said = repro.compare(tmp_path / "a", tmp_path / "killed")
    assert said.verdict == "incomplete" and said.compared == (8, 2)
    assert manifest(tmp_path / "killed")["status"] == "running"


def test_an_interrupt_loses_no_scan_that_was_taken(tmp_path, monkeypatch):
    real, left = jax.device_get, 1

    def interrupted(tree):
        nonlocal left
        if left:
            left -= 1
            raise KeyboardInterrupt
        return real(tree)

    monkeypatch.setattr(scanned.jax, "device_get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scans(tmp_path, (4, 8), every=EVERY)
    assert written(tmp_path) == (4, 1, 1)


def test_the_state_may_be_given_away_at_once(tmp_path):
    plan, _, _, epoch = made()
    state = fresh()
    recording = repro.record(tmp_path / "b", plan, state, every=EVERY)
    state, (reports, digests) = epoch(state, stacked(0, 6))
    recording.add_scanned(state, reports, digests)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    recording.close()
    loop(tmp_path / "a", 6, every=EVERY)
    assert content(tmp_path / "b") == content(tmp_path / "a")


@pytest.mark.parametrize("turns", [(1, 1, 1, 6, 1, 1, 1), (4, 1, 4, 3), (6, 1, 1, 4)])
def test_scans_and_single_steps_take_turns(tmp_path, turns):
    plan, _, step, epoch = made()
    state, at = fresh(), 0
    with repro.record(tmp_path / "b", plan, state, every=EVERY) as recording:
        for steps in turns:
            if steps == 1:
                state, report = step(state, batch(at))
                recording.add(state, report)
            else:
                state, found = epoch(state, stacked(at, at + steps))
                recording.add_scanned(state, *found)
            at += steps
    loop(tmp_path / "a", 12, every=EVERY)
    assert content(tmp_path / "b") == content(tmp_path / "a")


def test_reports_that_a_loop_fetches_come_after_a_scan(tmp_path):
    plan, _, step, epoch = made()
    state, reports = fresh(), []
    with repro.record(tmp_path / "b", plan, state, every=EVERY) as recording:
        state, found = epoch(state, stacked(0, 6))
        recording.add_scanned(state, *found)
        for i in range(6, 12):
            state, report = step(state, batch(i))
            recording.observe(state, report)
            assert written(tmp_path / "b") == (6, 2, 2)
            reports.append(jax.device_get(report))
        recording.take(jax.tree.map(lambda *leaves: np.stack(leaves), *reports))
    loop(tmp_path / "a", 12, every=EVERY)
    assert content(tmp_path / "b") == content(tmp_path / "a")


def test_digests_of_every_step_serve_any_recording(tmp_path):
    """`digest` in the body gives more than is asked for."""
    plan, _, _, _ = made()
    step = rjax.make_train_step(rjax.stateless_loss(_loss), plan, digest_grads=True)

    @jax.jit
    def epoch(state, batches):
        def body(state, batch):
            state, report = step(state, batch)
            return state, (report, repro.digest(plan, state))

        return jax.lax.scan(body, state, batches)

    state = fresh()
    last, (reports, digests) = epoch(state, stacked(0, 4))
    for every in (1, 3, 0):
        folder = tmp_path / str(every)
        with repro.record(folder / "b", plan, state, every=every) as recording:
            recording.add_scanned(last, reports, digests if every else None)
        loop(folder / "a", 4, every=every)
        for name in (on_disk.STEPS, on_disk.DIGESTS):
            one, other = (folder / x / on_disk.FOLDER / name for x in "ab")
            assert one.read_bytes() == other.read_bytes()


def test_a_digest_every_k_steps_and_zeros_in_between():
    plan, _, step, epoch = made()
    state, (_, digests) = epoch(fresh(), stacked(0, 6))
    assert digests.shape[0] == 6 and digests.dtype == jnp.uint32
    assert np.flatnonzero(np.asarray(digests).any(axis=(1, 2))).tolist() == [4]
    state = fresh()
    for i in range(5):
        state, _ = step(state, batch(i))
    digest = jax.jit(repro.digest, static_argnums=0)
    np.testing.assert_array_equal(digests[4], digest(plan, state))


def test_only_the_steps_that_have_a_digest_pay():
    plan, *_ = made()
    jaxpr = jax.make_jaxpr(lambda s: scanned_digest(plan, s, 3))(fresh()).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("cond") == 1 and len(names) < 20
    assert not {"concatenate", "scatter-add", "xor"} & {*names}


def test_a_scan_without_digests_trains_the_same(tmp_path):
    plan, _, step, epoch = made()
    state, _ = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(fresh(), stacked(0, 12))
    other, _ = epoch(fresh(), stacked(0, 12))
    assert bits(state) == bits(other)


@pytest.mark.parametrize(
    ("every", "seen"), [(0, ()), (4, (0, 6, 12)), (10, (0, 12)), (100, (0,))]
)
def test_snapshots_are_those_of_the_ends(tmp_path, every, seen):
    scans(tmp_path, (6, 12), every=EVERY, snapshot_every=every)
    assert snapshots(tmp_path) == list(seen)


def test_a_snapshot_is_taken_at_once_and_its_steps_are_there(tmp_path):
    plan, _, _, epoch = made()
    state = fresh()
    folder = tmp_path / "b"
    with repro.record(folder, plan, state, every=EVERY, snapshot_every=6) as recording:
        state, (reports, digests) = epoch(state, stacked(0, 4))
        recording.add_scanned(state, reports, digests)
        assert snapshots(folder) == [0] and written(folder)[0] == 0
        state, (reports, digests) = epoch(state, stacked(4, 8))
        wrong = dataclasses.replace(reports, step=reports.step + 1)
        with pytest.raises(ValueError, match="got steps 5 to 8"):
            recording.add_scanned(state, wrong, digests)
        assert snapshots(folder) == [0] and written(folder)[0] == 4
        recording.add_scanned(state, reports, digests)
        assert snapshots(folder) == [0, 8] and written(folder)[0] == 8
        path = on_disk.snapshot_path(recording.folder, 8)
        assert load_tensor(path, "step") == 8


def test_what_is_written_at_any_moment_is_a_loops_record(tmp_path, monkeypatch):
    """A disk that is full, or a kill, leaves whole rows and digests up to there."""
    monkeypatch.setattr(module, "FETCH", 3)
    scans(tmp_path / "b", (12,), every=EVERY)
    whole = content(tmp_path / "b")
    real, left = module.AppendOnly.append, 6

    def failing(self, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("full")
        real(self, data)

    monkeypatch.setattr(module.AppendOnly, "append", failing)
    with pytest.raises(OSError, match="full"):
        scans(tmp_path / "a", (12,), every=EVERY)
    part = content(tmp_path / "a")
    assert manifest(tmp_path / "a")["status"] == "failed"
    assert all(whole[name].startswith(part[name]) for name in FILES)
    layout = on_disk.read_layout(tmp_path / "a" / on_disk.FOLDER)
    # Steps, gradients and digests of three steps, then the same of three more.
    assert len(part[on_disk.STEPS]) == 6 * layout.step_row.itemsize
    assert len(part[on_disk.DIGESTS]) == 2 * layout.digest_row.itemsize


class TestBadUse:
    """Each is one sentence, and the record goes on as if the scan had not been."""

    def refused(self, folder, words, change, late=False, every=EVERY):
        """See the changed scan refused: at once, or when it is to be written."""
        plan, _, _, epoch = made()
        state = fresh()
        with repro.record(folder / "b", plan, state, every=every) as recording:
            state, (reports, digests) = epoch(state, stacked(0, 6))
            given = change(state, reports, digests)
            if late:
                recording.add_scanned(*given)
            with pytest.raises(ValueError, match=words):
                recording.flush() if late else recording.add_scanned(*given)
            assert (recording.folder / on_disk.STEPS).read_bytes() == b""
            if every == EVERY:
                recording.add_scanned(state, reports, digests)
        if every == EVERY:
            loop(folder / "a", 6, every=every)
            assert content(folder / "b") == content(folder / "a")

    def test_no_digests(self, tmp_path):
        words = r"`digests` must come out of the scan, as .* every=5, got None; return"
        self.refused(tmp_path, words, lambda state, reports, digests: (state, reports))

    @pytest.mark.parametrize(
        "change", [lambda x: x[:-1], lambda x: x[:, 1:], lambda x: x.astype(jnp.int32)]
    )
    def test_other_digests(self, tmp_path, change):
        words = r"`digests` must be uint32\[6, \d+, 2\], .*, got u?int32\[\d, \d+, 2\]"
        self.refused(tmp_path, words, lambda s, r, digests: (s, r, change(digests)))

    def test_digests_every_other_number_of_steps(self, tmp_path):
        words = "must hold one after every 2 steps, got none after 2; return .*, 2. fr"
        self.refused(tmp_path, words, lambda *given: given, late=True, every=2)

    @pytest.mark.parametrize(
        ("given", "span"),
        [([1, 2, 3, 4, 5, 6], "steps 1 to 6"), ([0, 1, 2, 4, 5, 6], "steps 0 to 6")],
    )
    def test_steps_that_do_not_come_next(self, tmp_path, given, span):
        def later(state, reports, digests):
            return state, dataclasses.replace(reports, step=steps), digests

        steps = jnp.array(given)
        words = f"come next in the record, expected steps 0 to 5, got {span}; rec"
        self.refused(tmp_path, words, later, late=True)

    def test_one_report(self, tmp_path):
        def first(state, reports, digests):
            return state, jax.tree.map(lambda x: x[0], reports), digests

        words = r"must be those of single steps stacked .* shape \[\]; use `add`"
        self.refused(tmp_path, words, first)

    def test_another_state(self, tmp_path):
        def before(state, reports, digests):
            return fresh(), reports, digests

        words = "`state` must be the one after the last of steps 0 to 5, got .* 0 steps"
        self.refused(tmp_path, words, before, late=True)

    def test_stacked_states(self, tmp_path):
        def all_of_them(state, reports, digests):
            return state.replace(step=reports.step + 1), reports, digests

        words = r"after the last of steps 0 to 5, got one after \[1, .*, 6\] steps"
        self.refused(tmp_path, words, all_of_them)

    def test_other_numbers_than_before(self, tmp_path):
        plan, _, step, epoch = made()
        state = fresh()
        with repro.record(tmp_path, plan, state, every=EVERY) as recording:
            state, report = step(state, batch(0))
            recording.add(state, report)
            state, (reports, digests) = epoch(state, stacked(1, 7))
            reports = dataclasses.replace(reports, grad_digests=None)
            with pytest.raises(ValueError, match="hold the numbers of those recorded"):
                recording.add_scanned(state, reports, digests)

    @pytest.mark.parametrize(
        "call", ["add", "observe", "take", "add_scanned", "flush", "close"]
    )
    def test_the_next_call_finds_wrong_numbers(self, tmp_path, call):
        plan, _, _, epoch = made()
        state = fresh()
        recording = repro.record(tmp_path, plan, state, every=EVERY)
        state, (reports, digests) = epoch(state, stacked(0, 6))
        wrong = dataclasses.replace(reports, step=reports.step + 1)
        recording.add_scanned(state, wrong, digests)
        one = jax.tree.map(lambda x: x[0], reports)
        given = {
            "add": (state, one),
            "observe": (state, one),
            "take": (jax.device_get(reports),),
            "add_scanned": (state, reports, digests),
        }
        with pytest.raises(ValueError, match="expected steps 0 to 5, got steps 1 to 6"):
            getattr(recording, call)(*given.get(call, ()))
        assert written(tmp_path) == (0, 0, 0)
        if call != "close":
            recording.add_scanned(state, reports, digests)
            recording.close()
            assert written(tmp_path) == (6, 2, 2)
        assert recording._steps_file._file.closed
        found = manifest(tmp_path)
        wanted = ("failed", 0) if call == "close" else ("finished", 6)
        assert (found["status"], found["results"]["steps"]) == wanted

    def test_wrong_numbers_do_not_hide_why_a_run_failed(self, tmp_path):
        plan, _, _, epoch = made()
        state = fresh()
        with (
            pytest.raises(ValueError, match="got steps 1 to 6") as error,
            repro.record(tmp_path, plan, state, every=EVERY) as recording,
        ):
            state, (reports, digests) = epoch(state, stacked(0, 6))
            wrong = dataclasses.replace(reports, step=reports.step + 1)
            recording.add_scanned(state, wrong, digests)
            raise ZeroDivisionError
        assert isinstance(error.value.__context__, ZeroDivisionError)
        assert manifest(tmp_path)["status"] == "failed"
        assert recording._digests_file._file.closed

    @pytest.mark.parametrize("every", [0, -1, True, 2.0])
    def test_no_number_of_steps(self, every):
        plan, *_ = made()
        with pytest.raises(ValueError, match="`every` must be a whole number >= 1"):
            scanned_digest(plan, fresh(), every)


def test_a_scan_of_no_steps_leaves_nothing(tmp_path):
    plan, _, _, epoch = made()
    state = fresh()
    with repro.record(tmp_path, plan, state, every=EVERY) as recording:
        none = jax.tree.map(lambda x: x[:0], stacked(0, 1))
        state, (reports, digests) = epoch(state, none)
        recording.add_scanned(state, reports, digests)
    assert (tmp_path / on_disk.FOLDER / on_disk.STEPS).read_bytes() == b""
