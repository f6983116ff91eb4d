"""Two records: equal to the last bit, or the first place where they are not."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compare_helpers import COLUMNS, TENSORS, Run, some_run
from hypothesis import given
from hypothesis import strategies as st

from rjax.repro import Comparison, RecordError, Tensor, Tolerance, compare
from rjax.repro import format as on_disk
from rjax.repro.comparison import ColumnDifference, StateDifference

Pair = Callable[[Run, Run], Comparison]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Write two runs and compare them."""

    def write(a: Run, b: Run) -> Comparison:
        return compare(a.write(tmp_path / "a"), str(b.write(tmp_path / "b")))

    return write


def kinds(found: Comparison) -> list[str]:
    return [finding.kind for finding in found.findings]


def test_equal_records_are_bit_identical(pair: Pair) -> None:
    found = pair(some_run(), some_run())
    assert found.verdict == "bit-identical"
    assert (found.first, found.state, found.columns) == (None, None, ())
    assert (found.findings, found.compared) == ((), (20, 21))
    assert str(found).splitlines()[0] == "bit-identical"


def test_a_run_compared_with_itself(tmp_path: Path) -> None:
    folder = some_run().write(tmp_path / "a")
    found = compare(folder, folder / ".." / "a")
    assert found.verdict == "bit-identical" and "one and the same" in found.text()


@given(row=st.integers(0, 20), tensor=st.integers(0, 4), bit=st.integers(0, 63))
def test_any_bit_of_any_digest_is_found_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, row: int, tensor: int, bit: int
) -> None:
    folder, other = tmp_path_factory.mktemp("runs"), some_run()
    other.digests[row, tensor, bit // 32] ^= np.uint32(1 << bit % 32)
    found = compare(some_run().write(folder / "a"), other.write(folder / "b"))
    state = found.state
    assert found.first is state and isinstance(state, StateDifference)
    assert (state.step, state.tensors) == (row, (TENSORS[tensor],))
    assert state.equal == (row - 1 if row else None)
    assert int(state.a, 16) ^ int(state.b, 16) == 1 << bit
    # No number of any step shows it.
    assert found.verdict == "numerically equivalent" and "by them alone" in found.reason


@given(
    row=st.integers(0, 19),
    column=st.sampled_from([name for name, _ in COLUMNS]),
    bit=st.integers(0, 31),
)
def test_any_bit_of_any_word_is_found_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, row: int, column: str, bit: int
) -> None:
    folder, other = tmp_path_factory.mktemp("runs"), some_run()
    bit = 0 if column == "applied" else bit
    other.column(column)[row] ^= np.uint32(1 << bit)
    found = compare(some_run().write(folder / "a"), other.write(folder / "b"))
    first = found.first
    assert isinstance(first, ColumnDifference) and found.columns == (first,)
    assert (first.step, first.name, first.count) == (row, column, 1)
    assert first.a.word ^ first.b.word == 1 << bit
    assert found.verdict != "bit-identical"
    assert f"Step {row}, {column}: {first.a} in A" in found.text()


@pytest.mark.parametrize("name", [tensor.name for tensor in TENSORS])
def test_snapshots_show_the_first_element(name: str, pair: Pair) -> None:
    a, b = (some_run(snapshots=(0, 7, 14)) for _ in range(2))
    place = [tensor.name for tensor in TENSORS].index(name)
    array = b.snapshots[7][name]
    words = array.view(f"u{array.itemsize}")
    words[-1] ^= words.dtype.type(4)
    b.digests[7:, place] ^= np.uint32(1)
    found = pair(a, b)
    assert isinstance(found.first, StateDifference) and found.first.name == name
    element = found.first.element
    assert element is not None and (element.count, element.size) == (1, len(array))
    index = {6: (1, 2), 2: (1,), 1: ()}[len(array)]
    assert (element.flat, element.index) == (len(array) - 1, index)
    assert element.b.value == array[-1] == words[-1:].view(array.dtype)[0]
    assert element.ulps == (4 if array.dtype.kind == "f" else None)
    assert f"{name}[{', '.join(map(str, index))}]" in found.text()


def test_without_snapshots_the_text_says_how_to_get_the_element(pair: Pair) -> None:
    a, b = some_run(), some_run(snapshots=(7,))
    b.digests[7:] ^= np.uint32(1)
    found = pair(a, b)
    assert found.state.element is None
    assert "snapshot_every=7" in found.text()


