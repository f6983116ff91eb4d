"""The 68 named regions: what each holds, who owns it, and when it exists.

A *series* is one arena (`W` masters, `G` gradients, ...). A *region* is a contiguous
range of a series: all parameters of one role. The six roles follow the order of
:class:`Role` in every arena, so a range operation over several regions is one
operation over one slice.
"""

import dataclasses
import enum
from typing import Literal

Owner = Literal["state", "step", "input", "eval", "xla"]
Storage = Literal["float32", "half", "int32", "int8", "any"]


class Role(enum.StrEnum):
    """What a parameter is; the order is the order of every arena.

    The first three are *bias-like*: float32 in the compute view and free of weight
    decay by default. The last three have a half-precision compute copy.

    Example:
        >>> import rjax
        >>> [role.name for role in rjax.Role][:3]
        ['BN_BIAS', 'BN_WEIGHT', 'FC_BIAS']
    """

    BN_BIAS = "bn_bias"
    BN_WEIGHT = "bn_weight"
    FC_BIAS = "fc_bias"
    FC_WEIGHT = "fc_weight"
    FIRST_CONV = "first_conv"
    DEEP_CONV = "deep_conv"

    @property
    def bias_like(self) -> bool:
        """Whether the role belongs to the prefix without a half-precision copy."""
        return self in BIAS_LIKE


ROLES = tuple(Role)
BIAS_LIKE = ROLES[:3]
HALF_ROLES = ROLES[3:]


class Region(enum.IntEnum):
    """The regions of the article, by number.

    Example:
        >>> import rjax
        >>> rjax.Region.W_DEEP_CONV.value, rjax.Region(22).name
        (12, 'A_FC_WEIGHT')
    """

    B_PREV_MEAN = 1
    B_PREV_VAR = 2
    B_NEXT_MEAN = 3
    B_NEXT_VAR = 4
    W_EQ_BIAS = 5
    W_EQ_SCALE = 6
    W_BN_BIAS = 7
    W_BN_WEIGHT = 8
    W_FC_BIAS = 9
    W_FC_WEIGHT = 10
    W_FIRST_CONV = 11
    W_DEEP_CONV = 12
    E_BN_BIAS = 13
    E_BN_WEIGHT = 14
    E_FC_BIAS = 15
    E_FC_WEIGHT = 16
    E_FIRST_CONV = 17
    E_DEEP_CONV = 18
    E_FC_WEIGHT_FP16 = 19
    E_FIRST_CONV_FP16 = 20
    E_DEEP_CONV_FP16 = 21
    A_FC_WEIGHT = 22
    A_FIRST_CONV = 23
    A_DEEP_CONV = 24
    G_BN_BIAS = 25
    G_BN_WEIGHT = 26
    G_FC_BIAS = 27
    G_FC_WEIGHT = 28
    G_FIRST_CONV = 29
    G_DEEP_CONV = 30
    R_RESULT = 31
    G_FC_WEIGHT_FP16 = 32
    G_FIRST_CONV_FP16 = 33
    G_DEEP_CONV_FP16 = 34
    M_BN_BIAS = 35
    M_BN_WEIGHT = 36
    M_FC_BIAS = 37
    M_FC_WEIGHT = 38
    M_FIRST_CONV = 39
    M_DEEP_CONV = 40
    V_BN_BIAS = 41
    V_BN_WEIGHT = 42
    V_FC_BIAS = 43
    V_FC_WEIGHT = 44
    V_FIRST_CONV = 45
    V_DEEP_CONV = 46
    N_FC_WEIGHT = 47
    N_FIRST_CONV = 48
    N_DEEP_CONV = 49
    I_A_LABEL = 50
    I_A_DATA = 51
    I_B_LABEL = 52
    I_B_DATA = 53
    F_FEATURE_FP32 = 54
    F_GRAD_SLOT_FP32 = 55
    F_FEATURE_FP16 = 56
    F_GRAD_SLOT_FP16 = 57
    S_SCALAR_FP32 = 58
    S_SCALAR_FP16 = 59
    S_SCALAR_INT32 = 60
    S_SCALAR_INT8 = 61
    S_MASK = 62
    T_TEMP_FP32 = 63
    T_TEMP_FP16 = 64
    T_TEMP_INT32 = 65
    T_TEMP_INT8 = 66
    R_PREDICTED_LABEL = 67
    R_RESULT_ACCUMULATED = 68


