"""The plan for scale: a ring's arithmetic, plans of shapes, and the page of both."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import benchmark

script = benchmark("scale_plan")
cost, models = benchmark("scaling.cost"), benchmark("scaling.models")
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
# What two H200s took, with four exchanges of every norm.
MEASURED = "ResNet-50=34.2,ResNet-50:sharded=38.8,VGG16-BN=57.9,VGG16-BN:sharded=58.8"
LINK = cost.Link("made up", 1e9, 1e-3, "")


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return models.all_models()


def test_models_are_those_of_their_names(found: list[Any]) -> None:
    counts = [m.parameters for m in found]
    assert counts[:2] == [25_557_032, 138_361_768]
    assert counts[2] == pytest.approx(1.35e9, rel=0.01)
    assert counts[3] == pytest.approx(6.74e9, rel=0.01)
    assert [m.norms for m in found] == [53, 13, 0, 0]
    resnet, _, _, large = found
    # Masters and momentum in float32, the half copy of nearly all.
    assert resnet.state_bytes(1, False) == pytest.approx(10 * 25.56e6, rel=0.01)
    assert large.state_bytes(8, True) == pytest.approx((12 / 8 + 2) * 6.74e9, rel=0.01)
    assert large.deep_bytes == 0 and resnet.deep_bytes == pytest.approx(
        93.8e6, rel=0.01
    )


def test_a_ring_moves_twice_its_bytes_less_one_share() -> None:
    # 1 MB over 4 devices: 1.5 MB at 1 GB/s, and six hops.
    assert cost.all_reduce(1e6, 4, LINK) == pytest.approx(1.5 + 6.0)
    assert cost.half_ring(1e6, 4, LINK) == pytest.approx(0.75 + 3.0)
    assert cost.all_reduce(0.0, 4, LINK) == 0.0
    assert cost.hidden_from(1e6, 7.5, 4, 1e-3) == pytest.approx(1e9)
    assert cost.hidden_from(1e6, 6.0, 4, 1e-3) == math.inf


def test_only_the_deep_bucket_hides(found: list[Any]) -> None:
    vgg = found[1]
    fast = cost.predict(vgg, cost.LINKS[0], 2, False)
    assert fast.deep < vgg.window_ms and fast.exposed == fast.late + fast.norms
    slow = cost.predict(vgg, cost.LINKS[2], 2, False)
    assert slow.exposed == pytest.approx(
        slow.deep - vgg.window_ms + slow.late + slow.norms
    )
    assert fast.moved == pytest.approx(vgg.grad_bytes)
    assert 0 < slow.efficiency < fast.efficiency < 1
    shard = cost.predict(vgg, cost.LINKS[0], 2, True)
    assert shard.deep == 0.0
    four = cost.predict(vgg, cost.LINKS[0], 2, False, per_norm=4)
    assert four.norms == pytest.approx(2 * fast.norms) and cost.exchanges(9) == 3
    assert shard.moved == pytest.approx((vgg.grad_bytes + vgg.half_bytes) / 2)


def test_measured_steps_are_read(found: list[Any]) -> None:
    assert script.parse_measured("", found) == {}
    assert script.parse_measured("ResNet-50=3,VGG16-BN:sharded=5.5", found) == {
        ("ResNet-50", False): 3.0,
        ("VGG16-BN", True): 5.5,
    }
    for text, sentence in (
        ("AlexNet=1", "knows no 'AlexNet'"),
        ("ResNet-50", "takes NAME=MS"),
        ("ResNet-50=-1", "above 0"),
        ("ResNet-50=nan", "above 0"),
        ("ResNet-50:cut=1", "NAME:sharded"),
    ):
        with pytest.raises(ValueError, match=sentence):
            script.parse_measured(text, found)


def test_the_page_says_what_the_script_says(found: list[Any]) -> None:
    if not PAGE.exists():
        pytest.skip("a built package has no pages")
    args = argparse.Namespace(measured=MEASURED, devices=2, bus=450.0, per_norm=4)
    page = PAGE.read_text().splitlines()
    for line in filter(None, script.lines(found, args)):
        assert line in page


def test_a_picture_is_drawn(found: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    benchmark("scaling.picture").draw(found, str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
