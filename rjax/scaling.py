"""Loss-scale rules: how the scale starts and how it moves after each step.

A rule is a small frozen value with two pure functions, ``init() -> (scale, state)``
and ``next(scale, state, flag) -> (scale, state)``. The scale is a traced float32
array in the training state: it is never baked into a compiled program.
"""

import dataclasses
import math
import warnings
from typing import Any, Protocol

import jax
import jax.numpy as jnp

ScalingState = Any


class Scaling(Protocol):
    """What a loss-scale rule provides."""

    def init(self) -> tuple[jax.Array, ScalingState]:
        """Return the first scale, f32[], and the rule's own state."""
        ...

    def next(
        self, scale: jax.Array, state: ScalingState, flag: jax.Array
    ) -> tuple[jax.Array, ScalingState]:
        """Return scale and state of the next step; `flag` bool[] is set on a skip."""
        ...


def check_scale(name: str, scale: float, floor: float) -> None:
    """Raise a `ValueError` unless `scale` is finite and at least `floor` > 0.

    Warns when the scale is no power of two, since scaling is then not exact.
    """
    if not math.isfinite(scale) or scale <= 0:
        raise ValueError(
            f"`{name}` must be a finite number > 0, got {scale}; "
            "use a power of two such as 8192.0."
        )
    if scale < floor:
        raise ValueError(
            f"`{name}` must not be below the floor {floor}, got {scale}; "
            "start higher or lower the floor."
        )
    if not math.frexp(scale)[0] == 0.5:
        warnings.warn(
            f"`{name}`={scale} is not a power of two, so scaling and unscaling "
            "round; use a power of two to keep them exact.",
            UserWarning,
            stacklevel=4,
        )


def _check_between(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        raise ValueError(
            f"`{name}` must lie strictly between {low} and {high}, got {value}."
        )


def _float32(x: float) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Halving:
    """See :func:`halving`."""

    initial: float = 8192.0
    factor: float = 0.5
    floor: float = 1.0

    def __post_init__(self) -> None:
        _check_between("factor", self.factor, 0.0, 1.0)
        check_scale("floor", self.floor, 0.0)
        check_scale("init", self.initial, self.floor)

    def init(self) -> tuple[jax.Array, ScalingState]:
        """Return ``(f32[] initial scale, ())``."""
        return _float32(self.initial), ()

    def next(
        self, scale: jax.Array, state: ScalingState, flag: jax.Array
    ) -> tuple[jax.Array, ScalingState]:
        """Return ``max(scale * factor, floor)`` on a skip, else `scale` unchanged."""
        lower = jnp.maximum(scale * _float32(self.factor), _float32(self.floor))
        return jnp.where(flag, lower, scale), state


@dataclasses.dataclass(frozen=True)
class Static:
    """See :func:`static` and :func:`off`."""

    scale: float

    def __post_init__(self) -> None:
        check_scale("scale", self.scale, 1.0)

    def init(self) -> tuple[jax.Array, ScalingState]:
        """Return ``(f32[] scale, ())``."""
        return _float32(self.scale), ()

    def next(
        self, scale: jax.Array, state: ScalingState, flag: jax.Array
    ) -> tuple[jax.Array, ScalingState]:
        """Return both unchanged."""
        del flag
        return scale, state


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """See :func:`dynamic`."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        _check_between("growth", self.growth, 1.0, math.inf)
        _check_between("backoff", self.backoff, 0.0, 1.0)
        if isinstance(self.interval, bool) or self.interval < 1:
            raise ValueError(f"`interval` must be at least 1, got {self.interval}.")
        check_scale("floor", self.floor, 0.0)
        check_scale("init", self.initial, self.floor)
        check_scale("ceiling", self.ceiling, self.initial)

    def init(self) -> tuple[jax.Array, ScalingState]:
        """Return ``(f32[] initial scale, i32[] clean steps since the last change)``."""
        return _float32(self.initial), jnp.zeros((), jnp.int32)

    def next(
        self, scale: jax.Array, state: ScalingState, flag: jax.Array
    ) -> tuple[jax.Array, ScalingState]:
        """Back off on a skip; grow after `interval` clean steps in a row."""
        clean = state + 1
        grow = clean >= self.interval
        higher = jnp.minimum(scale * _float32(self.growth), _float32(self.ceiling))
        # A replaced scale may lie above the ceiling: growing must never lower it.
        higher = jnp.maximum(higher, scale)
        lower = jnp.maximum(scale * _float32(self.backoff), _float32(self.floor))
        next_scale = jnp.where(flag, lower, jnp.where(grow, higher, scale))
        restart = jnp.logical_or(flag, grow)
        return next_scale, jnp.where(restart, jnp.zeros_like(clean), clean)


def halving(init: float = 8192.0, factor: float = 0.5, floor: float = 1.0) -> Halving:
    """Start at `init`, multiply by `factor` on a skip down to `floor`, never grow.

    The default rule for fp16: ``s <- max(s * 0.5, 1)`` when the flag is set.

    Args:
        init: first scale; a power of two keeps scaling exact (2^13 by default).
        factor: what a skipped step multiplies the scale by, in (0, 1).
        floor: smallest scale.

    Returns:
        A rule for ``Config(scaling=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a non-finite or non-positive number, or `init` below `floor`.

    Example:
        >>> scale, state = halving().init()
        >>> scale, state = halving().next(scale, state, jnp.array(True))
        >>> float(scale)
        4096.0

    Source: `RANGE_GRAD_SCALING` of the article, section 2.
    """
    return Halving(float(init), float(factor), float(floor))


def static(scale: float) -> Static:
    """Keep the loss scale at `scale` for ever.

    Args:
        scale: the scale, at least 1.

    Returns:
        A rule for ``Config(scaling=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a non-finite number or one below 1.

    Example:
        >>> float(static(1024.0).init()[0])
        1024.0
    """
    return Static(float(scale))


def dynamic(
    init: float = 65536.0,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    floor: float = 1.0,
    ceiling: float = 2.0**24,
) -> Dynamic:
    """Grow after `interval` clean steps in a row, back off on a skip.

    Args:
        init: first scale.
        growth: factor > 1 applied after `interval` applied steps in a row.
        backoff: factor in (0, 1) applied on a skipped step.
        interval: number of applied steps in a row before growing.
        floor: smallest scale.
        ceiling: largest scale reached by growing.

    Returns:
        A rule for ``Config(scaling=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number outside the ranges above.

    Example:
        >>> rule = dynamic(init=1024.0, interval=1)
        >>> scale, count = rule.next(*rule.init(), jnp.array(False))
        >>> float(scale), int(count)
        (2048.0, 0)

    Source: `torch.amp.GradScaler`, with a floor and a ceiling.
    """
    return Dynamic(
        float(init), float(growth), float(backoff), interval, float(floor),
        float(ceiling),
    )  # fmt: skip


def off() -> Static:
    """Scale by 1: the default for bf16 and fp32.

    Returns:
        A rule for ``Config(scaling=...)``: frozen, hashable, equal by value.

    Example:
        >>> float(off().init()[0])
        1.0
    """
    return Static(1.0)
