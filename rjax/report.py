"""What a step says about itself."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rjax import displays
from rjax.trees import pytree


@pytree
@dataclasses.dataclass(frozen=True)
class Report:
    """The report of one step, or of many where `lax.scan` has stacked them.

    Attributes:
        loss: f32[], mean loss over the batch, unscaled.
        applied: bool[], whether the step moved the model.
        scale: f32[], loss scale of this step.
        grad_norm: f32[], norm of the true gradient before the clip; NaN on a skip.
        learning_rate: f32[], rate of this step.
        step: i32[], number of this attempted step, from 0.
        skipped: i32[], skipped steps so far.
        consecutive_skips: i32[], skipped steps since the last applied one.
        offender: i32[], lowest slot with a non-finite gradient, -1 if none.
        bad_slots: bool[slots], which slots' gradients were not finite.
        bad_stats: bool[], whether the new running statistics were not finite.
        metrics: pytree from the loss function; with accumulation, floats are averaged
            over the micro-batches and integers summed, and a random key is the last.
        grad_digests: u32[slots, 2], digest of each slot's gradient, from a step made
            with `digest_grads=True` (see :func:`rjax.stages.digest_grads`), else
            `None`.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> step = jax.jit(rjax.make_train_step(loss_fn, plan))
        >>> state, report = step(state, x)
        >>> report.as_dict()["loss"], report.as_dict()["applied"]
        (4.0, True)
    """

    loss: jax.Array
    applied: jax.Array
    scale: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    step: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    offender: jax.Array
    bad_slots: jax.Array
    bad_stats: jax.Array
    metrics: Any
    grad_digests: jax.Array | None = None

    _title: ClassVar[str] = "report"

    def _rows(self) -> list[tuple[str, str]]:
        fields = dataclasses.fields(self)
        found = [(f.name, displays.value(getattr(self, f.name))) for f in fields]
        return [(name, words) for name, words in found if words != "none"]

    def __repr__(self) -> str:
        return displays.text(type(self).__name__, self._rows())

    def _repr_html_(self) -> str:
        rows = self._rows()
        wanted = "step", "applied", "skips", "loss", "scale"
        told = [(name, words) for name, words in rows if name in wanted]
        summary = ", ".join(f"{name} {words}" for name, words in told)
        return displays.page(self._title, summary, rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain Python numbers (lists where stacked) for any logger.

        This waits for the device. `bad_slots` becomes the list of slot indices of a
        single report, and nested lists of bool of a stacked one. `grad_digests` are
        left out: they are bits, no numbers.
        """
        host: Report = jax.device_get(dataclasses.replace(self, grad_digests=None))
        fields = {f.name: getattr(host, f.name) for f in dataclasses.fields(host)}
        del fields["grad_digests"]
        plain = jax.tree.map(lambda x: x.tolist(), fields)
        if jnp.ndim(host.loss) == 0:
            plain["bad_slots"] = host.bad_slots.nonzero()[0].tolist()
        return plain
