"""The same training in PyTorch and in rjax: nothing but rounding lies between them."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import benchmark

pytest.importorskip("torch")
pytest.importorskip("sklearn")

STEPS = 100


@pytest.fixture(scope="module")
def script() -> Any:
    return benchmark("parity_torch")


@pytest.fixture(scope="module")
def single(script: Any) -> dict[str, Any]:
    return script.float32(STEPS, "coupled")


@pytest.fixture(scope="module")
def half(script: Any) -> dict[str, Any]:
    return script.float16(STEPS, "coupled")


def test_in_float32_both_stay_as_near_to_float64_as_rounding_explains(
    single: dict[str, Any],
) -> None:
    assert single["holds"]
    assert len(single["rjax"]) == len(single["bound"]) == STEPS
    for name in ("rjax", "torch"):
        assert all(a <= b for a, b in zip(single[name], single["bound"], strict=True))
        assert all(0 < distance for distance in single[name])
    # The bound is of the size of rounding, and no unit near a kink has widened it.
    assert single["bound"][0] < 4e-7 and single["bound"][-1] < 1e-5
    assert single["closest"] > 20 * max(single["rjax"])


def test_in_float32_losses_and_running_statistics_are_those_of_float64(
    single: dict[str, Any],
) -> None:
    for name in ("rjax", "torch"):
        assert single["loss"][name] == pytest.approx(
            single["loss"]["float64"], rel=1e-6
        )
    assert max(single["stats"].values()) < 1e-5 and len(single["stats"]) == 6


def test_a_real_difference_leaves_the_bound_at_once(script: Any) -> None:
    found = script.float32(4, "decoupled")
    assert not found["holds"]
    assert found["rjax"][0] > 10 * found["bound"][0]
    assert found["torch"][0] <= found["bound"][0]


def test_in_fp16_the_provoked_overflows_are_skipped_by_both(
    half: dict[str, Any],
) -> None:
    assert half["holds"] and len(half["provoked"]) == 8
    assert half["skipped"] == {"torch": half["provoked"], "rjax": half["provoked"]}


def test_in_fp16_the_scales_are_those_of_gradscaler(half: dict[str, Any]) -> None:
    scale, clean, want = 1024.0, 0, []
    for step in range(STEPS):
        want.append(scale)
        clean = 0 if step in half["provoked"] else clean + 1
        if not clean:
            scale /= 2
        elif clean == 8:
            scale, clean = scale * 2, 0
    assert half["scale"] == {"torch": want, "rjax": want}
    assert len({*want}) > 4


def test_in_fp16_the_losses_differ_by_rounding_of_fp16(half: dict[str, Any]) -> None:
    theirs, ours = half["loss"]["torch"], half["loss"]["rjax"]
    unit = 2.0**-11  # of rounding to fp16
    assert ours[0] == pytest.approx(theirs[0], rel=unit)
    assert ours == pytest.approx(theirs, rel=16 * unit)
    # Rounding this coarse sends units near the kink of ReLU to other sides.
    assert max(half["between"]) < 32 * unit


def test_the_script_shows_both_and_leaves_the_numbers(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "parity.json"
    words = ["--steps", "5", "--every", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["parity_torch.py", *words])
    assert script.main() == 0
    said = capsys.readouterr().out
    assert "within the bound at every step: True" in said
    assert said.count("torch and rjax") == 2  # steps 3 and 4 are provoked
    left = json.loads(file.read_text())
    assert f"{left['float32']['rjax'][4]:.2e}" in said
    assert left["float16"]["skipped"]["rjax"] == [3, 4]
