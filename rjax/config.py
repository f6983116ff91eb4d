"""The static description of a training pipeline: `Config` and its parts."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rjax import scaling as scaling_rules
from rjax.optim import OptaxOptimizer, Optimizer, nesterov

Schedule = Callable[[jax.Array], Any]

_COMPUTE_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The precision of the compute view; masters and gradients are always float32.

    Parses from and prints to a short string.

    Args:
        name: "fp16", "bf16" or "fp32".

    Raises:
        ValueError: for any other name.

    Example:
        >>> str(Policy("bf16")), Policy("bf16").compute_dtype.name
        ('bf16', 'bfloat16')
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in _COMPUTE_DTYPES:
            known = ", ".join(map(repr, _COMPUTE_DTYPES))
            raise ValueError(
                f"`precision` must be one of {known} or an rjax.Policy, "
                f"got {self.name!r}."
            )

    def __str__(self) -> str:
        return self.name

    @property
    def half(self) -> bool:
        """Whether kernels are computed with in a half-precision type."""
        return self.name != "fp32"

    @property
    def compute_dtype(self) -> Any:
        """The numpy dtype of kernels in the compute view."""
        return jnp.dtype(_COMPUTE_DTYPES[self.name])


@dataclasses.dataclass(frozen=True)
class Clip:
    """Clip the true (unscaled) gradient, by value or by global norm.

    Args:
        value: clamp every element to [-value, value].
        norm: multiply the gradient by ``min(1, norm / ||u||)``.
        on_inf: "skip" (an infinite gradient skips the step) or "clamp" (only NaN
            skips, Inf is clamped to the bound; with `value` only).

    Raises:
        ValueError: if not exactly one bound is given, if it is not a finite number
            > 0, or if "clamp" is combined with `norm`.

    Example:
        >>> Clip(norm=1.0).on_inf
        'skip'

    Source: the article, section 4.3; bounds are in true-gradient units, so results
    do not depend on the loss scale.
    """

    value: float | None = None
    norm: float | None = None
    on_inf: Literal["skip", "clamp"] = "skip"

    def __post_init__(self) -> None:
        if (self.value is None) == (self.norm is None):
            raise ValueError(
                "Clip takes exactly one of `value` and `norm`, got "
                f"value={self.value}, norm={self.norm}."
            )
        name, bound = (
            ("norm", self.norm) if self.value is None else ("value", self.value)
        )
        if (
            not isinstance(bound, numbers.Real)
            or isinstance(bound, bool)
            or not math.isfinite(bound)
            or bound <= 0
        ):
            raise ValueError(
                f"Clip bound `{name}` must be a finite number > 0, got {bound}; "
                "use clip=None to switch clipping off."
            )
        if self.on_inf not in ("skip", "clamp"):
            raise ValueError(
                f"`on_inf` must be 'skip' or 'clamp', got {self.on_inf!r}."
            )
        if self.on_inf == "clamp" and self.norm is not None:
            raise ValueError(
                "`on_inf`='clamp' works with a `value` bound only: an infinite "
                "gradient has no finite norm to scale by."
            )


@dataclasses.dataclass(frozen=True)
class Ema:
    """Keep an exponential moving average of the masters.

    Args:
        decay: d in ``E <- d E + (1 - d) W``, in [0, 1].
        batch_stats: "average" the running statistics as well, or "copy" them.

    Raises:
        ValueError: for a decay outside [0, 1] or an unknown mode.

    Example:
        >>> Ema(decay=0.99).batch_stats
        'average'
    """

    decay: float = 0.999
    batch_stats: Literal["average", "copy"] = "average"

    def __post_init__(self) -> None:
        if (
            not isinstance(self.decay, numbers.Real)
            or isinstance(self.decay, bool)
            or not 0.0 <= self.decay <= 1.0
        ):
            raise ValueError(f"Ema `decay` must lie in [0, 1], got {self.decay}.")
        if self.batch_stats not in ("average", "copy"):
            raise ValueError(
                f"Ema `batch_stats` must be 'average' or 'copy', "
                f"got {self.batch_stats!r}."
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about a training pipeline that is decided before the first step.

    Args:
        precision: "fp16", "bf16", "fp32" or a :class:`Policy`.
        scaling: a rule of :mod:`rjax.scaling`; `None` is `halving()` for fp16 and
            `off()` for bf16 and fp32.
        optimizer: one of :mod:`rjax.optim`.
        learning_rate: a number (kept as a float32 in the state, replaceable between
            steps) or a schedule, applied-step count i32[] -> rate; `None` with
            `from_optax`, which carries its own.
        clip: a :class:`Clip`, or `None`.
        ema: an :class:`Ema`, or `None`.
        accumulation_steps: number of micro-batches a batch is split into.

    Raises:
        ValueError: one sentence that names the argument at fault.

    Example:
        >>> config = Config(precision="bf16", learning_rate=1e-3)
        >>> config.scale_rule.scale
        1.0
    """

    precision: str | Policy = "fp16"
    scaling: scaling_rules.Scaling | None = None
    optimizer: Optimizer = dataclasses.field(
        default_factory=lambda: nesterov(momentum=0.9, weight_decay=1e-4)
    )
    learning_rate: float | Schedule | None = 0.1
    clip: Clip | None = None
    ema: Ema | None = None
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", str(_policy(self.precision)))
        object.__setattr__(
            self, "learning_rate", _rate(self.learning_rate, self.optimizer)
        )
        for name, kind in (("clip", Clip), ("ema", Ema), ("optimizer", Optimizer)):
            _check_kind(name, getattr(self, name), kind)
        if self.scaling is not None and not hasattr(self.scaling, "next"):
            raise ValueError(
                f"`scaling` must be a rule such as rjax.scaling.halving(), "
                f"got {self.scaling!r}."
            )
        steps = self.accumulation_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(
                f"`accumulation_steps` must be a whole number >= 1, got {steps!r}."
            )

    @property
    def policy(self) -> Policy:
        """The precision as a :class:`Policy`."""
        return _policy(self.precision)

    @property
    def scale_rule(self) -> Any:
        """The loss-scale rule, with the default for the precision filled in."""
        if self.scaling is not None:
            return self.scaling
        fp16 = self.precision == "fp16"
        return scaling_rules.halving() if fp16 else scaling_rules.off()

    @property
    def schedule(self) -> Schedule | None:
        """The learning rate as a schedule, `None` if it is a number in the state."""
        rate = self.learning_rate
        return rate if callable(rate) else None

    @property
    def on_inf(self) -> str:
        """What an infinite gradient does: "skip" or "clamp"."""
        return self.clip.on_inf if self.clip else "skip"

    @property
    def clip_bounds(self) -> tuple[float | None, float | None]:
        """The bounds of the clip by value and by norm, `None` for none."""
        return (self.clip.value, self.clip.norm) if self.clip else (None, None)

    @property
    def ema_decay(self) -> float | None:
        """The decay of the average, `None` if none is kept."""
        return self.ema.decay if self.ema else None


def _policy(precision: str | Policy) -> Policy:
    return precision if isinstance(precision, Policy) else Policy(precision)


def _check_kind(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) and not (value is None and name != "optimizer"):
        of_optax = name == "optimizer" and hasattr(value, "update")
        remedy = "; wrap it in rjax.optim.from_optax" if of_optax else ""
        raise ValueError(
            f"`{name}` must be an rjax {name.title()}, got {type(value).__name__}"
            f"{remedy}."
        )


def _rate(rate: Any, optimizer: Optimizer) -> Any:
    """Return the learning rate as float or schedule, or raise one sentence."""
    if isinstance(optimizer, OptaxOptimizer):
        if rate is not None:
            raise ValueError(
                "`learning_rate` must be None with from_optax(tx): the Optax "
                "transformation carries its own rate."
            )
        return None
    if rate is None:
        raise ValueError(
            "`learning_rate`=None works with from_optax(tx) only; give a number or "
            "a schedule."
        )
    if callable(rate):
        return rate
    try:
        number = float(rate)
    except (TypeError, ValueError):
        raise ValueError(
            f"`learning_rate` must be a number or a schedule, got {rate!r}."
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"`learning_rate` must be finite, got {number}.")
    return number
