import dataclasses
import re
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rjax
from rjax import drawing
from rjax.regions import REGIONS, Region, Role

SVG = "{http://www.w3.org/2000/svg}"
EVERYTHING = rjax.Config(optimizer=rjax.optim.adam(), ema=rjax.Ema())
ARENAS = {
    "W": ("master", "float32"),
    "A": ("compute", "float16"),
    "G": ("grads", "float32"),
    "G_FP16": ("grads_half", "float16"),
    "M": ("mu", "float32"),
    "V": ("nu", "float32"),
    "E": ("ema", "float32"),
    "E_FP16": ("ema_compute", "float16"),
}


def _struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _plan(params, config=EVERYTHING, **options) -> Any:
    return rjax.make_plan(params, config, **options)


SIX = {
    "bn1": {"bias": _struct(8), "scale": _struct(500)},
    "conv1": {"kernel": _struct(3, 3, 3, 20)},
    "conv2": {"kernel": _struct(3, 3, 8, 20)},
    "conv3": {"kernel": _struct(3, 3, 20, 8)},
    "dense": {"bias": _struct(5), "kernel": _struct(8, 50)},
}
PLAN = _plan(SIX)
# Two parts of 128 elements beside 200,000 would be a quarter of a pixel wide each.
LOPSIDED = _plan(
    {"bias": _struct(3), "k": _struct(1, 1, 8, 8), "w": _struct(200_000, 1)}
)


def _parsed(plan) -> Any:
    return ElementTree.fromstring(drawing.svg(plan))


def _box(rect):
    """Return left, right, top and height of a rect."""
    x, y, width, height = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
    return x, x + width, y, height


def _texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def _regions(root):
    """Return {region: its rect}."""
    rects = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "rjax-region"]
    names = [rect.find(f"{SVG}title").text.split(":")[0] for rect in rects]
    assert len(set(names)) == len(names)
    return {Region[name]: rect for name, rect in zip(names, rects, strict=True)}


def _slots(root):
    """Return [(tooltip, rect in the strip, column)]."""
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "rjax-slot"]
    return [(g.find(f"{SVG}title").text, *g.findall(f"{SVG}rect")) for g in groups]


def _edges(root):
    """Return the boundaries of every bar, as [x]."""
    paths = [path.get("d") for path in root.iter(f"{SVG}path")]
    return [[float(x) for x in re.findall(r"M([\d.]+) ", d)] for d in paths]


def _enabled(plan):
    return {
        region
        for region, info in REGIONS.items()
        if info.series in ARENAS and plan.bounds(region) != (0, 0)
    }


@pytest.mark.parametrize(
    ("config", "series"),
    [
        (EVERYTHING, list(ARENAS)),
        (rjax.Config(), ["W", "A", "G", "G_FP16", "M"]),
        (rjax.Config(precision="fp32"), ["W", "G", "M"]),
        (rjax.Config(precision="fp32", ema=rjax.Ema()), ["W", "G", "M", "E"]),
        (rjax.Config(optimizer=rjax.optim.sgd()), ["W", "A", "G", "G_FP16"]),
        (rjax.Config(optimizer=rjax.optim.lars()), ["W", "A", "G", "G_FP16", "M"]),
    ],
)
def test_one_bar_for_every_enabled_arena(config, series):
    plan = _plan(SIX, config)
    root = _parsed(plan)
    texts = _texts(root)
    fields = [field for field, _ in ARENAS.values()]
    assert [text for text in texts if text in fields] == [ARENAS[s][0] for s in series]
    assert [t for t in texts if t in [f"{s} {ARENAS[s][1]}" for s in ARENAS]] == [
        f"{s} {ARENAS[s][1]}" for s in series
    ]
    assert set(_regions(root)) == _enabled(plan)
    assert {REGIONS[region].series for region in _regions(root)} == set(series)
    tops = {REGIONS[r].series: _box(rect)[2] for r, rect in _regions(root).items()}
    assert list(tops.values()) == sorted(tops.values())
    assert len(set(tops.values())) == len(series)


