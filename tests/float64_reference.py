"""The optimizers in float64, with a bound that float32 arithmetic explains.

Each formula is computed on :class:`Rounded` numbers: a float64 value together with a
bound on what float32 may be off by. The bound grows by the roundings of each operation
and by their sensitivity, so no tolerance is chosen.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

import rjax

UNIT = 2.0**-24  # a float32 rounding, relative to its result
ROUNDINGS = 2  # of an operation: XLA may take two where we write one (x/c as x*(1/c))
STEPS = 20
LR, WD, BETA, B1, B2, EPS, TC = 0.05, 0.02, 0.9, 0.8, 0.95, 1e-6, 0.1


@dataclasses.dataclass(frozen=True)
class Rounded:
    """float64 values and a bound on the error of their float32 counterparts."""

    value: Any
    bound: Any

    __array_ufunc__ = None

    @staticmethod
    def of(x):
        if isinstance(x, Rounded):
            return x
        return Rounded(np.float64(x), UNIT * abs(x))  # a constant, rounded once

    @staticmethod
    def _after(value, inherited, operations=1):
        slack = operations * ROUNDINGS * UNIT
        return Rounded(value, inherited + slack * (abs(value) + inherited))

    def __add__(self, other):
        other = Rounded.of(other)
        return self._after(self.value + other.value, self.bound + other.bound)

    def __sub__(self, other):
        other = Rounded.of(other)
        return self._after(self.value - other.value, self.bound + other.bound)

    def __mul__(self, other):
        a, b = self, Rounded.of(other)
        inherited = abs(a.value) * b.bound + (abs(b.value) + b.bound) * a.bound
        return self._after(a.value * b.value, inherited)

    def __truediv__(self, other):
        a, b = self, Rounded.of(other)
        value = a.value / b.value
        inherited = (a.bound + abs(value) * b.bound) / (abs(b.value) - b.bound)
        return self._after(value, inherited)

    def __radd__(self, other):
        return Rounded.of(other) + self

    def __rsub__(self, other):
        return Rounded.of(other) - self

    def __rmul__(self, other):
        return Rounded.of(other) * self

    def sqrt(self):
        low = np.sqrt(np.maximum(self.value - self.bound, 0.0))
        value = np.sqrt(self.value)
        return self._after(value, value - low)

    def norm(self):
        """Sum of squares in any order: one rounding for every element."""
        value = np.linalg.norm(self.value)
        inherited = np.linalg.norm(self.bound)
        return self._after(value, inherited, operations=self.value.size + 2)


def exact(x):
    """Take float32 numbers as they are."""
    return Rounded(np.asarray(x, np.float64), np.zeros(np.shape(x)))


def one_minus_power(beta, t):
    """1 - beta^t by expm1(t log beta): a constant, a product, an expm1."""
    return Rounded._after(1 - beta**t, 0.0, operations=3)


def one_minus_power_cancelling(beta, t):
    """The same by a float32 power: its roundings are those of 1, not of the result."""
    return Rounded(1 - beta**t, 3 * ROUNDINGS * UNIT)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter of the reference, with what the optimizer keeps for it."""

    w: Rounded
    m: Rounded
    v: Rounded
    wd: float
    bias_like: bool


def _kept(slot, lr):
    return slot.w * (1 - lr * slot.wd) if slot.wd else slot.w


def _pulled(slot, u):
    return u + slot.wd * slot.w if slot.wd else u


def _sgd(slot, u, lr, t, coupled):
    w = slot.w if coupled else _kept(slot, lr)
    u = _pulled(slot, u) if coupled else u
    return dataclasses.replace(slot, w=w - lr * u)


def _momentum(slot, u, lr, t, coupled, nesterov=False):
    w = slot.w if coupled else _kept(slot, lr)
    u = _pulled(slot, u) if coupled else u
    m = BETA * slot.m + u
    return dataclasses.replace(slot, w=w - lr * (BETA * m + u if nesterov else m), m=m)


def _adam(slot, u, lr, t, coupled, one_minus_power=one_minus_power):
    w = slot.w if coupled else _kept(slot, lr)
    q = _pulled(slot, u) if coupled else u
    m = B1 * slot.m + (1 - B1) * q
    v = B2 * slot.v + (1 - B2) * (q * q)
    m_hat, v_hat = m / one_minus_power(B1, t), v / one_minus_power(B2, t)
    w = w - lr * (m_hat / (v_hat.sqrt() + EPS))
    return dataclasses.replace(slot, w=w, m=m, v=v)


def _lars(slot, u, lr, t, nesterov=False):
    if slot.bias_like:
        return _momentum(slot, u, lr, t, coupled=True, nesterov=nesterov)
    w_norm, u_norm = slot.w.norm(), u.norm()
    eta = TC * w_norm / (u_norm + slot.wd * w_norm + EPS)
    if min(w_norm.value, u_norm.value) < 1e-12:
        eta = exact(1.0)
    if eta.value > 100:
        eta = exact(100.0)
    pull = lr * eta * _pulled(slot, u)
    m = BETA * slot.m + pull
    w = slot.w - (pull + BETA * m if nesterov else m)
    return dataclasses.replace(slot, w=w, m=m)


OPTIM = rjax.optim
CASES = {
    "sgd": (OPTIM.sgd(WD), functools.partial(_sgd, coupled=False)),
    "sgd coupled": (OPTIM.sgd(WD, "coupled"), functools.partial(_sgd, coupled=True)),
    "momentum": (
        OPTIM.momentum(BETA, WD),
        functools.partial(_momentum, coupled=False),
    ),
    "momentum coupled": (
        OPTIM.momentum(BETA, WD, "coupled"),
        functools.partial(_momentum, coupled=True),
    ),
    "nesterov": (
        OPTIM.nesterov(BETA, WD),
        functools.partial(_momentum, coupled=False, nesterov=True),
    ),
    "nesterov coupled": (
        OPTIM.nesterov(BETA, WD, "coupled"),
        functools.partial(_momentum, coupled=True, nesterov=True),
    ),
    "adam": (OPTIM.adam(B1, B2, EPS, WD), functools.partial(_adam, coupled=True)),
    "adamw": (OPTIM.adamw(B1, B2, EPS, WD), functools.partial(_adam, coupled=False)),
    "lars": (OPTIM.lars(BETA, WD, TC, EPS), _lars),
    "lars nesterov": (
        OPTIM.lars(BETA, WD, TC, EPS, nesterov=True),
        functools.partial(_lars, nesterov=True),
    ),
}  # fmt: skip
