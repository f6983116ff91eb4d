"""Learning-rate schedules by name, each made of Optax's."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from rjax.runs.errors import UsageError
from rjax.runs.options import RateOptions

MOST_RESTARTS = 100


def build_schedule(
    options: RateOptions, learning_rate: float, steps_per_epoch: int, epochs: int
) -> float | optax.Schedule:
    """Return the learning rate: a number, or a function of the applied steps.

    Without warm-up a schedule begins at `learning_rate`. With `w` steps of it, step
    `k < w` has `learning_rate * (k + 1) / (w + 1)`, so that no step is wasted on a
    rate of 0, and the schedule proper begins at step `w`.

    Args:
        options: the schedule and its options; a `None` among them takes its default.
        learning_rate: the highest rate.
        steps_per_epoch: what an epoch is worth in steps.
        epochs: how many epochs the schedule spans.

    Raises:
        UsageError: where the parts do not fit into the epochs, or milestones are
            missing, out of order or out of reach.
    """
    span = _Span(options, learning_rate, steps_per_epoch, epochs)
    if span.warm >= span.total:
        raise UsageError(
            f"--warmup-epochs {options.warmup_epochs:g} leaves nothing of {epochs} "
            "epochs: give fewer, or more --epochs"
        )
    if options.schedule == "constant" and not span.warm:
        return learning_rate
    after = _COURSES[options.schedule](span)
    if not span.warm:
        return after
    ramp = optax.linear_schedule(
        learning_rate / (span.warm + 1), learning_rate, span.warm
    )
    return optax.join_schedules([ramp, after], [span.warm])


class _Span:
    """The lengths of a schedule's parts in steps."""

    def __init__(
        self, options: RateOptions, rate: float, steps_per_epoch: int, epochs: int
    ) -> None:
        self.options = options
        self.rate = rate
        self.epochs = epochs
        self.per_epoch = steps_per_epoch
        self.total = steps_per_epoch * epochs
        twentieth = epochs / 20 if options.schedule == "wsd" else 0.0
        self.warm = self.steps(_or(options.warmup_epochs, twentieth))

    def steps(self, epochs: float) -> int:
        return round(epochs * self.per_epoch)

    @property
    def left(self) -> int:
        """Steps after the warm-up."""
        return self.total - self.warm

    @property
    def final(self) -> float:
        final = _or(self.options.final_learning_rate, 0.0)
        if final > self.rate:
            raise UsageError(
                f"--final-learning-rate {final:g} is above the learning rate "
                f"{self.rate:g}: give a lower one"
            )
        return final

    def absolute(self, course: optax.Schedule) -> optax.Schedule:
        """Let `course` count from the start of the run, not from the warm-up's end."""
        return lambda count: course(count + self.warm)


def _constant(span: _Span) -> optax.Schedule:
    return optax.constant_schedule(span.rate)


def _step(span: _Span) -> optax.Schedule:
    epochs = _or(span.options.decay_epochs, span.epochs / 3)
    every = _at_least_one(span, "--decay-epochs", epochs)
    if every <= span.warm:
        raise UsageError(
            f"the first drop, after {epochs:g} epochs, comes within the warm-up: "
            "give fewer --warmup-epochs or more --decay-epochs"
        )
    rate = _or(span.options.decay_rate, 0.1)
    return span.absolute(
        optax.exponential_decay(span.rate, every, rate, staircase=True)
    )


def _multistep(span: _Span) -> optax.Schedule:
    milestones = span.options.milestones
    if not milestones:
        raise UsageError(
            "--schedule multistep needs --milestones: give the epochs of the drops"
        )
    steps = [span.steps(epoch) for epoch in milestones]
    if steps != sorted(set(steps)) or steps[0] <= span.warm or steps[-1] >= span.total:
        raise UsageError(
            "--milestones must rise, lie after the warm-up and before epoch "
            f"{span.epochs}, got {' '.join(f'{m:g}' for m in milestones)}"
        )
    drop = _or(span.options.decay_rate, 0.1)
    course = optax.piecewise_constant_schedule(span.rate, dict.fromkeys(steps, drop))
    return span.absolute(course)


def _exponential(span: _Span) -> optax.Schedule:
    epochs = _or(span.options.decay_epochs, 1.0)
    every = _at_least_one(span, "--decay-epochs", epochs)
    rate = _or(span.options.decay_rate, 0.95)
    return optax.exponential_decay(span.rate, every, rate)


def _polynomial(span: _Span) -> optax.Schedule:
    power = _or(span.options.power, 1.0)
    return optax.polynomial_schedule(span.rate, span.final, power, span.left)


def _cosine(span: _Span, steps: int | None = None) -> optax.Schedule:
    alpha = span.final / span.rate
    return optax.cosine_decay_schedule(span.rate, steps or span.left, alpha)


def _restarts(span: _Span) -> optax.Schedule:
    first = _or(span.options.restart_epochs, span.left / span.per_epoch / 3)
    period = _at_least_one(span, "--restart-epochs", first)
    longer = _or(span.options.restart_multiplier, 2.0)
    if not (longer >= 1 and math.isfinite(longer)):
        raise UsageError(f"--restart-multiplier must be at least 1, got {longer:g}")
    if longer == 1:
        course = _cosine(span, period)
        return lambda count: course(jnp.mod(count, period))
    lengths: list[int] = []
    while sum(lengths) < span.left:
        lengths.append(round(period * longer ** len(lengths)))
        if len(lengths) > MOST_RESTARTS:
            raise UsageError(
                f"--restart-epochs {first:g} makes more than {MOST_RESTARTS} periods: "
                "give more epochs, or a larger --restart-multiplier"
            )
    starts = [sum(lengths[:i]) for i in range(1, len(lengths))]
    return optax.join_schedules([_cosine(span, n) for n in lengths], starts)


def _wsd(span: _Span) -> optax.Schedule:
    epochs = _or(span.options.decay_epochs, span.epochs / 5)
    decay = _at_least_one(span, "--decay-epochs", epochs)
    if decay > span.left:
        raise UsageError(
            f"warm-up and a decay of {epochs:g} epochs do not fit into {span.epochs} "
            "epochs: give fewer --warmup-epochs or --decay-epochs"
        )
    stable = span.left - decay
    fall = optax.linear_schedule(span.rate, span.final, decay)
    return optax.join_schedules([_constant(span), fall], [stable])


_COURSES: dict[str, Callable[[_Span], optax.Schedule]] = {
    "constant": _constant,
    "step": _step,
    "multistep": _multistep,
    "exponential": _exponential,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "restarts": _restarts,
    "wsd": _wsd,
}


def _or(value: Any, default: float) -> float:
    return default if value is None else value


def _at_least_one(span: _Span, name: str, epochs: float) -> int:
    steps = span.steps(epochs)
    if steps < 1:
        raise UsageError(
            f"{name} {epochs:g} is less than one step of {span.per_epoch} in an epoch: "
            "give more"
        )
    return steps
