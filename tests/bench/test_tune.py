"""Tuning: the fastest block wins, and what was measured before stays."""

import functools

import jax
import pytest

from rjax.bench import tune
from rjax.bench.cases import CASES
from rjax.bench.measure import Figure
from rjax.ops import tuned
from rjax.ops.tuned import Choice, Tuning

DEVICE = "Test GPU"


def figure(op, n, block, *samples):
    implementation = "mosaic_gpu" if block else "xla"
    return Figure(op, n, implementation, block, 8, samples)


def group(op, n, xla, **blocks):
    yield figure(op, n, None, xla)
    for block, seconds in blocks.items():
        yield figure(op, n, int(block[1:]), seconds)


@pytest.mark.parametrize(
    ("log", "blocks"),
    [
        (7, [128]),
        (10, [128, 512]),
        (18, [128, 512, 2048]),
        (20, [256, 512, 1024, 2048]),
        (28, [256, 512, 1024, 2048]),
    ],
)
def test_blocks_that_are_measured(log, blocks):
    found = tune.variants(CASES["ema"], 1 << log)
    assert [variant.block for variant in found] == [None, *blocks]
    assert [variant.implementation for variant in found[:2]] == ["xla", "mosaic_gpu"]
    assert len(tune.variants(CASES["copy"], 1 << log)) == 1


def test_the_choice_is_the_fastest_median():
    figures = [
        figure("ema", 1024, None, 3e-6, 9e-6, 4e-6),
        figure("ema", 1024, 128, 9e-6, 1e-6, 8e-6),
        figure("ema", 1024, 256, 5e-6, 5e-6, 5e-6),
        figure("ema", 1024, 512, 7e-6, 6e-6, 1e-6),
    ]
    assert tune.choice(figures) == Choice(1024, 4e-6, 5e-6, 256)


def test_every_op_is_kept_as_soon_as_it_is_measured():
    kept: list[Tuning] = []
    groups = [
        group("copy", 1024, 1e-6),
        group("ema", 1024, 2e-6, b128=3e-6, b256=1e-6),
        group("cast/32-16", 1024, 2e-6, b128=3e-6, b256=4e-6),
        group("ema", 4096, 2e-6, b128=3e-6, b256=2e-6),
    ]
    found = tune.tune(groups, Tuning(DEVICE, "1", {}), kept.append)
    assert found == kept[-1] and len(kept) == 3
    assert kept[0].choices == {"ema": (Choice(1024, 2e-6, 1e-6, 256),)}
    assert found.choices == {
        "ema": (Choice(1024, 2e-6, 1e-6, 256), Choice(4096, 2e-6, 2e-6, 256)),
        "cast/32-16": (Choice(1024, 2e-6, 3e-6, 128),),
    }


def test_what_is_not_measured_again_stays():
    old = Tuning(
        DEVICE,
        "1",
        {
            "ema": tuple(Choice(n, 1.0, 2.0, 128) for n in (512, 1024, 4096)),
            "digest/32": (Choice(1024, 1.0, 2.0, 128),),
        },
    )
    new = tune.tune([group("ema", 1024, 3e-6, b512=1e-6)], old, lambda _: None)
    assert new.choices["digest/32"] == old.choices["digest/32"]
    assert [choice.n for choice in new.choices["ema"]] == [512, 1024, 4096]
    assert new.choices["ema"][1] == Choice(1024, 3e-6, 1e-6, 512)


class TestBegin:
    TABLE = Tuning(DEVICE, "0.0.1", {"ema": (Choice(1024, 1.0, 2.0, 128),)})

    def test_a_new_file_begins_empty(self, tmp_path):
        found = tune.begin(tmp_path / "new.json", DEVICE)
        assert found == Tuning(DEVICE, jax.__version__, {})

    def test_a_file_is_added_to(self, tmp_path):
        tuned.write(tmp_path / "old.json", self.TABLE)
        found = tune.begin(tmp_path / "old.json", DEVICE)
        assert found == Tuning(DEVICE, jax.__version__, self.TABLE.choices)

    def test_another_device_is_refused(self, tmp_path):
        tuned.write(tmp_path / "old.json", self.TABLE)
        with pytest.raises(ValueError, match="holds measurements of 'Test GPU'"):
            tune.begin(tmp_path / "old.json", "Other GPU")

    def test_what_is_no_table_is_refused_and_kept(self, tmp_path):
        path = tmp_path / "notes.json"
        path.write_text("my notes")
        with pytest.raises(ValueError, match="is no tuning table"):
            tune.begin(path, DEVICE)
        assert path.read_text() == "my notes"

    def test_the_first_of_the_user_begins_with_what_comes_along(self, monkeypatch):
        monkeypatch.setattr(tuned, "here", functools.cache(lambda: self.TABLE))
        found = tune.begin(tune.default_path(DEVICE), DEVICE)
        assert found.choices == self.TABLE.choices

    def test_a_damaged_one_of_the_user_is_written_anew(self):
        path = tune.default_path(DEVICE)
        path.parent.mkdir(parents=True)
        path.write_text("{")
        assert tune.begin(path, DEVICE).choices == {}
        assert not path.exists()


def test_what_is_saved_is_in_force_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [type("D", (), {"device_kind": "D"})])
    assert not tuned.prefers_kernel("ema", 1024)
    table = Tuning("D", "1", {"ema": (Choice(1024, 2.0, 1.0, 128),)})
    tune.save(tune.default_path("D"), table)
    assert tuned.prefers_kernel("ema", 1024)
