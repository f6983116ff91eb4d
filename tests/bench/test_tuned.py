"""Tables of measurements: read as they were written, or refused in one sentence."""

import json
import math
import pathlib
import types
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.ops import tuned
from rjax.ops.tuned import Choice, Tuning

TABLE = Tuning(
    "Test GPU",
    "0.12.0",
    {
        "ema": (Choice(1024, 2e-6, 3e-6, 128), Choice(1 << 20, 9e-6, 4e-6, 1024)),
        "digest/32": (Choice(4096, 2e-6, 1e-6, 256),),
    },
)
SECONDS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
CHOICES = st.lists(
    st.builds(Choice, st.integers(1, 1 << 31), SECONDS, SECONDS, st.integers(1, 4096)),
    unique_by=lambda choice: choice.n,
).map(lambda found: tuple(sorted(found, key=lambda choice: choice.n)))
TUNINGS = st.builds(
    Tuning, st.text(), st.text(), st.dictionaries(st.text(), CHOICES)
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let JAX see a GPU of the kind of `TABLE`."""
    device = types.SimpleNamespace(device_kind=TABLE.device)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    monkeypatch.setattr(tuned, "_shipped_folder", lambda: tmp_path / "shipped")
    return tmp_path / "shipped"


class TestFiles:
    @given(TUNINGS)
    def test_what_is_written_is_read(self, tmp_path_factory, tuning):
        path = tmp_path_factory.mktemp("tables") / "a" / "table.json"
        tuned.write(path, tuning)
        assert tuned.read(path) == tuning
        assert [p.name for p in path.parent.iterdir()] == ["table.json"]

    def test_sizes_are_sorted(self, tmp_path):
        record = _record()
        record["choices"]["ema"].reverse()
        assert tuned.read(_file(tmp_path, record)) == TABLE

    @pytest.mark.parametrize(
        "text",
        ["", "{", "null", "[]", "{}", "3", '"text"', '{"format": 1}', "\x00\xff"],
        ids=repr,
    )
    def test_what_is_no_table_is_refused(self, tmp_path, text):
        path = tmp_path / "table.json"
        path.write_bytes(text.encode("latin-1"))
        _refused(path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("format", 0),
            ("format", tuned.FORMAT + 1),
            ("format", None),
            ("choices", None),
            ("choices", []),
            ("choices", {"ema": None}),
            ("choices", {"ema": [None]}),
            ("choices", {"ema": [{}]}),
        ],
    )
    def test_another_structure_is_refused(self, tmp_path, key, value):
        _refused(_file(tmp_path, {**_record(), key: value}))

    @pytest.mark.parametrize("key", ["n", "xla", "mosaic_gpu", "block"])
    @pytest.mark.parametrize("value", [0, -1, math.nan, None, "1e-6x", []])
    def test_what_cannot_have_been_measured_is_refused(self, tmp_path, key, value):
        record = _record()
        record["choices"]["ema"][0][key] = value
        _refused(_file(tmp_path, record))

    @pytest.mark.parametrize("key", ["xla", "mosaic_gpu"])
    def test_no_time_is_infinite(self, tmp_path, key):
        record = _record()
        record["choices"]["ema"][0][key] = math.inf
        _refused(_file(tmp_path, record))

    @pytest.mark.parametrize("key", ["format", "device", "jax", "choices"])
    def test_a_missing_entry_is_refused(self, tmp_path, key):
        record = _record()
        del record[key]
        _refused(_file(tmp_path, record))

    @given(st.integers(0, 200), st.binary(max_size=8))
    def test_a_part_of_a_table_is_refused(self, tmp_path_factory, at, bytes_):
        path = _file(tmp_path_factory.mktemp("tables"), _record())
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes_)
        _refused(path)


def _record() -> dict[str, Any]:
    rows = {
        op: [vars(choice).copy() for choice in found]
        for op, found in TABLE.choices.items()
    }
    entries = {"format": tuned.FORMAT, "device": TABLE.device, "jax": TABLE.jax}
    return {**entries, "choices": rows}


def _file(folder: pathlib.Path, record: Any) -> pathlib.Path:
    path = folder / "table.json"
    path.write_text(json.dumps(record))
    return path


def _refused(path: pathlib.Path) -> None:
    """Assert that reading says in one sentence which file, and what to do."""
    with pytest.raises(ValueError) as caught:
        tuned.read(path)
    text = str(caught.value)
    assert text.startswith(f"{path} is no tuning table of this version")
    assert text.endswith("write it again by `rjax bench --tune`.")
    assert "\n" not in text


class TestNearest:
    @given(st.lists(st.integers(1, 1 << 31), unique=True), st.integers(0, 1 << 31))
    def test_the_least_ratio(self, sizes, n):
        choices = tuple(Choice(size, 1.0, 1.0, 128) for size in sorted(sizes))
        found = Tuning("", "", {"ema": choices}).nearest("ema", n)
        ratio = lambda size: max(size, n, 1) / min(size, max(n, 1))  # noqa: E731
        if found is None:
            assert not sizes
        else:
            assert ratio(found.n) <= min(map(ratio, sizes)) * (1 + 1e-12)

    @pytest.mark.parametrize(
        ("n", "wanted"), [(1, 1024), (32000, 1024), (33000, 2**20)]
    )
    def test_distance_is_logarithmic(self, n, wanted):
        found = TABLE.nearest("ema", n)
        assert found is not None and found.n == wanted

    def test_an_op_that_was_not_measured_has_none(self):
        assert TABLE.nearest("cast/32-16", 1024) is None


class TestHere:
    def test_without_a_table_xla_serves(self, gpu, shipped):
        assert tuned.here() is None
        assert not tuned.prefers_kernel("ema", 1 << 20)
        assert tuned.block("ema", 1 << 20) is None

    def test_the_faster_one_serves(self, gpu, shipped):
        tuned.write(shipped / "Test_GPU.json", TABLE)
        assert tuned.prefers_kernel("ema", 1 << 21) and tuned.block("ema", 9**9) == 1024
        assert not tuned.prefers_kernel("ema", 1000) and tuned.block("ema", 9) == 128
        assert tuned.prefers_kernel("digest/32", 1)
        assert not tuned.prefers_kernel("cast/32-16", 1024)

    @pytest.mark.parametrize(("time", "faster"), [(1e-6, False), (0.985e-6, False),
                                                  (0.97e-6, True)])  # fmt: skip
    def test_about_as_fast_is_not_faster(self, gpu, shipped, time, faster):
        choices = {"ema": (Choice(1024, 1e-6, time, 128),)}
        tuned.write(shipped / "Test_GPU.json", Tuning("Test GPU", "1", choices))
        assert tuned.prefers_kernel("ema", 1024) == faster

    def test_the_user_goes_before_what_comes_along(self, gpu, shipped):
        other = Tuning("Test GPU", "1", {"ema": (Choice(1024, 2.0, 1.0, 512),)})
        tuned.write(shipped / "Test_GPU.json", TABLE)
        tuned.write(tuned.user_folder() / "Test_GPU.json", other)
        assert tuned.here() == other

    def test_another_device_has_another_table(self, gpu, shipped):
        tuned.write(shipped / "Other_GPU.json", TABLE)
        assert tuned.here() is None

    def test_it_is_read_once(self, gpu, shipped):
        tuned.write(shipped / "Test_GPU.json", TABLE)
        assert tuned.here() is tuned.here()
        (shipped / "Test_GPU.json").unlink()
        assert tuned.here() == TABLE
        tuned.here.cache_clear()
        assert tuned.here() is None

    def test_a_damaged_one_is_said_every_time(self, gpu, shipped):
        shipped.mkdir()
        (shipped / "Test_GPU.json").write_text("{")
        for _ in range(2):
            with pytest.raises(ValueError, match="is no tuning table"):
                tuned.prefers_kernel("ema", 1024)

    def test_off_the_gpu_there_is_none(self, shipped, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        kind = jax.devices()[0].device_kind
        tuned.write(shipped / tuned.file_name(kind), TABLE)
        assert tuned.here() is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "NVIDIA_H200.json"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100-SXM4-80GB.json"),
        ("Radeon (TM) / x", "Radeon_TM_x.json"),
        ("../../etc", ".._.._etc.json"),
    ],
)
def test_the_name_of_a_file(kind, name):
    assert tuned.file_name(kind) == name


def test_the_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.user_folder() == tmp_path / "rjax" / "tuning"
    for unset in (lambda: monkeypatch.setenv("XDG_CACHE_HOME", ""),
                  lambda: monkeypatch.delenv("XDG_CACHE_HOME")):  # fmt: skip
        unset()
        expected = pathlib.Path("~/.cache/rjax/tuning").expanduser()
        assert tuned.user_folder() == expected


def test_tables_that_come_along_can_be_read():
    for path in tuned._shipped_folder().glob("*.json"):
        found = tuned.read(path)
        assert path.name == tuned.file_name(found.device)
        for choices in found.choices.values():
            sizes = [choice.n for choice in choices]
            assert sizes == sorted(set(sizes)) and choices
