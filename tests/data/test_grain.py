"""Sets read by grain: adapting them, their order, their threads."""

import gc
import signal
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.data import (
    DataError,
    batch_at,
    evaluation_batches,
    from_arrays,
    from_grain,
    num_examples,
    split,
    steps_per_epoch,
    train_batches,
)

grain = pytest.importorskip("grain")

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (23, 3, 2, 1), dtype=np.uint8)
LABELS = RNG.integers(0, 5, 23)
PAIRS = list(zip(IMAGES, LABELS, strict=True))


def both(**options):
    """Return the same data set, from arrays and through grain."""
    pair = IMAGES, LABELS
    return from_arrays(pair, **options), from_grain(PAIRS, num_classes=5, **options)


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def prefetching():
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def assert_threads_end():
    deadline = time.monotonic() + 5
    while prefetching() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetching()


class Source:
    """Counts what is read, and may be slow, or fail."""

    def __init__(self, length=40, delay=0.0, bad=None):
        self.length, self.delay, self.bad = length, delay, bad
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.delay)
        self.read.append(index)
        if index == self.bad:
            raise DataError(f"example {index} is bad; remove it.")
        return np.full((2, 2, 1), index, np.float32), index % 5


@pytest.mark.parametrize("wrap", [list, grain.MapDataset.source], ids=["list", "map"])
def test_elements_are_adapted_as_arrays_are(wrap):
    dataset = from_grain(wrap(PAIRS), wrap(PAIRS[:3]), num_classes=5)
    want = from_arrays((IMAGES, LABELS), (IMAGES[:3], LABELS[:3]))
    assert isinstance(dataset.train, grain.MapDataset)
    assert num_examples(dataset.train) == 23 and num_examples(dataset.test) == 3
    image, label = dataset.train[4]
    assert image.dtype == np.float32 and label.dtype == np.int32 and not label.ndim
    np.testing.assert_array_equal(image, want.train[0][4])
    assert label == LABELS[4] and dataset.num_classes == 5 and dataset.name == "grain"


def test_images_of_rows_and_columns_get_a_channel():
    dataset = from_grain([(np.zeros((4, 5)), 0)] * 4, num_classes=1)
    assert dataset.train[0][0].shape == (4, 5, 1)
    dataset = from_grain([(np.zeros(6, np.float16), 0)] * 4, num_classes=1)
    assert dataset.train[0][0].shape == (6,)
    assert dataset.train[0][0].dtype == np.float32


@pytest.mark.parametrize("seed", [0, 3])
def test_batches_are_those_of_the_arrays(seed):
    arrays, lazy = both(seed=seed)
    for step in range(11):
        got, want = (batch_at(d.train, 4, seed, step) for d in (lazy, arrays))
        assert_same(got, want)
    read = list(train_batches(lazy.train, 4, seed, stop=11))
    want = list(train_batches(arrays.train, 4, seed, stop=11))
    assert len(read) == len(want) == 11
    for got, wanted in zip(read, want, strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
def test_evaluation_is_that_of_the_arrays(batch_size):
    arrays, lazy = both()
    read = list(evaluation_batches(lazy.test, batch_size))
    want = list(evaluation_batches(arrays.test, batch_size))
    for (got, mask), (wanted, wanted_mask) in zip(read, want, strict=True):
        assert_same(got, wanted)
        assert_same([mask], [wanted_mask])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 9), st.integers(0, 2**63))
@settings(max_examples=15)
def test_every_example_once(n, batch_size, start, seed):
    examples = grain.MapDataset.source([{"i": np.int32(i)} for i in range(n)])
    seen = [b["i"][mask] for b, mask in evaluation_batches(examples, batch_size)]
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(n))
    if batch_size > n:
        return
    steps = steps_per_epoch(n, batch_size)
    first, stop = start * steps, (start + 1) * steps
    batches = train_batches(examples, batch_size, seed, first, stop)
    epoch = np.concatenate([batch["i"] for batch in batches])
    assert len(epoch) == steps * batch_size == len(set(epoch.tolist()))


