import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rjax
from rjax import drawing
from rjax.regions import REGIONS, Region


def _struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "bn1": {"bias": _struct(8), "scale": _struct(8)},
    "conv1": {"kernel": _struct(3, 3, 3, 8)},
    "conv2": {"kernel": _struct(3, 3, 8, 8)},
    "dense": {"bias": _struct(5), "kernel": _struct(8, 5)},
}
STATS = {"bn1": {"mean": _struct(8), "var": _struct(8)}}
EVERYTHING = rjax.Config(optimizer=rjax.optim.adam(), ema=rjax.Ema())
LEANEST = rjax.Config(precision="fp32", optimizer=rjax.optim.sgd())
# Capacities by hand: one row each for the vectors and the dense kernel, 216 + 8 and
# 576 + 8 elements in whole rows for the convolutions.
CAPACITIES = [128, 128, 128, 128, 256, 640]
EDGES = [0, 128, 256, 384, 512, 768, 1408]


def _plan(config=EVERYTHING, params=PARAMS, stats=STATS, **options) -> Any:
    return rjax.make_plan(params, config, batch_stats=stats, **options)


PLAN = _plan()
LEAN = _plan(LEANEST, params={"dense": PARAMS["dense"]}, stats=None)


def _series(letter):
    return [r for r in Region if REGIONS[r].series == letter]


def test_the_example_lies_as_computed_by_hand():
    assert [slot.capacity for slot in PLAN.slots] == CAPACITIES
    assert [slot.offset for slot in PLAN.slots] == EDGES[:-1]
    assert (PLAN.n, PLAN.bias_like) == (1408, 384)


@pytest.mark.parametrize("letter", ["W", "E", "G", "M", "V"])
def test_bounds_of_a_full_series_are_contiguous(letter):
    found = [PLAN.bounds(region) for region in _series(letter)]
    assert found == list(zip(EDGES[:-1], EDGES[1:], strict=True))


@pytest.mark.parametrize("series", ["A", "E_FP16", "G_FP16"])
def test_half_series_start_after_the_bias_like_prefix(series):
    found = [PLAN.bounds(region) for region in _series(series)]
    assert found == [(0, 128), (128, 384), (384, 1024)]


def test_bounds_span_ranges_of_regions():
    assert PLAN.bounds(Region.G_BN_BIAS, Region.G_DEEP_CONV) == (0, PLAN.n)
    assert PLAN.bounds(Region.W_FC_BIAS, Region.W_FIRST_CONV) == (256, 768)
    half = PLAN.bounds(Region.A_FC_WEIGHT, Region.A_DEEP_CONV)
    assert half == (0, PLAN.n - PLAN.bias_like)


def test_a_range_skips_regions_that_are_empty():
    plan = _plan(LEANEST, params={"dense": PARAMS["dense"]}, stats=None)
    assert plan.bounds(Region.W_BN_BIAS, Region.W_DEEP_CONV) == (0, 256)
    assert plan.bounds(Region.W_FIRST_CONV, Region.W_DEEP_CONV) == (0, 0)


def test_trust_ratios_are_counted_per_tensor():
    plan = _plan(rjax.Config(optimizer=rjax.optim.lars()))
    assert [plan.bounds(r) for r in _series("N")] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("letter", ["A", "E", "E_FP16", "G_FP16", "M", "V", "N", "B"])
def test_bounds_of_what_is_gated_off_are_empty(letter):
    for region in _series(letter):
        start, stop = LEAN.bounds(region)
        assert start == stop


def test_statistics_are_counted_by_name():
    for region in (*_series("B"), *_series("W_EQ")):
        assert PLAN.bounds(region) == (0, 8)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (Region.W_DEEP_CONV, Region.E_BN_BIAS),
        (Region.G_DEEP_CONV, Region.G_BN_BIAS),
        (Region.W_EQ_BIAS, Region.W_BN_BIAS),
        (Region.G_FC_WEIGHT, Region.G_FC_WEIGHT_FP16),
        (Region.B_PREV_MEAN, Region.B_NEXT_VAR),
    ],
)
def test_bounds_refuse_what_is_no_range(first, last):
    message = f"two regions of one arena in order, got {first.name} and {last.name}"
    with pytest.raises(ValueError, match=message):
        PLAN.bounds(first, last)


def test_gates_follow_the_config():
    assert dataclasses.astuple(PLAN.gates) == (
        True,
        True,
        True,
        True,
        False,
        True,
        True,
    )
    assert not any(dataclasses.astuple(LEAN.gates))
    assert _plan(rjax.Config(optimizer=rjax.optim.lars())).gates.ratios
    assert _plan(rjax.Config(optimizer=rjax.optim.momentum())).gates.mu
    assert not _plan(rjax.Config(optimizer=rjax.optim.momentum())).gates.nu
    assert not _plan(rjax.Config(optimizer=rjax.optim.sgd())).gates.mu


