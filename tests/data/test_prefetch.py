"""Two buffers: order, bits, bounds, errors in their turn, and an end in any case."""

import gc
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, both, config, digest, fresh_process, make_rig

from rjax.data.handover import Handover, Waited
from rjax.data.prefetch import prefetch
from rjax.regions import Region

# The function of this name hides its module from an import.
prefetching = sys.modules[prefetch.__module__]
# Of nothing else that is alive while these tests run: an error of one test may keep its
# batches beyond it.
ODD, EVEN = 1237, 1238


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; not for longer than a test may ever take."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def running() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "rjax-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until(lambda: not running())


def numbered(count: int) -> Iterator[np.ndarray]:
    return (np.full(ODD, i, np.float32) for i in range(count))


def firsts(batches: Iterable[Any]) -> list[float]:
    return [float(batch[0]) for batch in batches]


LEAVES = {
    "f16": np.arange(6, dtype=np.float16).reshape(2, 3) / 7,
    "bf16": np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
    "u8": np.arange(256, dtype=np.uint8),
    "i64": np.array([-1, 2**31 + 5]),
    "f64": np.array([0.1, np.nan, -0.0, 1e30]),
    "bool": np.array([True, False]),
    "odd": np.arange(30.0).reshape(5, 6).T[::-2, 1:],
    "none": np.zeros((2, 0), np.float32),
    "scalar": np.array(3, np.int8),
    "number": np.float32(0.1),
}


@pytest.mark.parametrize(
    "batch",
    [LEAVES, (LEAVES["f16"], [LEAVES["u8"], None]), LEAVES["bool"], {}, 0.5, 7],
    ids=["many", "nested", "leaf", "empty", "float", "int"],
)
def test_a_batch_has_the_bits_that_jax_gives_it(batch: Any) -> None:
    [found] = prefetch([batch])
    wanted = jax.device_put(batch)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
        assert ours.shape == theirs.shape
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
        assert ours.committed == theirs.committed


@pytest.mark.parametrize("kind", [lambda d: d, jax.sharding.SingleDeviceSharding])
def test_a_device_and_a_sharding_are_obeyed(kind: Any) -> None:
    where = kind(jax.devices()[0])
    [(x, y)] = prefetch([(np.zeros(3), np.ones(4))], (where, None))
    assert x.committed and not y.committed


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_batches_come_in_order(count: int) -> None:
    batches = prefetch(numbered(count))
    assert firsts(batches) == list(range(count))
    with pytest.raises(StopIteration):
        next(batches)


def test_training_has_the_bits_of_the_plain_loop(compilations: list[str]) -> None:
    rig = make_rig(BOTH, config())
    given = [both(0.5 * i, bias=i % 2 == 0) for i in range(6)]
    given[3] = both(np.nan)
    plain, _ = rig.run(rig.state(), given)
    before = len(compilations)
    state = rig.state()
    state, _ = rig.run(state, prefetch(given))
    assert digest(state) == digest(plain)
    assert len(compilations) == before


def test_settings_of_the_calling_thread_hold() -> None:
    with jax.enable_x64(True):
        batches = prefetch([LEAVES["i64"]])
    [found] = batches
    assert found.dtype == np.int64 and int(found[1]) == 2**31 + 5


def alive(size: int = ODD) -> int:
    return sum(x.shape == (size,) for x in jax.live_arrays())


def test_two_batches_lie_on_the_device_and_one_on_the_host() -> None:
    asked, host, seen = 0, [], []

    def left() -> int:
        return sum(batch() is not None for batch in host)

    def source() -> Iterator[np.ndarray]:
        nonlocal asked
        for i in range(7):
            asked += 1
            seen.append((alive(EVEN), left()))
            batch = np.full(EVEN, i, np.float32)
            host.append(weakref.ref(batch))
            yield batch
            del batch

    taken, former = 0, None
    for batch in prefetch(source()):
        taken += 1
        # The copy of the next one is under way before this one can be used.
        assert alive(EVEN) == (2 if taken < 7 else 1)
        until(lambda: asked == min(taken + 2, 7))  # noqa: B023
        time.sleep(0.002)
        assert asked == min(taken + 2, 7)
        assert alive(EVEN) <= 2 and left() <= 1
        assert former is None or former.is_deleted()
        former = batch
    assert taken == asked == 7 and not former.is_deleted()
    # Whenever the source was asked, nothing of it was left on the host.
    assert max(live for live, _ in seen) == 2 and not any(kept for _, kept in seen)