def test_between_digests_only_an_interval_is_known(pair: Pair) -> None:
    a, b = some_run(every=10), some_run(every=10)
    b.digests[1:, 0] ^= np.uint32(1)
    b.floats("loss")[10:] += 1
    found = pair(a, b)
    assert (found.state.equal, found.state.step) == (0, 10)
    assert found.first is found.state, "the state before step 10 causes its loss"
    assert "between step 0 (equal) and step 10 (differs)" in found.text()


def test_the_earlier_of_word_and_digest_is_first(pair: Pair) -> None:
    a, b = some_run(every=5), some_run(every=5)
    b.digests[2:, 0] ^= np.uint32(1)
    b.floats("loss")[5:] += 1
    b.floats("grad_norm")[5:] += 1
    found = pair(a, b)
    assert (found.first.step, found.first.name) == (5, "loss")
    assert [column.name for column in found.columns] == ["loss", "grad_norm"]
    assert (found.state.equal, found.state.step) == (5, 10)
    assert "The state before step 5 is equal: its batch differs" in found.text()
    assert found.verdict == "diverged"


def test_no_digest_after_the_last_vouches_for_a_state(pair: Pair) -> None:
    a, b = some_run(), some_run()
    for run in (a, b):
        run.digest_steps, run.digests = run.digest_steps[:5], run.digests[:5]
    b.floats("loss")[7] += 1
    found = pair(a, b)
    assert found.equal == 4 and "is equal: its batch" not in found.text()


def test_moments_are_told_before_masters_and_those_before_copies(pair: Pair) -> None:
    a, b = some_run(), some_run()
    b.digests[3:, :3] ^= np.uint32(1)
    found = pair(a, b)
    assert [t.field for t in found.state.tensors] == ["mu", "master", "compute"]
    assert found.state.compared == 5


@pytest.mark.parametrize(
    ("x", "y", "equal"),
    [
        (0x7FC00000, 0x7FC00000, True),
        (0x7FC00000, 0x7FC00001, False),
        (0x80000000, 0x00000000, False),
        (0x7F800000, 0x7F800000, True),
    ],
)
def test_bits_decide_for_nan_and_zero(x: int, y: int, equal: bool, pair: Pair) -> None:
    a, b = some_run(), some_run()
    a.column("grad_norm")[4], b.column("grad_norm")[4] = x, y
    found = pair(a, b)
    assert (found.verdict == "bit-identical") == equal
    if not equal:
        assert found.verdict == "numerically equivalent"
        assert found.columns[0].ulps == (0 if y == 0 else None)


def test_a_shorter_record_is_incomplete(pair: Pair) -> None:
    short = some_run()
    short.keep(13)
    found = pair(some_run(), short)
    assert (found.verdict, kinds(found)) == ("incomplete", ["lacks"])
    assert found.compared == (13, 14)
    assert "B is shorter: it ends with step 12, A with step 19." in found.text()


def test_a_killed_run_is_compared_up_to_its_last_whole_row(tmp_path: Path) -> None:
    short = some_run()
    short.keep(13)
    short.manifest["status"] = "running"
    b = short.write(tmp_path / "b")
    for name in (on_disk.STEPS, on_disk.DIGESTS):
        with (b / on_disk.FOLDER / name).open("ab") as file:
            file.write(b"part")
    found = compare(some_run().write(tmp_path / "a"), b)
    assert found.verdict == "incomplete" and found.b.cut_off
    said = found.text()
    assert "B ends within a row" in said and "says it is still running" in said


def test_other_starts_and_no_common_steps(pair: Pair, tmp_path: Path) -> None:
    late = some_run()
    late.steps, late.words = late.steps[5:], late.words[5:]
    late.digest_steps, late.digests = late.digest_steps[5:], late.digests[5:]
    found = pair(some_run(), late)
    assert found.verdict == "incomplete" and kinds(found) == ["lacks"]
    assert "B begins at step 5, A at step 0 already." in found.text()
    never = some_run()
    never.steps, never.digest_steps = never.steps + 100, never.digest_steps + 100
    found = compare(tmp_path / "a", never.write(tmp_path / "c"))
    assert found.verdict == "incomplete" and found.compared == (0, 0)
    assert "No step is in common" in found.text()


def test_left_out_numbers_are_told(pair: Pair, tmp_path: Path) -> None:
    odd = some_run()
    odd.steps, odd.words = np.delete(odd.steps, [6, 7]), np.delete(odd.words, [6, 7], 0)
    found = pair(some_run(), odd)
    assert (found.verdict, found.b.gaps) == ("incomplete", ((5, 8),))
    assert "The steps of B skip numbers, from 5 to 8." in found.text()
    assert compare(tmp_path / "b", tmp_path / "b").verdict == "bit-identical"


