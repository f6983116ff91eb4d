"""A loss scale as a small pytree of its own, for a training loop of one's own."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from rjax.scaling import Scaling, halving


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "state", "skipped", "consecutive_skips"],
    meta_fields=["rule"],
)
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A loss scale with its rule and counters: four small arrays at most.

    Made by :meth:`init`, moved by :func:`apply_gated`, on skipped steps too. Save it
    with what else you save.

    Attributes:
        scale: f32[], loss scale of the next step.
        state: own state of the rule.
        skipped: i32[], skipped steps.
        consecutive_skips: i32[], skipped steps since the last applied one; when it
            goes on growing no scale can help.
        rule: of :mod:`rjax.scaling`; static.

    Example:
        >>> scaling = LossScale.init()
        >>> float(scaling.scale), scaling.rule.factor
        (8192.0, 0.5)
    """

    scale: Float32[Array, ""]
    state: Any
    skipped: Int32[Array, ""]
    consecutive_skips: Int32[Array, ""]
    rule: Any

    @classmethod
    def init(cls, rule: Scaling | None = None) -> Self:
        """Return the scale before the first step.

        Args:
            rule: of :mod:`rjax.scaling`, `halving()` by default; `off()` for bf16.

        Raises:
            ValueError: for anything else.
        """
        rule = halving() if rule is None else rule
        if not hasattr(rule, "next"):
            raise ValueError(
                "`rule` must be a rule such as rjax.scaling.halving(), got "
                f"{type(rule).__name__}."
            )
        zero = functools.partial(jnp.zeros, (), jnp.int32)
        return cls(*rule.init(), zero(), zero(), rule)

    def next(self, flag: Bool[Array, ""]) -> Self:
        """Return the scale of the next step; `flag` is set if this one was skipped."""
        scale, state = self.rule.next(self.scale, self.state, flag)
        one = jnp.ones((), jnp.int32)
        return dataclasses.replace(
            self,
            scale=scale,
            state=state,
            skipped=self.skipped + flag.astype(jnp.int32),
            consecutive_skips=jnp.where(flag, self.consecutive_skips + one, 0 * one),
        )


def check_scaling(scaling: Any) -> None:
    """Raise a `ValueError` unless it is a :class:`LossScale`."""
    if not isinstance(scaling, LossScale):
        raise ValueError(
            "`scaling` must be an rjax.LossScale, got "
            f"{type(scaling).__name__}; make one with rjax.LossScale.init(rule)."
        )