def aligned(size: int) -> np.ndarray:
    """Return zeros that a CPU device would share, not copy."""
    room = np.zeros(4 * size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + 4 * size].view(np.float32)


def test_a_source_may_reuse_its_memory() -> None:
    buffer, written = {"x": aligned(ODD), "y": aligned(8)}, 0

    def source() -> Iterator[Any]:
        nonlocal written
        for i in range(5):
            for array in buffer.values():
                array[:] = i
            written += 1
            yield buffer

    for i, batch in enumerate(prefetch(source())):
        until(lambda: written >= min(i + 3, 5))  # noqa: B023
        for array in batch.values():
            np.testing.assert_array_equal(array, np.float32(i))


def test_the_source_is_asked_once_the_copy_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, there, wait = 0, threading.Event(), jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: there.wait() and wait(x))

    def source() -> Iterator[np.ndarray]:
        nonlocal asked
        for batch in numbered(4):
            asked += 1
            yield batch

    with prefetch(source()) as batches:
        assert batches.nbytes == 2 * 4 * ODD
        until(lambda: alive() > 0)
        time.sleep(0.01)
        assert asked == 1
        there.set()
        assert firsts(batches) == [0, 1, 2, 3]


def failing(at: int, error: BaseException) -> Iterator[np.ndarray]:
    yield from numbered(at)
    raise error


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), ValueError()])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_the_source_raises_comes_in_its_turn(at: int, error: Any) -> None:
    batches, seen = prefetch(failing(at, error)), []
    with pytest.raises(type(error)) as caught:
        for batch in batches:
            seen.append(float(batch[0]))
    assert caught.value is error and seen == list(range(at))
    assert "failing" in [
        frame.name for frame in traceback.extract_tb(error.__traceback__)
    ]
    with pytest.raises(StopIteration):  # once
        next(batches)


class Endless:
    """A source that says when it is let go of."""

    def __init__(self) -> None:
        self.closed = False

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            while True:
                yield np.zeros(ODD, np.float32)
        finally:
            self.closed = True


def breaks(source: Endless) -> None:
    for _ in prefetch(source):
        break


def closes(source: Endless) -> None:
    batches = prefetch(source)
    batch = next(batches)
    batches.close()
    assert not running() and not batch.is_deleted()
    count = alive()
    del batch
    assert alive() == count - 1
    assert list(batches) == []
    batches.close()


def raises(source: Endless) -> None:
    with pytest.raises(ZeroDivisionError), prefetch(source) as batches:
        for _ in batches:
            raise ZeroDivisionError
    assert not running()


def forgets(source: Endless) -> None:
    prefetch(source)


def forgets_a_cycle(source: Endless) -> None:
    batches: Any = prefetch(source)
    batches.myself = batches
    next(batches)
    del batches
    gc.collect()


@pytest.mark.parametrize("stop", [breaks, closes, raises, forgets, forgets_a_cycle])
def test_a_loop_that_stops_early_ends_the_thread(stop: Any) -> None:
    source, before = Endless(), alive()
    stop(source)
    until(lambda: source.closed and not running())
    assert alive() == before


def test_closing_leaves_a_long_read_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_PATIENCE", 0.01)
    reading, go = threading.Event(), threading.Event()

    def source() -> Iterator[np.ndarray]:
        yield from numbered(2)
        reading.set()
        go.wait()
        yield np.zeros(ODD, np.float32)

    before = alive()
    with prefetch(source()) as batches:
        assert float(next(batches)[0]) == 0
        reading.wait()
    assert list(batches) == [] and running()
    go.set()
    until(lambda: not running())
    assert alive() == before


def test_a_process_ends_whatever_the_threads_do() -> None:
    script = """
import faulthandler, os, signal, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rjax.data.prefetch import prefetch
sys.modules["rjax.data.prefetch"]._PATIENCE = 0.1

second = jax.devices()[1]
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
buffer = np.zeros((2, 64), np.float32)
def reused():
    for i in range(6):
        buffer[:] = i
        yield buffer, np.int32([i])
with jax.default_device(second):
    batches = prefetch([np.zeros(2)])
print(next(batches).devices() == {second})
for i, (x, y) in enumerate(prefetch(reused(), (split, second))):
    print(x.sharding == split, y.devices() == {second}, (np.asarray(x) == i).all())

def blocked():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Event().wait()
    yield
stuck = prefetch(blocked())
try:
    next(stuck)
except KeyboardInterrupt:
    print("interrupted")
def endless():
    while True:
        yield np.zeros((1000, 1000), np.float32)
busy = prefetch(endless())
next(busy)
"""
    flags = "--xla_force_host_platform_device_count=2"
    found = fresh_process(script, XLA_FLAGS=flags).splitlines()
    assert found == ["True", *["True True True"] * 6, "interrupted"]