def test_digests_of_other_steps_are_compared_where_both_have_them(pair: Pair) -> None:
    a, b = some_run(), some_run()
    for run, every in ((a, 4), (b, 6)):
        run.layout = dataclasses.replace(run.layout, every=every)
        run.digest_steps = run.digest_steps[::every]
        run.digests = run.digests[::every]
    b.digests[2, 1] ^= np.uint32(1)  # after 12 steps
    found = pair(a, b)
    assert found.compared[1] == 2
    assert (found.state.equal, found.state.step) == (0, 12)
    assert kinds(found) == ["note"] and "every 4 steps, B has" in found.text()


def test_a_state_that_was_not_compared_is_not_identical(pair: Pair) -> None:
    found = pair(some_run(every=0), some_run(every=0))
    assert found.verdict == "incomplete"
    assert "No digest of the state is in common" in found.text()


def test_a_lost_row_of_digests_is_told(pair: Pair) -> None:
    odd = some_run()
    odd.digest_steps, odd.digests = odd.digest_steps[:-1], odd.digests[:-1]
    found = pair(some_run(), odd)
    assert found.verdict == "incomplete" and "1 of A stand alone" in found.text()


def test_missing_and_extra_tensors_and_columns(pair: Pair) -> None:
    odd = some_run()
    columns = (*COLUMNS[:-1], ("metrics/other", "int32"))
    tensors = (*TENSORS[:-1], Tensor("nu", "fc/kernel", (2, 3), "float32", ""))
    odd.layout = dataclasses.replace(odd.layout, columns=columns, tensors=tensors)
    found = pair(some_run(), odd)
    assert (found.verdict, kinds(found)) == ("incomplete", ["lacks"] * 4)
    said = found.text()
    for words in (
        "A has the columns metrics/hits",
        "B has the columns metrics/other",
        "A has the tensors key",
        "B has the tensors nu fc/kernel",
    ):
        assert f"Only {words}." in said


def test_another_dtype_or_shape_is_not_compared_but_told(
    pair: Pair, tmp_path: Path
) -> None:
    odd = some_run()
    tensors = list(TENSORS)
    tensors[1] = dataclasses.replace(tensors[1], dtype="bfloat16")
    odd.layout = dataclasses.replace(odd.layout, tensors=tuple(tensors))
    odd.digests[:, 1] ^= np.uint32(1)
    found = pair(some_run(), odd)
    assert (found.verdict, kinds(found)) == ("numerically equivalent", ["dtype"])
    assert found.first is None
    assert "dtype float16 in A, bfloat16 in B: compute fc/kernel" in found.text()
    tensors[1] = dataclasses.replace(TENSORS[1], shape=(3, 3))
    odd.layout = dataclasses.replace(odd.layout, tensors=tuple(tensors))
    found = compare(tmp_path / "a", odd.write(tmp_path / "c"))
    assert (found.verdict, kinds(found)) == ("diverged", ["shape"])
    assert "shape (2, 3) in A, (3, 3) in B" in found.text()


def test_columns_of_two_dtypes_are_compared_as_numbers(pair: Pair) -> None:
    odd = some_run()
    odd.column("grad_norm")[:] = on_disk.words_of(np.full(20, 2.0, np.float16))
    columns = tuple((n, "float16" if n == "grad_norm" else d) for n, d in COLUMNS)
    odd.layout = dataclasses.replace(odd.layout, columns=columns)
    odd.column("grad_norm")[9] = on_disk.words_of(np.full(1, 4.0, np.float16))[0]
    found = pair(some_run(), odd)
    assert kinds(found) == ["dtype"] and found.verdict == "diverged"
    [column] = found.columns
    assert (column.step, column.b.value, column.largest) == (9, 4.0, 0.5)


def test_scalars_within_the_bound_are_equivalent(pair: Pair, tmp_path: Path) -> None:
    odd = some_run()
    odd.floats("loss")[8:] *= np.float32(1.0005)
    found = pair(some_run(), odd)
    assert found.verdict == "numerically equivalent" and found.distances is None
    assert found.columns[0].largest == pytest.approx(5e-4, rel=1e-3)
    tight = Tolerance(relative_scalars=1e-4)
    found = compare(tmp_path / "a", tmp_path / "b", tolerance=tight)
    assert found.verdict == "diverged" and "loss by up to 0.0005" in found.reason