@dataclasses.dataclass(frozen=True)
class Gates:
    """Which optional series a plan has.

    Attributes:
        half: compute precision is a half type (series A, half G, half features).
        ema: an exponential moving average is kept (series E).
        mu: the optimizer keeps a first moment (series M).
        nu: the optimizer keeps a second moment (series V).
        ratios: the optimizer computes a trust ratio per tensor (series N).
        norms: the model has normalisation layers (the BN regions of every series).
        statistics: the model has running statistics (series B, folded W_EQ).
    """

    half: bool
    ema: bool
    mu: bool
    nu: bool
    ratios: bool
    norms: bool
    statistics: bool


@dataclasses.dataclass(frozen=True)
class RegionInfo:
    """One row of the region table.

    Attributes:
        region: the region.
        series: the arena it is a range of; "E_FP16" and "G_FP16" are arenas of
            their own, scalars and statistics count as series too.
        role: the parameters it holds, `None` where it holds none.
        owner: who allocates it: the state, the step in flight, the input pipeline,
            evaluation, or XLA's buffer assignment.
        storage: element type; "half" is the compute precision of the plan.
    """

    region: Region
    series: str
    role: Role | None
    owner: Owner
    storage: Storage

    def enabled(self, gates: Gates) -> bool:
        """Return whether the region exists under `gates`."""
        if self.role in (Role.BN_BIAS, Role.BN_WEIGHT) and not gates.norms:
            return False
        if self.storage == "half" and not gates.half:
            return False
        wanted = {
            "A": gates.half,
            "B": gates.statistics,
            "W_EQ": gates.statistics,
            "E": gates.ema,
            "E_FP16": gates.ema,
            "M": gates.mu,
            "V": gates.nu,
            "N": gates.ratios,
            "F": gates.half == (self.storage == "half"),
        }
        return wanted.get(self.series, True)


_OWNER: dict[str, Owner] = {
    **dict.fromkeys(["W", "E", "E_FP16", "A", "M", "V"], "state"),
    **dict.fromkeys(["G", "G_FP16", "N"], "step"),
    "W_EQ": "eval",
    "I": "input",
    "F": "xla",
    "T": "xla",
    "S": "state",
}
_OWNER_OF: dict[Region, Owner] = {
    Region.B_PREV_MEAN: "state",
    Region.B_PREV_VAR: "state",
    Region.B_NEXT_MEAN: "step",
    Region.B_NEXT_VAR: "step",
    Region.R_RESULT: "step",
    Region.R_PREDICTED_LABEL: "eval",
    Region.R_RESULT_ACCUMULATED: "state",
    Region.S_MASK: "xla",
}
_STORAGE: dict[str, Storage] = {
    "FP16": "half",
    "INT32": "int32",
    "INT8": "int8",
    "LABEL": "int32",
    "DATA": "any",
    "MASK": "any",
}


def _info(region: Region) -> RegionInfo:
    """Derive a region's row from its name."""
    name = region.name
    letter, rest = name.split("_", 1)
    ending = name.rsplit("_", 1)[1]
    role_name = rest.removesuffix("_FP16").lower()
    role = Role(role_name) if role_name in set(ROLES) else None
    series = letter
    if rest.startswith("EQ_"):
        series = "W_EQ"
    elif role and ending == "FP16":
        series = f"{letter}_FP16"
    storage = "half" if series == "A" else _STORAGE.get(ending, "float32")
    owner = _OWNER_OF[region] if region in _OWNER_OF else _OWNER[series]
    return RegionInfo(region, series, role, owner, storage)


REGIONS: dict[Region, RegionInfo] = {region: _info(region) for region in Region}
