"""The native optimizers as frozen numbers; the formulas are in `base.py`.

A rule says which moments it keeps (`has_mu`, `has_nu`) and whether it computes a
trust ratio per tensor (`has_ratios`). Construct them through :mod:`rjax.optim`.
"""

import dataclasses
import math
import numbers
from typing import Any, ClassVar


def _check(name: str, value: Any, low: float, high: float, *, at_low: bool) -> None:
    """Raise a `ValueError` unless `value` is a number in [low, high) or (low, high)."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    inside = number and math.isfinite(value) and low <= float(value) < high
    if not inside or (value == low and not at_low):
        left, upper = "[" if at_low else "(", "inf" if high == math.inf else high
        raise ValueError(
            f"Optimizer `{name}` must be a number in {left}{low}, {upper}), "
            f"got {value!r}."
        )


@dataclasses.dataclass(frozen=True)
class SgdRule:
    """SGD, with heavy-ball or Nesterov momentum unless `momentum` is `None`."""

    momentum: float | None = None
    nesterov: bool = False
    weight_decay: float = 0.0
    decay: str = "decoupled"

    has_nu: ClassVar[bool] = False
    has_ratios: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.momentum is not None:
            _check("momentum", self.momentum, 0.0, 1.0, at_low=True)
        _check("weight_decay", self.weight_decay, 0.0, math.inf, at_low=True)
        if self.decay not in ("decoupled", "coupled"):
            raise ValueError(
                f"Optimizer `decay` must be 'decoupled' or 'coupled', "
                f"got {self.decay!r}."
            )

    @property
    def has_mu(self) -> bool:
        """Whether a momentum arena is kept."""
        return self.momentum is not None


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """Adam (coupled decay) or AdamW (decoupled)."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: str = "coupled"

    has_mu: ClassVar[bool] = True
    has_nu: ClassVar[bool] = True
    has_ratios: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check("b1", self.b1, 0.0, 1.0, at_low=True)
        _check("b2", self.b2, 0.0, 1.0, at_low=True)
        # It is multiplied by a bias correction of at least 6e-8; a product that a
        # processor flushes to zero would be 0/0 for a zero gradient.
        _check("eps", self.eps, 1e-30, math.inf, at_low=True)
        _check("weight_decay", self.weight_decay, 0.0, math.inf, at_low=True)


@dataclasses.dataclass(frozen=True)
class LarsRule:
    """LARS, with heavy-ball or Nesterov momentum."""

    momentum: float = 0.9
    weight_decay: float = 0.0
    trust_coefficient: float = 1e-3
    eps: float = 1e-8
    nesterov: bool = False

    has_mu: ClassVar[bool] = True
    has_nu: ClassVar[bool] = False
    has_ratios: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check("momentum", self.momentum, 0.0, 1.0, at_low=True)
        _check("weight_decay", self.weight_decay, 0.0, math.inf, at_low=True)
        _check("trust_coefficient", self.trust_coefficient, 0.0, math.inf, at_low=False)
        _check("eps", self.eps, 0.0, math.inf, at_low=True)


Rule = SgdRule | AdamRule | LarsRule
