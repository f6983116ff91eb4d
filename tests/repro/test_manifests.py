"""Differences of manifests, the likeliest cause first."""

import json
from pathlib import Path
from typing import Any

from rjax.repro.manifests import Causes, causes

BASE: dict[str, Any] = {
    "format": 1, "status": "finished", "started": "1", "ended": "2",
    "versions": {"python": "3.11", "jax": "0.10", "jaxlib": "0.10", "numpy": "2"},
    "device": {"platform": "gpu", "kind": "H200", "count": 1},
    "environment": {},
    "source": {"revision": "abc", "dirty": False},
    "command": "rjax train",
    "options": {"out": "a", "epochs": 3, "data_dir": None, "seed": 0},
    "config": {"precision": "fp16", "ema": None},
    "seed": 0,
    "data": {"name": "digits", "train": 10, "fingerprint": "1"},
    "plan": {"fingerprint": "p", "slots": 4},
    "results": {"steps": 3},
}  # fmt: skip


def said(tmp_path: Path, a: Any, b: Any, plans: tuple[str, str] = ("p", "p")) -> Causes:
    folders = tmp_path / "a", tmp_path / "b"
    for folder, content in zip(folders, (a, b), strict=True):
        folder.mkdir(exist_ok=True)
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / "manifest.json").write_text(text)
    return causes(*folders, plans)


def test_clocks_results_and_places_are_no_causes(tmp_path: Path) -> None:
    other = BASE | {"started": "5", "ended": "6", "results": {}, "command": "x"}
    other["options"] = BASE["options"] | {"out": "b", "data_dir": "d"}
    assert said(tmp_path, BASE, other) == Causes((), ())


def test_the_likeliest_comes_first(tmp_path: Path) -> None:
    other = {
        "environment": {"XLA_FLAGS": "--x"},
        "device": {"platform": "cpu", "kind": "cpu", "count": 2},
        "versions": {"python": "3.12", "jax": "0.12", "jaxlib": "0.12", "numpy": "2"},
        "source": {"revision": "abd", "dirty": True},
        "plan": {"fingerprint": "q", "slots": 4},
        "options": {"epochs": 4, "seed": 1},
        "config": {"precision": "fp16", "ema": {"type": "Ema", "decay": 0.9}},
        "data": {"name": "mnist", "train": 10, "fingerprint": "2"},
        "seed": 1,
        "status": "failed",
        "mine": 1,
    }
    found = said(tmp_path, BASE, other).found
    assert [cause.name for cause in found] == [
        *("status", "seed", "data.fingerprint", "data.name", "config.ema"),
        *("options.epochs", "plan.fingerprint", "source.revision", "source.dirty"),
        *("versions.jax", "versions.jaxlib", "versions.python"),
        *("device.platform", "device.kind", "device.count", "environment.XLA_FLAGS"),
        "mine",
    ]
    assert str(found[1]) == "seed: 0 in A, 1 in B"
    assert str(found[4]) == 'config.ema: null in A, {"decay": 0.9, "type": "Ema"} in B'
    assert str(found[-1]) == "mine: absent in A, 1 in B"


def test_a_seed_among_the_options_only(tmp_path: Path) -> None:
    a, b = ({"options": {"seed": seed}} for seed in (0, 1))
    assert [cause.name for cause in said(tmp_path, a, b).found] == ["options.seed"]


def test_a_missing_manifest_is_said_and_the_plans_still_compared(
    tmp_path: Path,
) -> None:
    found = said(tmp_path, BASE, None, ("p", "q"))
    assert [str(cause) for cause in found.found] == [
        'plan.fingerprint: "p" in A, "q" in B'
    ]
    assert found.notes == ("B has no manifest: what it ran with is not known.",)


def test_a_damaged_manifest_is_said(tmp_path: Path) -> None:
    for text in ("{", "[]", "\x00", "[" * 100_000):
        found = said(tmp_path, text, BASE)
        assert found.found == () and "cannot be read" in found.notes[0]


def test_long_values_are_cut_in_the_text_only(tmp_path: Path) -> None:
    other = BASE | {"config": {"precision": "x" * 500, "ema": None}}
    [cause] = said(tmp_path, BASE, other).found
    assert len(cause.b) == 502 and len(str(cause)) < 200