@pytest.mark.parametrize("plan", [PLAN, LEAN], ids=["everything", "leanest"])
def test_rows_are_the_enabled_regions(plan):
    rows = plan.regions()
    assert [row.region for row in rows] == [
        region for region, info in REGIONS.items() if info.enabled(plan.gates)
    ]
    for row in rows:
        info = REGIONS[row.region]
        assert row.owner == info.owner
        assert row.dtype == ("float16" if info.storage == "half" else info.storage)
        if info.role is not None:
            start, stop = plan.bounds(row.region)
            assert (row.offset, row.elements) == (start, stop - start)
        if row.elements is not None:
            assert row.nbytes == row.elements * jnp.dtype(row.dtype).itemsize


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_rows_say_which_half(precision):
    config = rjax.Config(precision=precision, ema=rjax.Ema())
    kinds = {row.dtype for row in _plan(config).regions() if "FP16" in row.region.name}
    assert kinds == {{"fp16": "float16", "bf16": "bfloat16"}[precision]}


def test_planned_bytes_are_those_of_the_state():
    params = jax.tree.map(lambda s: jnp.zeros(s.shape), PARAMS)
    stats = jax.tree.map(lambda s: jnp.zeros(s.shape), STATS)
    state = rjax.init_state(PLAN, params, batch_stats=stats)
    planned = {}
    for row in PLAN.regions():
        series = REGIONS[row.region].series
        planned[series] = planned.get(series, 0) + (row.nbytes or 0)
    for series, arena in {
        "W": state.master,
        "A": state.compute,
        "M": state.mu,
        "V": state.nu,
        "E": state.ema,
        "E_FP16": state.ema_compute,
    }.items():
        assert planned[series] == arena.nbytes
    rows = {row.region: row for row in PLAN.regions()}
    current = (Region.B_PREV_MEAN, Region.B_PREV_VAR)
    assert sum(rows[region].nbytes for region in current) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(state.batch_stats)
    )
    assert PLAN.nbytes == sum(row.nbytes or 0 for row in PLAN.regions())


def test_the_table_shows_every_row_aligned():
    summary, header, rule, *lines = PLAN.table().splitlines()
    assert summary.startswith("853 parameters in 6 slots, fp16, 1,408 elements")
    assert PLAN.fingerprint[:12] in summary
    assert header.split() == [
        *("no", "region", "owner", "dtype", "offset", "elements", "bytes"),
    ]
    assert set(rule) == {"-"}
    assert len({len(line) for line in (header, rule, *lines)}) == 1
    assert [line.split()[:2] for line in lines] == [
        [f"{row.region:03d}", row.region.name] for row in PLAN.regions()
    ]
    deep = next(line for line in lines if "W_DEEP_CONV" in line)
    assert deep.split()[2:] == ["state", "float32", "768", "640", "2,560"]
    unknown = next(line for line in lines if "I_A_DATA" in line)
    assert unknown.split()[2:] == ["input", "any", "-", "-", "-"]


def test_frozen_parameters_are_in_the_summary():
    plan = _plan(rule=lambda path, leaf: rjax.Param(trainable="dense" not in path))
    assert "808 parameters in 4 slots + 45 frozen" in plan.table().splitlines()[0]


def test_the_html_draws_the_layout_and_folds_the_table():
    html = PLAN._repr_html_()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    lines = PLAN.table().splitlines()[3:]
    assert cells == [cell for line in lines for cell in line.split()]
    assert PLAN.table().splitlines()[0] in html
    assert drawing.svg(PLAN) in html
    assert f"<details><summary>{len(lines)} regions</summary><table>" in html
    for tag in ("div", "details", "table", "svg"):
        assert html.count(f"<{tag}") == html.count(f"</{tag}>") == 1


def test_plans_are_equal_by_value_and_hashable():
    assert _plan() == PLAN and hash(_plan()) == hash(PLAN)
    assert len({_plan(), PLAN, LEAN}) == 2
    assert PLAN != LEAN
    assert _plan(rjax.Config()) != _plan(rjax.Config(learning_rate=0.2))


def test_functions_in_the_config_count_by_identity():
    def constant(count):
        return jnp.float32(0.1)

    one = _plan(rjax.Config(learning_rate=constant))
    assert one == _plan(rjax.Config(learning_rate=constant))
    other = _plan(rjax.Config(learning_rate=lambda count: constant(count)))
    assert one != other and one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("owner", "field"),
    [(PLAN, "slots"), (PLAN.slots[0], "offset"), (PLAN.config, "ema")],
)
def test_plans_are_frozen(owner, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(owner, field, None)


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(EVERYTHING, learning_rate=3.0),
        dataclasses.replace(EVERYTHING, learning_rate=lambda count: jnp.float32(1.0)),
        dataclasses.replace(EVERYTHING, optimizer=rjax.optim.adamw(b1=0.5)),
        dataclasses.replace(EVERYTHING, clip=rjax.Clip(norm=1.0)),
        dataclasses.replace(EVERYTHING, ema=rjax.Ema(decay=0.5)),
        dataclasses.replace(EVERYTHING, scaling=rjax.scaling.static(2.0)),
        dataclasses.replace(EVERYTHING, accumulation_steps=4),
    ],
    ids=["rate", "schedule", "optimizer", "clip", "decay", "scaling", "accumulation"],
)
def test_the_fingerprint_ignores_what_moves_no_slot(config):
    assert _plan(config).fingerprint == PLAN.fingerprint


