"""A record holds the bits of a run, changes none, and is readable whatever happened."""

import errno
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, bits, both, config, make_rig

import rjax
from rjax import repro
from rjax.digests import values
from rjax.files import AppendOnly
from rjax.repro import RecordError, digest, tensors
from rjax.repro import format as on_disk
from rjax.repro.snapshots import load_tensor
from rjax.repro.waiting import FETCH

CONFIG = config(optimizer=rjax.optim.momentum(), ema=rjax.Ema(0.9))


def loss_fn(params, batch_stats, batch, key):
    pulls = [jnp.sum(params[k].astype(jnp.float32) * batch[k]) for k in params]
    loss = sum(pulls, start=jnp.zeros(()))
    metrics = {
        "half": loss.astype(jnp.float16),
        "hits": jnp.int32(3),
        "deep": {"good": loss > 0},
        "wide": jnp.ones(3),  # no number: it has no column
    }
    return loss, (batch_stats, metrics)


def rig():
    return make_rig(BOTH, CONFIG, loss_fn)


def batch(i):
    """Return a batch; the one of step 7 makes its step a skip."""
    return both(np.nan if i == 7 else 0.01 * (i + 1))


def train(folder, steps, every=10, **options):
    """Train and record; return the states, before and after each step, and reports."""
    made = rig()
    state, reports = made.state(), []
    states = [jax.tree.map(jnp.copy, state)]
    with repro.record(folder, made.plan, state, every=every, **options) as recording:
        for i in range(steps):
            state, report = made.jitted(state, batch(i))
            recording.add(state, report)
            states.append(jax.tree.map(jnp.copy, state))
            reports.append(report)
    return states, reports


def read(folder) -> tuple[on_disk.Layout, np.ndarray, np.ndarray]:
    """Return layout, rows of steps and rows of digests."""
    inner = Path(folder) / on_disk.FOLDER
    layout = on_disk.read_layout(inner)
    found = []
    for name, row in (("steps", layout.step_row), ("digests", layout.digest_row)):
        rows = on_disk.Rows(inner / f"{name}.bin", row)
        found.append(rows.read(0, rows.count))
    return layout, found[0], found[1]


def test_words_are_the_bits_of_the_reports(tmp_path):
    _, reports = train(tmp_path / "run", 70)
    layout, steps, _ = read(tmp_path / "run")
    assert steps["step"].tolist() == list(range(70))
    columns = dict(layout.columns)
    assert columns["metrics/half"] == "float16" and columns["metrics/hits"] == "int32"
    assert columns["metrics/deep/good"] == "bool" and "metrics/wide" not in columns
    for i, (name, dtype) in enumerate(layout.columns):
        words = steps["words"][:, i]
        for row, report in zip(words, reports, strict=True):
            leaf = report.metrics if name.startswith("metrics/") else report
            for key in name.removeprefix("metrics/").split("/"):
                leaf = leaf[key] if isinstance(leaf, dict) else getattr(leaf, key)
            host = np.asarray(leaf)
            assert str(host.dtype) == dtype
            wanted = int.from_bytes(host.tobytes(), sys.byteorder)
            assert int(row) == wanted, name
    assert np.isnan(steps["words"][7].view(np.float32)[0])


@pytest.mark.parametrize(("every", "seen"), [(1, range(13)), (5, (0, 5, 10)), (0, ())])
def test_digests_are_those_of_the_states(tmp_path, every, seen):
    states, _ = train(tmp_path / "run", 12, every)
    layout, _, digests = read(tmp_path / "run")
    assert digests["step"].tolist() == list(seen)
    assert layout.tensors == tensors(rig().plan, states[0])
    for step, words in zip(digests["step"], digests["words"], strict=True):
        np.testing.assert_array_equal(words, digest(rig().plan, states[step]))


def test_recording_changes_no_bit(tmp_path):
    states, reports = train(tmp_path / "run", 20, every=1, snapshot_every=3)
    made = rig()
    state, plain = made.run(made.state(), map(batch, range(20)))
    assert bits(state) == bits(states[-1])
    assert [bits(report) for report in plain] == [bits(report) for report in reports]