@pytest.mark.parametrize("plan", [PLAN, LOPSIDED], ids=["six", "lopsided"])
def test_a_part_is_at_one_place_in_every_arena(plan):
    places: dict[Any, set] = {}
    for region, rect in _regions(_parsed(plan)).items():
        places.setdefault(REGIONS[region].role, set()).add(_box(rect)[:2])
    assert all(len(found) == 1 for found in places.values())
    edges = sorted(edge for found in places.values() for edge in found)
    for (_, right), (left, _) in zip(edges[:-1], edges[1:], strict=True):
        assert left == pytest.approx(right, abs=0.011)
    assert list(places) == sorted(places, key=list(Role).index)


@pytest.mark.parametrize("plan", [PLAN, LOPSIDED], ids=["six", "lopsided"])
def test_a_slot_is_at_one_place_in_every_arena(plan):
    root = _parsed(plan)
    boxes = [_box(rect) for _, rect, _ in _slots(root)]
    assert len(boxes) == len(plan.slots)
    regions = {REGIONS[r].role: _box(rect) for r, rect in _regions(root).items()}
    for slot, (left, right, _, _) in zip(plan.slots, boxes, strict=True):
        start, stop, _, _ = regions[slot.part]
        assert start - 0.02 <= left < right <= stop + 0.02
    full = [left for left, right, *_ in boxes[1:] if right - left >= 3]
    half = [
        left
        for slot, (left, right, *_) in zip(plan.slots, boxes, strict=True)
        if slot.half and slot.offset > plan.bias_like and right - left >= 3
    ]
    for (_, dtype), edges in zip(ARENAS.values(), _edges(root), strict=True):
        assert edges == (full if dtype == "float32" else half)
    for _, rect, column in _slots(root):
        assert _box(rect)[:2] == _box(column)[:2]


def test_the_bars_are_to_scale_if_they_can_be():
    root = _parsed(PLAN)
    boxes = {region: _box(rect) for region, rect in _regions(root).items()}
    unit = (boxes[Region.W_DEEP_CONV][1] - boxes[Region.W_BN_BIAS][0]) / PLAN.n
    for region, (left, right, _, height) in boxes.items():
        start, stop = PLAN.bounds(region)
        assert right - left == pytest.approx(unit * (stop - start), abs=0.02)
        assert height == (13 if REGIONS[region].storage == "half" else 26)
    assert not any("Not to scale" in text for text in _texts(root))


def test_a_tiny_part_stays_visible_and_the_picture_says_so():
    root = _parsed(LOPSIDED)
    widths = [b - a for a, b, *_ in map(_box, _regions(root).values())]
    assert min(widths) == pytest.approx(6, abs=0.02)
    assert max(widths) == pytest.approx(432 - 12, abs=0.02)
    assert any("Not to scale" in text and "6 px" in text for text in _texts(root))


def test_widening_one_part_may_make_another_too_narrow():
    """Of 432 px, 6.01 for the dense part are left as 5.9 once the bias has its 6."""
    plan = _plan(
        {"bias": _struct(3), "w": _struct(3000, 1), "k": _struct(1, 1, 8, 27000)}
    )
    widths = [b - a for a, b, *_ in map(_box, _regions(_parsed(plan)).values())]
    shares = np.array([slot.capacity for slot in plan.slots]) / plan.n * 432
    assert 6 < shares[1] < 6 / (1 - 6 / 432)
    assert min(widths) == pytest.approx(6, abs=0.02)


def test_tooltips_say_region_and_slot():
    root = _parsed(PLAN)
    titles = {r: rect.find(f"{SVG}title").text for r, rect in _regions(root).items()}
    assert titles[Region.W_BN_WEIGHT] == (
        "W_BN_WEIGHT: elements 128 to 640 of master, float32, 2,048 bytes"
    )
    assert titles[Region.E_FC_WEIGHT_FP16] == (
        "E_FC_WEIGHT_FP16: elements 0 to 512 of ema_compute, float16, 1,024 bytes"
    )
    found = {tooltip.split()[0]: tooltip for tooltip, _, _ in _slots(root)}
    assert found["bn1/scale"].splitlines() == [
        "bn1/scale [500], BN_WEIGHT",
        "500 of 512 elements used, from 128",
        "float32: 2,048 bytes",
    ]
    assert found["dense/kernel"].splitlines() == [
        "dense/kernel [8, 50], FC_WEIGHT",
        "400 of 512 elements used, from 768",
        "float32: 2,048 bytes",
        "float16: 1,024 bytes, from 0",
    ]


