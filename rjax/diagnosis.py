"""From a report to words, and to an exception when no scale can help."""

from typing import Any

import jax
import numpy as np

from rjax.plan import Plan
from rjax.report import Report
from rjax.state import RegionState, outside_half_range

_NAMED = 5


class NonFiniteGradientsError(ArithmeticError):
    """Too many steps in a row were skipped; the message is the diagnosis.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(p["w"].sum()) * x)
        >>> step = jax.jit(rjax.make_train_step(loss_fn, plan))
        >>> state, report = step(rjax.init_state(plan, params), jnp.float32(jnp.inf))
        >>> try:
        ...     rjax.check(report, plan, state, max_consecutive_skips=1)
        ... except rjax.NonFiniteGradientsError as error:
        ...     print("w" in str(error))
        True
    """


def check(
    report: Report,
    plan: Plan,
    state: RegionState | None = None,
    max_consecutive_skips: int = 50,
) -> None:
    """Raise if so many steps in a row were skipped that no loss scale can help.

    A host function: it waits for the report. Call it on the report of a step, now and
    then, or on the stacked reports of a scanned epoch, whose longest run of skips
    counts.

    Args:
        report: of one step, or stacked.
        plan: the static layout.
        state: the state after the step, for a better diagnosis.
        max_consecutive_skips: the number of skips in a row that is too many, >= 1.

    Returns:
        Nothing.

    Raises:
        NonFiniteGradientsError: with the diagnosis of :func:`diagnose`.
        ValueError: for a limit below 1.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(p["w"].sum()) * x)
        >>> step = jax.jit(rjax.make_train_step(loss_fn, plan))
        >>> state, report = step(rjax.init_state(plan, params), jnp.float32(jnp.inf))
        >>> rjax.check(report, plan, state)  # one skip is nothing to worry about
        >>> rjax.check(report, plan, state, max_consecutive_skips=1)
        Traceback (most recent call last):
        rjax.diagnosis.NonFiniteGradientsError: ...
    """
    if max_consecutive_skips < 1:
        raise ValueError(
            f"`max_consecutive_skips` must be >= 1, got {max_consecutive_skips}."
        )
    runs = np.asarray(report.consecutive_skips)
    longest = int(runs.max(initial=0))
    if longest < max_consecutive_skips:
        return
    if runs.ndim:
        report = jax.tree.map(lambda x: x[np.unravel_index(runs.argmax(), runs.shape)],
                              report)  # fmt: skip
    raise NonFiniteGradientsError(
        f"{longest} steps in a row were skipped, so lowering the loss scale does not "
        f"help. {diagnose(plan, state, report)}"
    )


def diagnose(plan: Plan, state: RegionState | None, report: Report) -> str:
    """Say in words what a step did, and if it was skipped, what was wrong.

    NaN spreads upstream, so the parameters named are where it shows, not always where
    it began; the masters, the statistics and the learning rate are looked at too.

    Args:
        plan: the static layout.
        state: the state after the step, or `None` to leave the masters out.
        report: of one step.

    Returns:
        A few sentences.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(p["w"].sum()) * x)
        >>> step = jax.jit(rjax.make_train_step(loss_fn, plan))
        >>> state, report = step(rjax.init_state(plan, params), jnp.float32(jnp.inf))
        >>> "was skipped" in rjax.diagnose(plan, state, report)
        True
    """
    host: Any = jax.device_get(report)
    if np.ndim(host.loss):
        raise ValueError(
            "`report` holds many steps; pass one, jax.tree.map(lambda x: x[i], report)."
        )
    if host.applied:
        return (
            f"Step {int(host.step)} was applied at loss scale "
            f"{float(host.scale):.10g}; {int(host.skipped)} skipped so far."
        )
    causes = _causes(plan, host)
    causes += _state_causes(plan, state) if state is not None else []
    causes = causes or ["no cause is left to see in the report."]
    return (
        f"Step {int(host.step)} was skipped at loss scale {float(host.scale):.10g} "
        f"({int(host.skipped)} skipped so far, {int(host.consecutive_skips)} in a "
        f"row): " + " ".join(causes)
    )


def _causes(plan: Plan, host: Any) -> list[str]:
    """Return a sentence for each cause that the report shows."""
    causes = []
    bad = [plan.slots[i].path for i in np.flatnonzero(host.bad_slots)]
    if bad:
        named = ", ".join(map(repr, bad[:_NAMED]))
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        causes.append(
            f"the gradient is not finite in {len(bad)} of {len(plan.slots)} "
            f"parameters: {named}{more}."
        )
    if host.bad_stats:
        causes.append("the new batch statistics are not finite.")
    if not np.isfinite(host.learning_rate):
        causes.append(f"the learning rate is {float(host.learning_rate)}.")
    # Of the report of an epoch, `loss` is a mean.
    loss = getattr(host, "step_loss", host.loss)
    if not np.isfinite(loss):
        causes.append(f"the loss itself is {float(loss)}.")
    if not (np.isfinite(host.scale) and host.scale > 0):
        causes.append("the loss scale itself is not a finite number > 0.")
    elif bad and np.isfinite(loss) and host.scale > 1:
        causes.append("The loss is finite, so a lower scale may do.")
    return causes


def _state_causes(plan: Plan, state: RegionState) -> list[str]:
    """Return a sentence for each cause that the state shows."""
    causes = []
    master = np.asarray(state.master)
    broken = [
        slot.path
        for slot in plan.slots
        if not np.isfinite(master[slot.offset : slot.offset + slot.size]).all()
    ]
    if broken:
        causes.append(f"Masters that are not finite: {broken[0]!r}.")
    beyond = [path for path in outside_half_range(plan, state) if path not in broken]
    if beyond:
        causes.append(
            f"Masters beyond the range of {plan.config.precision}, infinite in the "
            f"compute copy: {', '.join(map(repr, beyond[:_NAMED]))}; rescale them or "
            "keep them in float32 by the path rule."
        )
    stats = jax.tree.leaves(state.batch_stats)
    if not all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in stats):
        causes.append("The current batch statistics are not finite.")
    return causes
