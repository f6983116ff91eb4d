"""The train step and the evaluation step, as pure functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rjax import stages
from rjax.plan import Plan
from rjax.report import Report
from rjax.state import RegionState
from rjax.weights import Which, check_which, get_batch_stats, get_params


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """What :func:`make_train_step` makes: a pure function that knows its plan.

    Attributes:
        loss_fn: the loss function.
        plan: the static layout.
        implementation: of the range operations.
        digest_grads: whether the report has digests of the gradients.
    """

    loss_fn: Any
    plan: Plan
    implementation: str | None = None
    digest_grads: bool = False

    # The name that programs have in profiles and dumps.
    __name__ = "train_step"

    def __call__(self, state: RegionState, batch: Any) -> tuple[RegionState, Report]:
        """Take one step; see :func:`make_train_step`."""
        flow = stages.begin(self.plan, state, batch, self.implementation)
        flow = stages.forward_backward(flow, self.loss_fn)
        flow = stages.cast_deep_grads(flow)
        flow = stages.reduce_deep(flow)
        flow = stages.cast_first_grads(flow)
        flow = stages.reduce_first(flow)
        if self.digest_grads:
            flow = stages.digest_grads(flow)
        flow = stages.check_and_scale(flow)
        flow = stages.reconcile_stats(flow)
        flow = stages.apply(flow)
        return stages.finish(flow)


def make_train_step(
    loss_fn: Any,
    plan: Plan,
    implementation: str | None = None,
    *,
    digest_grads: bool = False,
) -> TrainStep:
    """Compose the stages into ``step(state, batch) -> (state, report)``.

    The step is pure: jit it yourself, with the state donated, or use it inside your
    own jitted function, `lax.scan` or `vmap`. It never raises on bad numbers: the
    report says what happened, and :func:`rjax.check` raises on the host.

    Args:
        loss_fn: ``(params, batch_stats, batch, key) -> (loss, (new_batch_stats,
            metrics))``; `loss` is the unscaled mean over the batch. Kernels arrive in
            compute precision, biases and norm parameters in float32.
        plan: from :func:`rjax.make_plan`.
        implementation: of the range operations: `None` chooses, "xla" or "mosaic_gpu"
            insist.
        digest_grads: report a digest of every slot's gradient, which a recording keeps
            (see :func:`rjax.stages.digest_grads`). The state and all else in the
            report have the same bits either way; it costs one more read of the
            gradients. Without it nothing of it is in the program.

    Returns:
        The step function; it has the plan as its attribute `plan`.

    Raises:
        ValueError: when tracing, for a loss function of the wrong kind or a batch
            that `accumulation_steps` does not divide.
        NotImplementedError: when tracing, for an implementation that cannot serve.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.array([[8.0]])}
        >>> plan = rjax.make_plan(params, rjax.Config(optimizer=rjax.optim.sgd()))
        >>> loss_fn = rjax.stateless_loss(lambda p, batch: jnp.sum(p["w"]))
        >>> step = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
        >>> state, report = step(rjax.init_state(plan, params), {})
        >>> float(report.loss), rjax.get_params(plan, state)["w"].item()
        (8.0, 7.900000095367432)

    Source: `run_train_step` of the article, section 4.
    """
    return TrainStep(loss_fn, plan, implementation, digest_grads)


def find_plan(step: Any) -> Plan | None:
    """Return the plan of a step function, or of the one that is wrapped, if any."""
    while step is not None:
        plan = getattr(step, "plan", None)
        if isinstance(plan, Plan):
            return plan
        step = getattr(step, "__wrapped__", None) or getattr(step, "func", None)
    return None


def make_eval_step(
    metric_fn: Callable[[Any, Any, Any], Any], plan: Plan, which: Which = "compute"
) -> Callable[[RegionState, Any], Any]:
    """Make ``eval_step(state, batch) -> metrics`` on chosen weights.

    Args:
        metric_fn: ``(params, batch_stats, batch) -> metrics``.
        plan: from :func:`rjax.make_plan`.
        which: "master" or "ema" (float32), "compute" or "ema_compute" (kernels in
            compute precision). The averages come with the averaged statistics.

    Returns:
        ``eval_step(state, batch)``, pure: jit it. It leaves the state as it is.

    Raises:
        ValueError: for an unknown name, or an average where the plan keeps none.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(ema=rjax.Ema(0.9)))
        >>> state = rjax.init_state(plan, params)
        >>> metric_fn = lambda p, stats, x: {"largest": jnp.max(x @ p["w"])}
        >>> evaluate = jax.jit(rjax.make_eval_step(metric_fn, plan, which="ema"))
        >>> float(evaluate(state, jnp.ones((3, 4)))["largest"])
        4.0
    """
    check_which(plan, which)
    stats = "ema" if which.startswith("ema") else "current"

    def eval_step(state: RegionState, batch: Any) -> Any:
        params = get_params(plan, state, which)
        return metric_fn(params, get_batch_stats(plan, state, stats), batch)

    return eval_step
