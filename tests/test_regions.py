import dataclasses

import pytest

from rjax.regions import BIAS_LIKE, HALF_ROLES, REGIONS, ROLES, Gates, Region, Role

P = ("BN_BIAS", "BN_WEIGHT", "FC_BIAS", "FC_WEIGHT", "FIRST_CONV", "DEEP_CONV")
Q = P[3:]


def _series(letter, parts, suffix=""):
    return [f"{letter}_{part}{suffix}" for part in parts]


# The article's list, in its order: number 1 first.
NAMES = [
    *("B_PREV_MEAN", "B_PREV_VAR", "B_NEXT_MEAN", "B_NEXT_VAR"),
    *("W_EQ_BIAS", "W_EQ_SCALE"),
    *_series("W", P),
    *_series("E", P),
    *_series("E", Q, "_FP16"),
    *_series("A", Q),
    *_series("G", P),
    "R_RESULT",
    *_series("G", Q, "_FP16"),
    *_series("M", P),
    *_series("V", P),
    *_series("N", Q),
    *("I_A_LABEL", "I_A_DATA", "I_B_LABEL", "I_B_DATA"),
    *("F_FEATURE_FP32", "F_GRAD_SLOT_FP32", "F_FEATURE_FP16", "F_GRAD_SLOT_FP16"),
    *("S_SCALAR_FP32", "S_SCALAR_FP16", "S_SCALAR_INT32", "S_SCALAR_INT8", "S_MASK"),
    *("T_TEMP_FP32", "T_TEMP_FP16", "T_TEMP_INT32", "T_TEMP_INT8"),
    *("R_PREDICTED_LABEL", "R_RESULT_ACCUMULATED"),
]
ALL_ON = Gates(
    half=True, ema=True, mu=True, nu=True, ratios=True, norms=True, statistics=True
)


def _enabled(**changes):
    gates = dataclasses.replace(ALL_ON, **changes)
    return {region.name for region, info in REGIONS.items() if info.enabled(gates)}


def _numbers(first, last):
    return {NAMES[number - 1] for number in range(first, last + 1)}


def test_the_68_regions_have_the_numbers_and_names_of_the_article():
    assert len(NAMES) == 68
    assert [region.name for region in Region] == NAMES
    assert [int(region) for region in Region] == list(range(1, 69))
    assert list(REGIONS) == list(Region)
    assert all(info.region is region for region, info in REGIONS.items())


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (5, "W_EQ_BIAS"),
        (12, "W_DEEP_CONV"),
        (19, "E_FC_WEIGHT_FP16"),
        (22, "A_FC_WEIGHT"),
        (30, "G_DEEP_CONV"),
        (31, "R_RESULT"),
        (47, "N_FC_WEIGHT"),
        (68, "R_RESULT_ACCUMULATED"),
    ],
)
def test_landmarks(number, name):
    assert Region(number) is Region[name]


def test_roles_keep_the_order_of_every_arena():
    assert [role.name for role in ROLES] == list(P)
    assert [role.name for role in HALF_ROLES] == list(Q)
    assert [role for role in Role if role.bias_like] == list(BIAS_LIKE)


OWNERS = {
    "state": _numbers(1, 2) | _numbers(7, 24) | _numbers(35, 46) | _numbers(58, 61)
    | {"R_RESULT_ACCUMULATED"},
    "step": _numbers(3, 4) | _numbers(25, 34) | _numbers(47, 49),
    "input": _numbers(50, 53),
    "eval": {"W_EQ_BIAS", "W_EQ_SCALE", "R_PREDICTED_LABEL"},
    "xla": _numbers(54, 57) | {"S_MASK"} | _numbers(63, 66),
}  # fmt: skip


@pytest.mark.parametrize("owner", OWNERS)
def test_owners(owner):
    found = {region.name for region, info in REGIONS.items() if info.owner == owner}
    assert found == OWNERS[owner]


def test_every_region_has_an_owner():
    assert sum(map(len, OWNERS.values())) == len(NAMES)


STORAGE = {
    "half": _numbers(19, 24) | _numbers(32, 34) | _numbers(56, 57)
    | {"S_SCALAR_FP16", "T_TEMP_FP16"},
    "int32": {"S_SCALAR_INT32", "T_TEMP_INT32", "I_A_LABEL", "I_B_LABEL",
              "R_PREDICTED_LABEL"},
    "int8": {"S_SCALAR_INT8", "T_TEMP_INT8"},
    "any": {"I_A_DATA", "I_B_DATA", "S_MASK"},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_storage(name):
    wanted = [kind for kind, names in STORAGE.items() if name in names]
    assert REGIONS[Region[name]].storage == (wanted or ["float32"])[0]


@pytest.mark.parametrize("letter", ["W", "E", "A", "G", "M", "V", "N"])
def test_series_list_their_roles_in_order(letter):
    members = [info for info in REGIONS.values() if info.series == letter]
    assert [f"{letter}_{info.role.name}" for info in members if info.role] == [
        info.region.name for info in members
    ]
    assert [info.role for info in members] == list(
        HALF_ROLES if letter in "AN" else ROLES
    )


@pytest.mark.parametrize("series", ["E_FP16", "G_FP16"])
def test_half_series_are_arenas_of_their_own(series):
    members = [info for info in REGIONS.values() if info.series == series]
    assert [info.role for info in members] == list(HALF_ROLES)


def test_all_gates_on_leave_out_the_float32_features_only():
    assert set(NAMES) - _enabled() == {"F_FEATURE_FP32", "F_GRAD_SLOT_FP32"}


@pytest.mark.parametrize(
    ("gate", "gone"),
    [
        ("half", STORAGE["half"]),
        ("ema", _numbers(13, 21)),
        ("mu", _numbers(35, 40)),
        ("nu", _numbers(41, 46)),
        ("ratios", _numbers(47, 49)),
        ("norms", {name for name in NAMES if "_BN_" in name}),
        ("statistics", _numbers(1, 6)),
    ],
)
def test_a_gate_takes_away_its_regions(gate, gone):
    assert _enabled() - _enabled(**{gate: False}) == gone


def test_float32_features_come_with_float32_precision():
    assert _enabled(half=False) - _enabled() == {"F_FEATURE_FP32", "F_GRAD_SLOT_FP32"}