def test_snapshots_hold_every_tensor(tmp_path):
    states, _ = train(tmp_path / "run", 6, snapshot_every=3)
    plan = rig().plan
    inner = tmp_path / "run" / on_disk.FOLDER
    found = sorted(path.name for path in (inner / on_disk.SNAPSHOTS).iterdir())
    assert found == [f"{step:010d}.npz" for step in (0, 3, 6)]
    for step in (0, 3, 6):
        path = on_disk.snapshot_path(inner, step)
        wanted = values(plan, states[step])
        for tensor, host in zip(tensors(plan, states[step]), wanted, strict=True):
            np.testing.assert_array_equal(load_tensor(path, tensor.name), host)
    with pytest.raises(RecordError, match="holds no tensor 'other'"):
        load_tensor(path, "other")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecordError, match="is damaged"):
        load_tensor(path, "scale")
    with pytest.raises(RecordError, match="is not there"):
        load_tensor(path.with_name("x.npz"), "scale")


def test_the_manifest_says_what_ran_and_how_it_ended(tmp_path):
    train(tmp_path / "run", 3, facts={"seed": 7})
    found = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert found["status"] == "finished" and found["results"] == {"steps": 3}
    assert found["seed"] == 7 and found["config"]["optimizer"]["momentum"] == 0.9
    assert found["plan"]["fingerprint"] == rig().plan.fingerprint
    assert {"driver", "kind", "count"} <= found["device"].keys()
    assert "jax_default_prng_impl" in found["jax_config"]


def test_a_run_that_fails_says_so_and_leaves_its_record(tmp_path):
    made = rig()
    state = made.state()
    recording = repro.record(tmp_path / "run", made.plan, state, every=2)
    with pytest.raises(ZeroDivisionError), recording:
        for i in range(5):
            state, report = made.jitted(state, batch(i))
            recording.add(state, report)
        raise ZeroDivisionError
    assert len(read(tmp_path / "run")[1]) == 5
    found = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert found["status"] == "failed"


def test_a_manifest_that_is_there_stays(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    train(tmp_path, 2)
    assert (tmp_path / "manifest.json").read_text() == "{}"


def test_a_second_record_in_one_folder_is_refused(tmp_path):
    train(tmp_path, 1)
    with pytest.raises(RecordError, match="holds a record already; give a folder"):
        train(tmp_path, 1)


@pytest.mark.parametrize("value", [-1, 1.5, True])
@pytest.mark.parametrize("name", ["every", "snapshot_every"])
def test_steps_that_are_no_number_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number >= 0"):
        train(tmp_path, 1, **{name: value})


def test_it_goes_on_from_a_state_that_has_seen_steps(tmp_path):
    made = rig()
    state, _ = made.run(made.state(), map(batch, range(3)))
    with repro.record(tmp_path / "run", made.plan, state, every=2) as recording:
        for i in range(3, 6):
            state, report = made.jitted(state, batch(i))
            recording.add(state, report)
    _, steps, digests = read(tmp_path / "run")
    assert steps["step"].tolist() == [3, 4, 5]
    assert digests["step"].tolist() == [3, 4, 6]


def test_no_record_at_all(tmp_path):
    with pytest.raises(RecordError, match="has no record of a run"):
        on_disk.read_layout(tmp_path / on_disk.FOLDER)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "[" * 10**5])
def test_a_layout_that_is_none(tmp_path, text):
    (tmp_path / on_disk.LAYOUT).write_text(text)
    with pytest.raises(RecordError, match="damaged or was not written by rjax"):
        on_disk.read_layout(tmp_path)


def test_a_layout_of_another_version(tmp_path):
    (tmp_path / on_disk.LAYOUT).write_text('{"format": 99}')
    with pytest.raises(RecordError, match="has format 99, this version of rjax reads"):
        on_disk.read_layout(tmp_path)


