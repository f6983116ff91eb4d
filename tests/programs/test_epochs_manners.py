"""A captured epoch as a program: its record, its data, what it refuses and tells."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits

import rjax
from rjax import repro
from rjax.programs import hlo
from rjax.repro import format as on_disk

FILES = (on_disk.LAYOUT, on_disk.STEPS, on_disk.DIGESTS, on_disk.GRADIENTS)
EXAMPLES, BATCH, STEPS = 64, 10, 6


def _loss(params, batch):
    x, y = batch
    wide = (x.astype(params["kernel"].dtype) @ params["kernel"]).astype(jnp.float32)
    return jnp.mean((wide - y[:, None].astype(jnp.float32)) ** 2)


@functools.cache
def made():
    """Return plan, first parameters, step and the step jitted."""
    params = {"kernel": np.arange(12, dtype=np.float32).reshape(6, 2) / 12}
    plan = rjax.make_plan(params, rjax.Config(learning_rate=0.01))
    step = rjax.make_train_step(rjax.stateless_loss(_loss), plan, digest_grads=True)
    return plan, params, step, jax.jit(step, donate_argnums=0)


def fresh(**changes):
    plan, params, *_ = made()
    return rjax.init_state(plan, params).replace(**changes)


@functools.cache
def data():
    """Return host arrays, as files give them; one example makes a step a skip."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 6)).astype(np.float16)
    x[5] = np.inf
    return x, rng.integers(0, 3, EXAMPLES)


@functools.cache
def captured(**options):
    options = {"shuffle": False, **options}
    return rjax.capture_epoch(made()[2], fresh(), data(), BATCH, **options)


def content(folder):
    inner = Path(folder) / on_disk.FOLDER
    return {name: (inner / name).read_bytes() for name in FILES}


class TestTheRecord:
    def loop(self, folder, epoch, steps, start=0, every=3):
        plan, _, _, step = made()
        state = fresh(step=start)
        with repro.record(folder, plan, state, every=every) as recording:
            for _ in range(steps):
                state, report = step(state, epoch.batch(state))
                recording.add(state, report)
        return state

    @pytest.mark.parametrize("start", [0, 3])
    def test_it_is_byte_for_byte_that_of_a_loop(self, tmp_path, start):
        """Two epochs a call, two blocks of three steps in each of them."""
        epoch = captured(shuffle=True, epochs=2, every=3)
        state = fresh(step=start)
        with repro.record(tmp_path / "b", made()[0], state, every=3) as recording:
            for _ in range(2):
                state, report = epoch(state)
                recording.add_scanned(state, report.reports, report.digests)
        wanted = self.loop(tmp_path / "a", epoch, 4 * STEPS, start)
        assert bits(state) == bits(wanted)
        assert content(tmp_path / "b") == content(tmp_path / "a")
        assert int(state.skipped) > 0

    def test_a_digest_is_where_a_scan_would_have_put_it(self):
        plan, _, step, _ = made()
        epoch = captured(shuffle=True, epochs=2, every=3)

        @jax.jit
        def scanned(state, batches):
            def body(state, batch):
                state, _ = step(state, batch)
                return state, repro.scanned_digest(plan, state, 3)

            return jax.lax.scan(body, state, batches)[1]

        batches = [epoch.batch(fresh(step=i)) for i in range(2 * STEPS)]
        wanted = scanned(fresh(), jax.tree.map(lambda *x: jnp.stack(x), *batches))
        _, report = epoch(fresh())
        assert report.digests.dtype == jnp.uint32
        np.testing.assert_array_equal(report.digests, wanted)

    def test_one_that_a_program_of_every_step_gives(self, tmp_path):
        """Blocks of a single step; and reports alone make a record without digests."""
        epoch = captured(every=1)
        for every in (1, 0):
            folder, state = tmp_path / str(every), fresh()
            with repro.record(folder / "b", made()[0], state, every=every) as recording:
                state, report = epoch(state)
                digests = report.digests if every else None
                recording.add_scanned(state, report.reports, digests)
            self.loop(folder / "a", epoch, STEPS, every=every)
            names = FILES if every else FILES[:2]
            for name in names:
                one, other = (folder / x / on_disk.FOLDER / name for x in "ab")
                assert one.read_bytes() == other.read_bytes()

    def test_a_call_that_starts_elsewhere_is_refused(self):
        epoch = captured(shuffle=True, epochs=2, every=3)
        said = (
            r"`state` must stand after a multiple of every=3 steps, .* got one after "
            r"{}; take the next {} one by one, with `.batch\(state\)`, or capture with"
        )
        state = fresh(step=4)
        with pytest.raises(ValueError, match=said.format(4, 2)):
            epoch(state)
        # Refused, it is not given away, and the steps that it lacks help.
        for _ in range(2):
            state, _ = made()[3](state, epoch.batch(state))
        state, _ = epoch(state)
        with pytest.raises(ValueError, match=said.format(17, 1)):
            epoch(state.replace(step=17))
        host = jax.device_get(fresh(step=5, key=state.key))
        with pytest.raises(ValueError, match=said.format(5, 1)):
            epoch(host)

    def test_the_next_call_waits_for_nothing(self, monkeypatch):
        epoch = captured(shuffle=True, epochs=2, every=3)
        state, _ = epoch(fresh())
        monkeypatch.setattr(jax, "device_get", None)
        for _ in range(2):
            state, _ = epoch(state)
        with pytest.raises(TypeError):  # another state is looked at
            epoch(fresh())