def test_bytes_owner_and_legend_are_written():
    texts = _texts(_parsed(PLAN))
    state = jax.eval_shape(lambda p: rjax.init_state(PLAN, p), SIX)
    for field in ("master", "compute", "nu", "ema_compute"):
        arena = getattr(state, field)
        at = texts.index(field)
        nbytes = drawing.readable(arena.size * arena.dtype.itemsize)
        assert texts[at : at + 4][2:] == [nbytes, "state"]
    assert texts[texts.index("grads") + 3] == "step"
    legend = [text.split()[0] for text in texts if text.split()[0] in Role.__members__]
    assert legend == [role.name for role in Role]
    assert any(f"element 0 to {PLAN.n:,}" in text for text in texts)


def test_colours_are_those_of_the_legend():
    root = _parsed(PLAN)
    keys = [
        r.get("fill") for r in root.iter(f"{SVG}rect") if r.get("class") == "rjax-key"
    ]
    colours = dict(zip(Role, keys, strict=True))
    assert len(set(keys)) == 6
    for region, rect in _regions(root).items():
        role = REGIONS[region].role
        assert role and rect.get("fill") == colours[role]


def test_only_what_is_there_is_in_the_legend():
    texts = _texts(_parsed(_plan({"dense": SIX["dense"]})))
    assert [t for t in texts if t.split()[0] in Role.__members__] == [
        *("FC_BIAS other biases", "FC_WEIGHT dense kernels"),
    ]


def test_names_that_fit_are_written_into_the_strip():
    texts = _texts(_parsed(PLAN))
    assert "conv2/kernel" in texts and "conv3/kernel" in texts
    assert "bn1/bias" not in texts and "dense/bias" not in texts


HOSTILE = "<b onclick=\"alert('x')\">&amp;\x00\n\ud800"


def test_names_are_escaped():
    plan = _plan({HOSTILE: _struct(9, 9)})
    picture = drawing.svg(plan)
    root = ElementTree.fromstring(picture)  # which a raw "<" or "&" would break
    shown = HOSTILE.translate(dict.fromkeys(map(ord, "\x00\n\ud800"), "\ufffd"))
    ((tooltip, _, _),) = _slots(root)
    assert tooltip.startswith(f"{shown} [9, 9], FC_WEIGHT\n")
    assert shown in _texts(root)
    picture.encode()
    for text in (picture, plan._repr_html_()):
        assert "<b " not in text and 'onclick="' not in text


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1)])
def test_a_plan_of_one_parameter(shape):
    root = _parsed(_plan({"w": _struct(*shape)}))
    ((tooltip, rect, _),) = _slots(root)
    assert tooltip.startswith(f"w {list(shape)}, ")
    assert _box(rect)[:2] == (104, 536)
    assert {_box(rect)[:2] for rect in _regions(root).values()} == {(104, 536)}
    if len(shape) < 2:
        texts = _texts(root)
        assert texts[texts.index("compute") + 2] == "0 B"


def test_a_plan_of_nothing():
    plan = dataclasses.replace(PLAN, slots=())
    root = _parsed(plan)
    assert not _regions(root) and not _slots(root)
    assert any("element 0 to 0" in text for text in _texts(root))
    assert "rjax plan" in plan._repr_html_()


def test_a_kernel_kept_in_float32_lies_in_the_prefix():
    def rule(path, leaf):
        return rjax.Param(precision="float32") if path == "dense/kernel" else None

    plan = _plan({"dense": SIX["dense"], "conv": SIX["conv2"]}, rule=rule)
    root = _parsed(plan)
    assert set(_regions(root)) == _enabled(plan)
    left, right, *_ = _box(_regions(root)[Region.W_FC_BIAS])
    assert (right - left) / 432 == pytest.approx(640 / plan.n, abs=1e-3)
    legend = [t.split()[0] for t in _texts(root) if t.split()[0] in Role.__members__]
    assert legend == ["FC_BIAS", "DEEP_CONV"]
    tooltip, _, _ = _slots(root)[1]
    assert "FC_BIAS" in tooltip and "float16" not in tooltip
    large = {"kernel": _struct(400, 500)}
    root = _parsed(_plan({"dense": SIX["dense"], "other": large}, rule=rule))
    left, right, *_ = _box(_regions(root)[Region.W_FC_BIAS])
    assert right - left == pytest.approx(6, abs=0.02)