class TestRows:
    ROW = on_disk.Layout((("a", "int32"), ("b", "int32")), (), 1, "").step_row

    def written(self, tmp_path, rows=5):
        words = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
        data = on_disk.pack(self.ROW, range(rows), words)
        assert len(data) == rows * self.ROW.itemsize == rows * 16
        path = tmp_path / "rows.bin"
        path.write_bytes(data)
        return path, data, words

    def test_whole(self, tmp_path, monkeypatch):
        path, _, words = self.written(tmp_path)
        monkeypatch.setattr(on_disk, "_CHUNK", 32)
        rows = on_disk.Rows(path, self.ROW)
        chunks = list(rows.chunks())
        assert [len(chunk) for chunk in chunks] == [2, 2, 1] and not rows.cut_off
        np.testing.assert_array_equal(np.concatenate(chunks)["words"], words)

    @pytest.mark.parametrize("left", range(81))
    def test_cut_off_anywhere(self, tmp_path, left):
        path, data, words = self.written(tmp_path)
        path.write_bytes(data[:left])
        rows = on_disk.Rows(path, self.ROW)
        assert rows.count == left // 16 and rows.cut_off == (left % 16 > 0)
        np.testing.assert_array_equal(
            rows.read(0, rows.count)["words"], words[: left // 16]
        )

    @pytest.mark.parametrize("at", range(80))
    def test_one_flipped_bit_anywhere(self, tmp_path, at):
        path, data, _ = self.written(tmp_path)
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        rows = on_disk.Rows(path, self.ROW)
        if at >= 64:  # the last row may have been on its way
            assert rows.count == 4 and rows.cut_off
            return
        with pytest.raises(RecordError, match=f"damaged at row {at // 16} of 5"):
            list(rows.chunks())

    def test_missing(self, tmp_path):
        with pytest.raises(RecordError, match="cannot be read"):
            on_disk.Rows(tmp_path / "none.bin", self.ROW)


def test_bytes_that_do_not_fit_leave_those_before_them(tmp_path, monkeypatch):
    file = AppendOnly(tmp_path / "x")
    file.append(b"first")
    inner = file._file

    class Short:
        """Takes three bytes, then none."""

        left = 1

        def write(self, data):
            if not self.left:
                raise OSError(errno.ENOSPC, "full")
            self.left -= 1
            return inner.write(data[:3])

        def __getattr__(self, name):
            return getattr(inner, name)

    monkeypatch.setattr(file, "_file", Short())
    with pytest.raises(OSError, match="full"):
        file.append(b"second")
    monkeypatch.setattr(file, "_file", inner)
    file.append(b"third")
    file.close()
    assert (tmp_path / "x").read_bytes() == b"firstthird"


ENDLESS = """
import sys, itertools
sys.path[:0] = {paths!r}
from repro.test_record import rig, batch
from rjax import repro
made = rig()
state = made.state()
with repro.record({folder!r}, made.plan, state, every=3) as recording:
    for i in itertools.count():
        state, report = made.jitted(state, batch(i))
        recording.add(state, report)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_run_leaves_a_readable_record(tmp_path, seed):
    paths = [str(Path(__file__).parents[1]), str(Path(rjax.__file__).parents[1])]
    script = ENDLESS.format(paths=paths, folder=str(tmp_path / "run"))
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", script], env=env)
    steps = tmp_path / "run" / on_disk.FOLDER / on_disk.STEPS
    try:
        for _ in range(600):
            if steps.exists() and steps.stat().st_size > 4000:
                break
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.1)
        time.sleep(random.Random(seed).random())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, rows, digests = read(tmp_path / "run")
    count = len(rows)
    assert count >= 50 and rows["step"].tolist() == list(range(count))
    made = rig()
    state, wanted = made.state(), []
    for i in range(digests["step"][-1] + 1):
        if i % 3 == 0 and i <= 30:
            wanted.append(np.asarray(digest(made.plan, state)))
        state, _ = made.jitted(state, batch(i))
        if i == 30:
            break
    np.testing.assert_array_equal(digests["words"][:11], np.stack(wanted))
    assert digests["step"].tolist() == list(range(0, 3 * len(digests), 3))
    # One load less, should the kill have come between the writes of two files.
    assert digests["step"][-1] >= count - 3 - FETCH
    found = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert found["status"] == "running"


def test_the_loop_waits_for_nothing(tmp_path, monkeypatch):
    """Only steps that are long past are fetched while the loop goes on."""
    from rjax.repro import recording as module
    from rjax.repro.waiting import IN_FLIGHT

    begun, looked = 0, []
    real = jax.device_get

    def watching(tree):
        looked.append(begun)
        return real(tree)

    made = rig()
    state = made.state()
    monkeypatch.setattr(module.jax, "device_get", watching)
    recording = repro.record(tmp_path / "run", made.plan, state, every=1)
    patient = functools.partial(monkeypatch.setattr, module.Waiting, "due")
    patient(lambda self: 50 if len(self) >= 50 + IN_FLIGHT else 0)
    for i in range(120):
        state, report = made.jitted(state, batch(i))
        begun += 1
        recording.add(state, report)
    assert looked == [58, 58, 108, 108]
    recording.close()
    assert len(read(tmp_path / "run")[2]) == 121