class TestTheProgram:
    def test_in_the_order_of_the_data_it_is_a_plain_loop(self):
        x, y = data()
        state, wanted = fresh(), fresh()
        state, report = captured()(state)
        losses = []
        for i in range(STEPS):
            here = slice(i * BATCH, (i + 1) * BATCH)
            wanted, one = made()[3](wanted, (x[here], y[here]))
            losses.append(float(one.loss))
        assert bits(state) == bits(wanted) and int(report.skips) == 1
        assert float(report.loss) == pytest.approx(np.mean(losses[1:]), rel=1e-6)
        assert report.reports is None and report.digests is None

    def test_nothing_is_stale_and_nothing_compiles(self, compilations):
        epoch, keys = captured(), jax.random.split(jax.random.key(0), 3)
        states = [
            fresh(learning_rate=rate, scale=scale, key=key, step=6 * i)
            for i, (rate, scale, key) in enumerate(
                zip((0.1, 0.1, 0.0), (1.0, 2.0, 4.0), keys, strict=True)
            )
        ]
        compilations.clear()
        found = [epoch(state) for state in states]
        assert not compilations
        masters = [np.asarray(state.master) for state, _ in found]
        assert (masters[0] != masters[2]).any()
        assert [float(report.last_scale) for _, report in found] == [1.0, 1.0, 2.0]
        np.testing.assert_array_equal(masters[2], fresh().master)  # of a rate of 0

    def test_the_state_is_taken_over(self):
        state = fresh()
        new, _ = captured()(state)
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        for epoch in (captured(), captured(shuffle=True, epochs=2, every=3)):
            with pytest.raises(ValueError, match="`state.* was given away .*; go on"):
                epoch(state)
        captured()(new)

    def test_no_step_asks_whether_a_digest_is_due(self):
        """No conditional comes with them; a block is a scan in a scan."""
        epoch = captured(shuffle=True, epochs=2, every=3)
        epoch.assert_static()
        asked = [e.hlo("lowered").count("stablehlo.case") for e in (epoch, captured())]
        assert asked[0] == asked[1]
        program = hlo.parse(epoch.hlo())
        trips = [
            i.trips
            for body in program.computations.values()
            for i in body.values()
            if i.opcode == "while" and "threefry" not in i.path
        ]
        assert {2, 3} <= {*trips}

    def test_it_tells_of_itself(self):
        epoch = captured(shuffle=True, epochs=2, every=3)
        assert (epoch.steps, epoch.epochs, epoch.every) == (STEPS, 2, 3)
        assert isinstance(epoch, rjax.Captured) and epoch.plan is made()[0]
        begin = "CapturedEpoch(name=epoch_of_train_step, steps="
        assert repr(epoch).startswith(f"{begin}{STEPS}, epochs=2, every=3, data=")
        assert ", batch=" not in repr(epoch)
        table = epoch.stages()
        step = rjax.capture(made()[2], fresh(), epoch.batch(fresh())).stages()
        assert table.kernels >= 2 * STEPS * step.kernels
        assert {row.stages for row in step.rows} <= {row.stages for row in table.rows}
        memory = epoch.memory()
        assert memory.batch == EXAMPLES * (6 * 2 + 4)
        assert memory.state["master"] == 4 * made()[0].n
        assert epoch.cost()["flops"] > 0 and epoch.compile_seconds > 0
        page = epoch._repr_html_()
        assert f", 2 epochs of {STEPS} steps a call</p>" in page
        assert "<b>rjax program</b>: epoch_of_train_step" in page
        assert f"<summary>stages: {table.summary}</summary>" in page
        assert "temporaries" in page

    def test_it_is_saved_and_loaded_as_a_program_of_state_and_data(self, tmp_path):
        epoch = captured()
        loaded = rjax.load_captured(epoch.save(tmp_path / "epoch.rjax"), made()[0])
        assert bits(loaded(fresh(), epoch.data)) == bits(epoch(fresh()))