@pytest.mark.parametrize("lazy", [False, True])
def test_resuming_gives_the_rest(lazy):
    examples = both()[lazy].train
    whole = list(train_batches(examples, 4, seed=2, stop=13))
    for start in (0, 1, 4, 5, 12, 13):
        rest = list(train_batches(examples, 4, seed=2, start=start, stop=13))
        assert len(rest) == 13 - start
        for got, want in zip(rest, whole[start:], strict=True):
            assert_same(got, want)


@pytest.mark.parametrize("lazy", [False, True])
def test_for_ever(lazy):
    examples = both()[lazy].train
    batches = train_batches(examples, 4, start=10**9)
    assert_same(next(batches), batch_at(examples, 4, 0, 10**9))
    for _ in range(12):
        next(batches)
    assert_same(next(batches), batch_at(examples, 4, 0, 10**9 + 13))


def test_numpy_arguments():
    examples = both()[1].train
    four, one, far = np.int8(4), np.int8(1), np.int8(99)
    batches = train_batches(examples, four, one, one, far)  # pyright: ignore
    assert_same(list(batches)[-1], batch_at(examples, 4, 1, 98))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((24,), "`batch_size` must not exceed the 23 examples"),
        ((0,), "`batch_size` must be at least 1"),
        ((4, -1), "`seed` must be in"),
        ((4, 0, -1), "`step` must not be negative, got -1"),
        ((4, 0, 3, 2), "`stop` must not be before `start`, got 2 and 3"),
    ],
)
def test_complaints_come_at_once(lazy, arguments, message):
    data = from_grain(PAIRS, PAIRS, num_classes=5).train if lazy else (IMAGES, LABELS)
    with pytest.raises(ValueError, match=message):
        train_batches(data, *arguments)


def test_random_transformations_differ_from_epoch_to_epoch():
    pairs = [(np.zeros(3, np.float32), i) for i in range(8)]
    jitter = grain.MapDataset.source(pairs).seed(1)
    jitter = jitter.random_map(lambda pair, rng: (rng.random(3), pair[1]))
    examples = from_grain(jitter, jitter, num_classes=8).train
    rows = {}
    for x, y in train_batches(examples, 4, stop=4):  # two epochs
        for image, label in zip(x, y, strict=True):
            rows.setdefault(int(label), []).append(image)
    assert all(len(seen) == 2 and (seen[0] != seen[1]).all() for seen in rows.values())
    again = list(train_batches(examples, 4, stop=4))[3]
    assert_same(again, batch_at(examples, 4, 0, 3))


def test_a_split_stays_disjoint_when_grain_reshuffles_each_epoch():
    shuffled = grain.MapDataset.range(20).shuffle(seed=1)
    rest, held_out = split(shuffled, 0.25)
    assert len(rest) == 15 and len(held_out) == 5
    for epoch in range(3):
        first, second = (
            [side[i + epoch * len(side)] for i in range(len(side))]
            for side in (rest, held_out)
        )
        assert sorted(first + second) == list(range(20))
        assert second == [held_out[i] for i in range(5)]


def test_a_split_reads_nothing():
    source = Source()
    split(grain.MapDataset.source(source), 0.5)
    from_grain(source, num_classes=5)
    assert source.read == []


def test_reading_stays_close_to_what_is_asked_for():
    source = Source(length=4000)
    dataset = from_grain(source, source, num_classes=5)
    batches = train_batches(dataset.train, 10, stop=300)
    assert source.read == [] and not prefetching()
    next(batches)
    time.sleep(0.2)
    assert 10 <= len(source.read) <= 10 + 2 * 10 + 16
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert_threads_end()


def test_threads_end_with_the_iterator():
    dataset = from_grain(Source(), Source(), num_classes=5)
    list(train_batches(dataset.train, 4, stop=5))
    list(evaluation_batches(dataset.train, 4))
    assert_threads_end()
    for make in (train_batches, evaluation_batches):
        batches = make(dataset.train, 4)
        next(batches)
        assert prefetching()
        del batches
        gc.collect()
        assert_threads_end()


@pytest.mark.parametrize("make", [train_batches, evaluation_batches])
def test_what_a_thread_raises_is_raised_in_the_loop(make, refuses):
    dataset = from_grain(Source(bad=17), Source(), num_classes=5)
    with refuses(r"^example 17 is bad; remove it\.$"):
        for _ in make(dataset.train, 4):
            pass
    assert_threads_end()
    # What comes before it is not lost.
    first = next(make(dataset.train, 1))
    assert first is not None