@pytest.mark.parametrize("name", ["scale", "skipped", "applied", "metrics/hits"])
def test_scale_and_integers_must_be_equal(name: str, pair: Pair) -> None:
    odd = some_run()
    odd.column(name)[8] ^= np.uint32(1)
    found = pair(some_run(), odd)
    assert found.verdict == "diverged" and "must be equal" in found.reason


@pytest.mark.parametrize("far", [False, True])
def test_the_last_common_snapshot_decides_about_tensors(far: bool, pair: Pair) -> None:
    a, b = (some_run(snapshots=(0, 10, 20)) for _ in range(2))
    b.digests[5:, 0] ^= np.uint32(1)
    b.snapshots[10]["master fc/kernel"] *= 3  # not the last one
    b.snapshots[20]["master fc/kernel"] *= np.float32(1.5 if far else 1.001)
    found = pair(a, b)
    assert found.distances is not None
    step, regions = found.distances
    by_name = {region.region: region.relative for region in regions}
    assert step == 20 and by_name["A_FC_WEIGHT"] == 0
    assert by_name["W_FC_WEIGHT"] == pytest.approx(0.5 if far else 1e-3, rel=1e-3)
    assert found.verdict == ("diverged" if far else "numerically equivalent")
    assert "master fc/kernel" in found.text() and "after 20 steps" in found.text()


def test_a_damaged_snapshot_is_no_comparison(tmp_path: Path) -> None:
    a, b = (some_run(snapshots=(0,)) for _ in range(2))
    b.digests[0] ^= np.uint32(1)
    b.snapshots[0]["mu fc/kernel"] = b.snapshots[0]["mu fc/kernel"].astype(np.float64)
    folders = a.write(tmp_path / "a"), b.write(tmp_path / "b")
    with pytest.raises(RecordError, match="another tensor 'mu fc/kernel' than its"):
        compare(*folders)
    path = on_disk.snapshot_path(tmp_path / "b" / on_disk.FOLDER, 0)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(RecordError, match="is damaged"):
        compare(*folders)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "much"])
def test_a_tolerance_must_be_a_number(value: float) -> None:
    with pytest.raises(ValueError, match="`relative_scalars` must be a number >= 0"):
        Tolerance(relative_scalars=value)


def test_scale_histories_and_skips(pair: Pair) -> None:
    a, b = some_run(), some_run()
    for run, skips in ((a, [4]), (b, [4, 9])):
        run.column("applied")[skips] = 0
        for step in skips:
            run.floats("scale")[step + 1 :] /= 2
    found = pair(a, b)
    assert found.a.scales == ((0, 8192.0), (5, 4096.0))
    assert found.b.scales == ((0, 8192.0), (5, 4096.0), (10, 2048.0))
    said = found.text()
    assert "B: 8192, 4096 from step 5, 2048 from step 10" in said
    assert "They change differently in steps 10." in said
    assert "Steps skipped: 1 in A, 2 in B." in said


def test_another_seed_is_the_first_cause(pair: Pair) -> None:
    a, b = some_run(), some_run()
    b.digests[:, 0] ^= np.uint32(1)
    b.manifest = {"config": {"ema": 0.9, "clip": 1.0}, "seed": 1, "status": "finished"}
    found = pair(a, b)
    assert [cause.name for cause in found.causes.found] == ["seed", "config.ema"]
    lines = found.text().splitlines()
    start = lines.index("Likeliest causes, by the manifests") + 1
    assert lines[start : start + 2] == [
        "  seed: 0 in A, 1 in B",
        "  config.ema: null in A, 0.9 in B",
    ]
    assert "before the first step" in lines[0]


def test_long_records_in_bounded_memory(tmp_path: Path) -> None:
    many = tuple(Tensor("nu", f"l{i}", (4,), "float32", "") for i in range(200))
    run = some_run(steps=10_000)
    run.layout = dataclasses.replace(run.layout, tensors=many)
    rng = np.random.default_rng(1)
    run.digests = rng.integers(0, 1 << 32, (10_001, 200, 2), np.uint32)
    run.write(tmp_path / "a")
    run.digests[9_876, 123, 1] ^= np.uint32(1)
    run.write(tmp_path / "b")
    del run
    tracemalloc.start()
    found = compare(tmp_path / "a", tmp_path / "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.first.step, found.first.name) == (9_876, "nu l123")
    assert found.compared == (10_000, 10_001) and len(found.a.loss) <= 1000
    assert peak < 200e6