class TestTheData:
    def test_they_are_put_on_the_device_once(self):
        epoch = captured()
        x, y = epoch.data
        assert isinstance(x, jax.Array) and (x.dtype, y.dtype) == (np.float16, np.int32)
        on_device = jax.device_put(data())
        again = rjax.capture_epoch(made()[2], fresh(), on_device, BATCH, shuffle=False)
        found = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(again.data)]
        given = [a.unsafe_buffer_pointer() for a in on_device]
        assert found == given
        state = fresh()
        with jax.transfer_guard("disallow"):
            epoch.batch(state)
            epoch(state)
        assert not x.is_deleted()

    def test_others_of_the_same_shapes_may_be_given(self, compilations):
        epoch, (x, y) = captured(), data()
        other = x[::-1].copy(), y[::-1].copy()
        wanted = rjax.capture_epoch(made()[2], fresh(), other, BATCH, shuffle=False)
        state = fresh()
        compilations.clear()
        found = epoch(state, other)
        assert not compilations
        assert bits(found) == bits(wanted(fresh())) != bits(epoch(fresh()))
        assert bits(epoch.batch(fresh(), other)) == bits(wanted.batch(fresh()))

    def test_their_shapes_are_enough(self):
        shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, data()))
        state = jax.eval_shape(fresh)
        epoch = rjax.capture_epoch(made()[2], state, shapes, BATCH, shuffle=False)
        assert bits(epoch(fresh(), data())) == bits(captured()(fresh()))
        for call in (epoch, epoch.batch):
            with pytest.raises(ValueError, match="`data` must be given to every call"):
                call(fresh())

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                lambda x, y: (x[:-1], y[:-1]),
                r"`data\[0\]` is float16\[63, 6\], the program was compiled for "
                r"float16\[64, 6\]",
            ),
            (
                lambda x, y: (x, y.astype(np.float32)),
                r"`data\[1\]` is float32\[64\], the program was compiled for int32",
            ),
            (lambda x, y: [x, y], "`data` is PyTreeDef.*compiled for PyTreeDef"),
            (lambda x, y: (x, "labels"), r"`data\[1\]` must be an array, got str"),
        ],
    )
    def test_anything_else_is_refused(self, change, said):
        state = fresh()
        for call in (captured(), captured().batch):
            with pytest.raises(ValueError, match=said) as caught:
                call(state, change(*data()))
            assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
        captured()(state)

    def test_a_state_of_other_shapes_is_refused(self):
        bad = fresh(master=jnp.zeros(3))
        said = r"`state.master` is float32\[3\], the program was compiled for float32\["
        with pytest.raises(ValueError, match=said):
            captured()(bad)
        with pytest.raises(ValueError, match="which cannot be traced again"):
            jax.jit(lambda state: captured()(state))(fresh())


def capture(step=None, state=None, data_=None, batch_size=BATCH, **options):
    step = made()[2] if step is None else step
    state = fresh() if state is None else state
    data_ = data() if data_ is None else data_
    return rjax.capture_epoch(step, state, data_, batch_size, **options)


REFUSED = [
    (
        {"batch_size": 65},
        "`batch_size` must not exceed the 64 examples of the set, got",
    ),
    ({"batch_size": 0}, "`batch_size` must be a whole number >= 1, got 0"),
    ({"batch_size": 8.0}, "`batch_size` must be a whole number >= 1, got 8.0"),
    ({"epochs": 0}, "`epochs` must be a whole number >= 1, got 0"),
    ({"every": -1}, "`every` must be a whole number >= 0, got -1"),
    ({"every": True}, "`every` must be a whole number >= 0, got True"),
    (
        {"every": 4},
        "`every` must divide the 6 steps of an epoch, .* got 4; take 3",
    ),
    ({"every": 10}, "`every` must divide the 6 steps .* got 10; take 6, here and for"),
    ({"data_": {}}, "`data` must hold arrays, got none"),
    (
        {"data_": np.float32(1)},
        r"`data` must have one row per example, got float32",
    ),
    (
        {"data_": {"x": np.zeros((5, 2)), "y": np.zeros(4)}},
        r"`data\['y'\]` has 4 rows, `data\['x'\]` has 5; every array needs one row",
    ),
    ({"data_": (np.zeros(4), "y")}, r"`data\[1\]` must be an array, got str"),
    (
        {"state": {"w": np.zeros(3)}},
        "`state` must be one from `rjax.init_state`",
    ),
    ({"step": lambda s, b: s}, r"`step` must return a pair \(state, report\), got Re"),
    ({"step": lambda s, b: (s, {})}, "`step` must return the report of .* got dict;"),
    (
        {"step": lambda s, b: (s.replace(master=s.mu), made()[2](s, b)[1]), "every": 3},
        "`plan` must be given for digests, as `step` does not know its own",
    ),
    (
        {"step": lambda s, b: (s.replace(master=s.mu[1:]), made()[2](s, b)[1])},
        r"like the one it was given, .*; `state.master` is float32\[128\], then float32"
        r"\[127\]",
    ),
    (
        {"step": lambda s, b: (s.replace(mu=None), made()[2](s, b)[1])},
        r"like the one it was given, .*; `state.mu` is float32\[128\], then None",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_cannot_be_captured_is_refused_in_a_sentence(given, said):
    with pytest.raises(ValueError, match=said) as caught:
        capture(**given)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