def test_an_interrupt_gets_through_while_waiting():
    dataset = from_grain(Source(delay=0.5), Source(), num_classes=5)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(train_batches(dataset.train, 40))
    timer.join()
    assert time.monotonic() - begin < 5
    assert_threads_end()


@pytest.mark.parametrize(
    ("element", "message"),
    [
        (
            (IMAGES[0], 5),
            r"label of example 1 of `train` must lie in \[0, 5\), got 5",
        ),
        ((IMAGES[0], -1), "got -1"),
        ((IMAGES[0], 1.0), "must be one integer, got float64 of shape"),
        ((IMAGES[0], np.eye(5)[0]), r"got float64 of shape \(5,\); take the argmax"),
        ((IMAGES[0], True), "must be one integer, got bool"),
        ((IMAGES[0].astype(np.int64), 1), "the image of example 1 .* got int64; scale"),
        (IMAGES[0], "example 1 of `train` must be a pair .* got ndarray"),
        ((IMAGES[0], 1, 2), "must be a pair"),
        ({"image": 1, "label": 2}, "must be a pair .* got dict; map the elements"),
    ],
)
def test_an_element_that_cannot_be_used(refuses, element, message):
    dataset = from_grain([PAIRS[0], element, PAIRS[2]], PAIRS, num_classes=5)
    for index in (1, 4):  # of the first epoch, and of the second
        with refuses(message):
            dataset.train[index]
    with refuses(message):
        list(train_batches(dataset.train, 3, stop=1))


def test_the_largest_label_is_in_range():
    assert from_grain([(IMAGES[0], 4)] * 4, num_classes=5).train[0][1] == 4


def test_images_of_different_sizes(refuses):
    pairs = [(np.zeros((i + 1, 2, 1)), 0) for i in range(2)]
    dataset = from_grain(pairs, pairs, num_classes=1)
    message = r"one shape, got \(\(1, 2, 1\), \(\)\) and \(\(2, 2, 1\), \(\)\); resize"
    with refuses(message):
        batch_at(dataset.train, 2, 0, 0)
    with refuses(message):
        list(train_batches(dataset.train, 2, stop=1))


def test_a_filtered_set(refuses):
    examples = grain.MapDataset.range(6).filter(lambda i: i != 3)
    for read in (
        lambda: batch_at(examples, 6, 0, 0),
        lambda: list(train_batches(examples, 6, stop=1)),
        lambda: list(evaluation_batches(examples, 2)),
    ):
        with refuses("the element of index 3 is missing, as after `filter`; filter"):
            read()


@pytest.mark.parametrize(
    "source",
    [
        grain.MapDataset.source(PAIRS).to_iter_dataset(),
        iter(grain.MapDataset.source(PAIRS).to_iter_dataset()),
        grain.DataLoader(
            data_source=PAIRS,
            sampler=grain.samplers.SequentialSampler(23, grain.sharding.NoSharding()),
        ),
        iter(PAIRS),
    ],
    ids=["IterDataset", "DatasetIterator", "DataLoader", "iterator"],
)
def test_no_random_access(refuses, source):
    with refuses("`train` has no random access, got .*; build it from .* iterate over"):
        from_grain(source, num_classes=5)
    with refuses("`test` has no random access"):
        from_grain(PAIRS, source, num_classes=5)


def test_an_empty_source(refuses):
    with refuses("`train` must not be empty"):
        from_grain([], num_classes=5)
    with refuses("`test` must not be empty"):
        from_grain(PAIRS, [], num_classes=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "`num_classes` must be at least 1"),
        ({"class_names": ("a",)}, "`class_names` must have 5 names"),
        ({"test_fraction": 0.0}, "`test_fraction` must be in"),
        ({"test_fraction": 0.001}, "`test_fraction` must leave examples on both sides"),
        ({"seed": 2**64}, "`seed` must be in"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        from_grain(PAIRS, **{"num_classes": 5, **options})


def test_missing_grain_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"`from_grain` needs grain.*rjax\[data\]"):
        from_grain(PAIRS, num_classes=5)
    assert num_examples((IMAGES, LABELS)) == 23