def _without(tree, module):
    return {name: leaf for name, leaf in tree.items() if name != module}


@pytest.mark.parametrize(
    "changed",
    [
        _plan(dataclasses.replace(EVERYTHING, ema=None)),
        _plan(dataclasses.replace(EVERYTHING, optimizer=rjax.optim.momentum())),
        _plan(dataclasses.replace(EVERYTHING, precision="bf16")),
        _plan(dataclasses.replace(EVERYTHING, precision="fp32")),
        _plan(stats=None),
        _plan(params=_without(PARAMS, "conv2")),
        _plan(params={**PARAMS, "dense": {"kernel": _struct(8, 5)}}),
        _plan(params={**PARAMS, "conv2": {"kernel": _struct(3, 3, 8, 7)}}),
        _plan(params={**_without(PARAMS, "conv2"), "conv9": PARAMS["conv2"]}),
        _plan(rule=lambda path, leaf: rjax.Param(role="deep_conv")),
        _plan(rule=lambda path, leaf: rjax.Param(trainable="dense" not in path)),
        _plan(stats={"bn2": STATS["bn1"]}),
    ],
    ids=[
        *("ema", "optimizer", "bf16", "fp32", "statistics", "fewer", "no bias"),
        *("shape", "path", "role", "frozen", "statistics' path"),
    ],
)
def test_the_fingerprint_notices_layout_and_gates(changed):
    assert changed.fingerprint != PLAN.fingerprint


ELSEWHERE = """
import jax, jax.numpy as jnp, rjax
struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
params = {
    "dense": {"kernel": struct(8, 5), "bias": struct(5)},
    "conv2": {"kernel": struct(3, 3, 8, 8)},
    "conv1": {"kernel": struct(3, 3, 3, 8)},
    "bn1": {"scale": struct(8), "bias": struct(8)},
}
stats = {"bn1": {"var": struct(8), "mean": struct(8)}}
config = rjax.Config(optimizer=rjax.optim.adam(), ema=rjax.Ema(), learning_rate=1.0)
print(rjax.make_plan(params, config, batch_stats=stats).fingerprint)
"""


def test_the_fingerprint_is_the_same_in_every_process():
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == PLAN.fingerprint


def test_pack_ignores_frozen_leaves_and_takes_none_for_them():
    params = {"a": np.ones((2, 2), np.float32), "b": np.full((3,), 2.0, np.float32)}
    config = rjax.Config()
    plan = rjax.make_plan(
        params, config, rule=lambda path, leaf: rjax.Param(trainable=path == "b")
    )
    want = np.zeros(128, np.float32)
    want[:3] = 2.0
    np.testing.assert_array_equal(plan.pack(params), want)
    np.testing.assert_array_equal(plan.pack({"a": None, "b": params["b"]}), want)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"w": np.ones((2, 2))}, "lacks 'v'"),
        ({"w": np.ones((2, 2)), "v": np.ones(2), "x": 1.0}, "has 'x' too much"),
        ({"w": np.ones((2, 2)), "v": None}, "lacks 'v'"),
        ({"w": np.ones((2, 2)), "v": {"v": np.ones(2)}}, "lacks 'v'"),
        ({"w": np.ones((2, 3)), "v": np.ones(2)}, r"'w' must have shape \[2, 2\]"),
        ({"w": np.ones((4,)), "v": np.ones(2)}, r"got \[4\]"),
        ({"w": np.ones((2, 2)), "v": np.ones(2, int)}, "'v' must be floating"),
    ],
)
def test_pack_says_by_path_what_is_wrong(tree, message):
    plan = rjax.make_plan({"w": _struct(2, 2), "v": _struct(2)}, rjax.Config())
    with pytest.raises(ValueError, match=message) as caught:
        plan.pack(tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(1407,), (1408, 1), ()])
def test_unpack_refuses_other_lengths(shape):
    with pytest.raises(ValueError, match=r"`arena` must have shape \[1408\], got"):
        PLAN.unpack(jnp.zeros(shape))


def test_packing_is_one_concatenation():
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape), PARAMS)
    jaxpr = str(jax.make_jaxpr(PLAN.pack)(arrays))
    assert jaxpr.count("concatenate[") == 1