def _layers(count):
    layer = {"bias": _struct(16), "kernel": _struct(3, 3, 16, 16)}
    return {f"stage{i}_block/conv_with_a_long_name": layer for i in range(count)}


def test_two_hundred_slots_are_each_drawn_in_little_space():
    plan = _plan(_layers(100))
    picture = drawing.svg(plan)
    root = ElementTree.fromstring(picture)
    assert len(_slots(root)) == 200
    # The kernels are wide enough for a boundary, the biases are not.
    assert {len(edges) for edges in _edges(root)} == {99, 100}
    assert len(picture) < 200_000


def test_a_thousand_slots_are_not_drawn_one_by_one():
    plan = _plan(_layers(500))
    root = _parsed(plan)
    assert not _slots(root)
    assert "1,000, too many to draw one by one" in _texts(root)
    assert set(_regions(root)) == _enabled(plan)
    assert len(drawing.svg(plan)) < 200_000


@pytest.mark.parametrize("plan", [PLAN, LOPSIDED], ids=["six", "lopsided"])
def test_nothing_lies_outside_or_on_something_else(plan):
    root = _parsed(plan)
    width, height = (float(n) for n in root.get("viewBox", "").split()[2:])
    columns = [column for _, _, column in _slots(root)]
    for rect in root.iter(f"{SVG}rect"):
        left, right, top, tall = _box(rect)
        assert 0 <= left < right <= width and 0 <= top and top + tall <= height
        if rect.get("class") == "rjax-region":
            assert all(_box(column)[3] + 6 >= top + tall for column in columns)
    lines: dict[float, list[tuple[float, float]]] = {}
    for text in root.iter(f"{SVG}text"):
        x, y, long = float(text.get("x")), float(text.get("y")), 6 * len(text.text)
        left = x - long if text.get("text-anchor") == "end" else x
        lines.setdefault(y, []).append((left, left + long))
        assert left >= 0 and left + long <= width + 1 and y <= height - 4
    for spans in lines.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1 for a, b in zip(spans[:-1], spans[1:], strict=True))
    assert all(
        b - a >= 11 for a, b in zip(sorted(lines)[:-1], sorted(lines)[1:], strict=True)
    )


def test_it_fits_light_dark_and_narrow_pages():
    picture = drawing.svg(PLAN)
    style = re.findall(r"<style>(.*?)</style>", picture)[0]
    assert "currentColor" in style
    assert all(rule.startswith(".rjax-") for rule in style.split("}")[:-1])
    assert not re.search(r"white|black|#fff|#000|url\(|href|<script", picture)
    (root,) = re.findall(r"<svg [^>]*>", picture)
    assert "width:100%" in root and "max-width" in root and "viewBox" in root
    assert drawing.svg(_plan(SIX)) == picture


def test_a_column_shows_on_top_and_is_in_nothings_way():
    picture = drawing.svg(PLAN)
    assert picture.index('rjax-slot"') > picture.rindex('rjax-region"')
    assert ".rjax-column{fill-opacity:0;pointer-events:none}" in picture
    assert ".rjax-slot:hover .rjax-column{" in picture


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
    ],
)
def test_readable_bytes(nbytes, text):
    assert drawing.readable(nbytes) == text


def test_a_file_of_its_own_has_colours_of_its_own():
    picture = drawing.page_svg(PLAN)
    ElementTree.fromstring(picture)
    assert "background:#fff" in picture and "prefers-color-scheme:dark" in picture
    assert picture.replace(drawing._PAGE, "", 1) == drawing.svg(PLAN)


def test_the_command_draws_into_a_file(tmp_path, capsys):
    from rjax.cli import main

    words = ["plan", "--data", "digits", "--model", "mlp", "--svg"]
    assert main([*words, str(tmp_path / "plan.svg")]) == 0
    assert "W_FC_WEIGHT" in capsys.readouterr().out
    root: Any = ElementTree.fromstring((tmp_path / "plan.svg").read_text())
    assert Region.W_FC_WEIGHT in _regions(root)
    assert main([*words, str(tmp_path / "none" / "plan.svg")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--svg" in said and "cannot be written" in said
