"""What an epoch says about itself."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from rjax.report import Report
from rjax.trees import pytree


@pytree
@dataclasses.dataclass(frozen=True)
class EpochReport(Report):
    """The report of an epoch: means over its steps, and the one to look at.

    All but the fields named here is that of one step: the last of the longest run of
    skips or, where no step was skipped, the last of the epoch. So `consecutive_skips`
    is the longest run, one that began before the epoch counted in full, and
    :func:`rjax.check` takes this report like that of a step.

    Attributes:
        loss: f32[], mean of the losses of the steps that were applied: that of a
            skipped one may be anything. Of all steps where none was applied.
        metrics: over the same steps: floats and bools averaged, in float32 at least,
            and integers summed; a random key is that of the one step.
        applied: bool[], whether every step moved the model.
        skips: i32[], how many did not.
        last_scale: f32[], loss scale of the last step; the next one is in the state.
        step_loss: f32[], loss of the one step.
        reports: the reports of all steps of a call, stacked, if they were asked for,
            else `None`.
        digests: u32[steps, tensors, 2], of all steps of a call, zeros where none is
            due; `None` unless they were asked for.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> step = rjax.make_train_step(loss_fn, plan)
        >>> data = jnp.ones((12, 4), "float16")
        >>> epoch = rjax.capture_epoch(step, state, data, batch_size=3)
        >>> state, report = epoch(state)
        >>> int(report.skips), bool(report.applied)
        (0, True)
    """

    # Always there: what follows a default needs one too.
    skips: Any = None
    last_scale: Any = None
    step_loss: Any = None
    reports: Report | None = None
    digests: jax.Array | None = None

    _title: ClassVar[str] = "epoch report"

    def __repr__(self) -> str:
        return super().__repr__()

    def as_dict(self) -> dict[str, Any]:
        """Return plain Python numbers, as :meth:`Report.as_dict`.

        Reports of single steps and digests are left out.
        """
        own = dataclasses.replace(self, reports=None, digests=None)
        plain = super(EpochReport, own).as_dict()
        return {key: plain[key] for key in plain if key not in ("reports", "digests")}


def summarize(reports: Report) -> EpochReport:
    """Return the report of the steps whose reports `lax.scan` has stacked.

    Args:
        reports: of one step or more.

    Example:
        ``state, reports = jax.lax.scan(step, state, batches)`` and then
        ``summarize(reports)``, in the same program or not.
    """
    applied = reports.applied
    # The last of the steps that stand highest: without a skip all stand at 0.
    last = applied.shape[0] - 1
    at = last - jnp.argmax(jnp.flip(reports.consecutive_skips))
    one = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at, keepdims=False),
                       reports)  # fmt: skip
    mean = functools.partial(_mean, applied | ~jnp.any(applied))
    means = {
        "loss": mean(reports.loss, one.loss),
        "metrics": jax.tree.map(mean, reports.metrics, one.metrics),
    }
    return EpochReport(
        **{f.name: getattr(one, f.name) for f in dataclasses.fields(Report)} | means,
        skips=jnp.sum(~applied, dtype=jnp.int32),
        last_scale=reports.scale[last],
        step_loss=one.loss,
    )


def _mean(counted: jax.Array, x: jax.Array, one: jax.Array) -> jax.Array:
    """Average over the steps that count, sum integers; of a key take the one."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return one
    mask = counted.reshape(counted.shape[0], *(1,) * (x.ndim - 1))
    kept = jnp.where(mask, x, jnp.zeros_like(x))
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.sum(kept, axis=0, dtype=x.dtype)
    wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
    return jnp.sum(kept.astype(wide), axis=0) / jnp.sum(counted, dtype=wide)