def test_waiting_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    handover = Handover()
    now += 50  # no one waits yet
    took = threading.Thread(target=lambda: [handover.take(), handover.take()])
    took.start()
    until(lambda: handover._waiting_since is not None)
    now += 3
    handover.enter("copy")
    now += 4
    assert handover.waited() == Waited(source=3, copy=4)
    handover.give(jnp.zeros(1))
    handover.enter("device")
    now += 5
    handover.enter("source")
    handover.give(jnp.zeros(2))
    until(lambda: len(handover._ready) == 1 and handover._waiting_since is not None)
    now += 7
    handover.end()
    took.join()
    assert handover.waited() == Waited(source=3 + 7, copy=4, device=5)


def test_the_thread_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    put = prefetching._Copier.put

    def marked(self: Any, batch: Any) -> Any:
        _, copy = put(self, batch)
        done.append("put")
        wait = SimpleNamespace(block_until_ready=lambda: done.append("marker"))
        return wait, copy

    monkeypatch.setattr(prefetching._Copier, "put", marked)
    monkeypatch.setattr(Handover, "enter", lambda self, phase: done.append(phase))
    assert firsts(prefetch(numbered(2))) == [0, 1]
    one = ["copy", "put", "device", "marker", "copy", "source"]
    assert done == one * 2


def test_regions_are_those_that_the_plan_cannot_know() -> None:
    images, labels = np.zeros((6, 4, 4, 1), np.float16), np.zeros(6, np.int64)
    batches = prefetch([{"x": images, "y": labels, "m": np.ones(6, np.float16)}])
    rows = batches.regions()
    plan = make_rig(BOTH, config()).plan
    blank = [row for row in plan.regions() if row.owner == "input"]
    assert [(r.region, r.owner, r.offset) for r in rows] == [
        (r.region, r.owner, r.offset) for r in blank
    ]
    assert [(r.region, r.dtype, r.elements, r.nbytes) for r in rows] == [
        (Region.I_A_LABEL, "int32", 6, 24),
        (Region.I_A_DATA, "float16", 102, 204),
        (Region.I_B_LABEL, "int32", 6, 24),
        (Region.I_B_DATA, "float16", 102, 204),
    ]
    assert batches.nbytes == 2 * 228
    mixed = prefetch([(images, labels, np.zeros((6, 2), np.float32))]).regions()
    assert (mixed[1].dtype, mixed[1].nbytes) == ("any", 192 + 48)
    for nothing in ([], failing(0, OSError())):
        assert [r.nbytes for r in prefetch(nothing).regions()] == [0] * 4


X = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X[:3]}, r"has float32\[3, 2\] in 'x', the first one float32\[4, 2\]"),
        ({"x": X.astype(np.float16)}, r"has float16\[4, 2\] in 'x', the first one flo"),
        ({"y": X}, r"is a PyTreeDef\(\{'y': \*\}\), the first one a PyTreeDef\("),
        ({"x": np.array(["a"])}, "has a ndarray of <U1 in 'x', which JAX cannot hold"),
        ({"x": np.ma.masked_array(X)}, "has a MaskedArray of float32 in 'x', which"),
        ({"x": "text"}, "has a str in 'x', which JAX cannot hold"),
        ({"x": jnp.zeros((4, 2))}, "has a jax.Array in 'x': give NumPy arrays, or pa"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    batch: Any, message: str, refuses: Any
) -> None:
    batches = prefetch([{"x": X}, {"x": X.astype(np.float64)}, batch])
    assert len([next(batches), next(batches)]) == 2
    with refuses(f"^batch 2 {message}"):
        next(batches)


def test_wrong_arguments_are_refused(refuses: Any) -> None:
    with pytest.raises(ValueError, match="must be an iterable of pytrees .*, got int"):
        prefetch(3)  # pyright: ignore[reportArgumentType]
    for wrong in (jax.sharding.PartitionSpec("data"), "cpu", {}):
        with pytest.raises(ValueError, match="`sharding` must be a jax.sharding.Shar"):
            prefetch([X], wrong)
    device = jax.devices()[0]
    with pytest.raises(ValueError, match=r"does not fit batches of shapes \[4, 2\]: "):
        next(prefetch([(X,)], (device, device)))
    with refuses("^batch 0 has a jax.Array: "):
        next(prefetch([jnp.zeros(3)]))
