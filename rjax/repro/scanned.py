"""Steps within a `lax.scan`: their digests, and what a recording asks of them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from rjax.digests import digest
from rjax.plan import Plan
from rjax.report import Report
from rjax.state import RegionState


def scanned_digest(
    plan: Plan, state: RegionState, every: int
) -> UInt32[Array, "tensors 2"]:
    """Return the :func:`digest` of a state after every k-th step, zeros in between.

    For the body of a `lax.scan` over steps: what it stacks is what
    :meth:`rjax.repro.Recording.add_scanned` takes. Only the k-th steps pay, by a
    `lax.cond`; the stack takes 8 bytes a tensor and step on the device.

    Args:
        plan: the static layout.
        state: after a step.
        every: that of the recording, at least 1.

    Returns:
        uint32[tensors, 2], in the order of :func:`tensors`.

    Raises:
        ValueError: if `every` is no such number.

    Example:
        >>> import rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32))
        >>> step = rjax.make_train_step(rjax.stateless_loss(loss), plan)
        >>> def body(state, batch):
        ...     state, report = step(state, batch)
        ...     return state, (report, scanned_digest(plan, state, every=2))
        >>> batches = jnp.ones((4, 8, 4), jnp.float16)
        >>> run = jax.jit(lambda state: lax.scan(body, state, batches))
        >>> state, (reports, digests) = run(rjax.init_state(plan, params))
        >>> digests.any(axis=(1, 2)).tolist()
        [False, True, False, True]
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"`every` must be a whole number >= 1, got {every!r}.")
    # The barrier makes it read the state that goes on, not one computed once more.
    state = lax.optimization_barrier(state)
    of_plan = functools.partial(digest, plan)
    shape = jax.eval_shape(of_plan, state)
    due = state.step % jnp.int32(every) == 0
    return lax.cond(due, of_plan, lambda _: jnp.zeros_like(shape), state)


class Scan:
    """The steps of a scan on their way to the host, where their values are looked at.

    Nothing is waited for before :meth:`fetch`, and nothing of the state is read once
    this is made: the state may then be given away.

    Args:
        state: after the last step.
        reports: stacked by the scan.
        digests: as the scan stacked them, one entry a step.
        first: number of the step that comes next in the record.
        tensors: of the state.
        every: steps from one digest to the next; 0 for none, and `digests` is not used.

    Attributes:
        steps: numbers that they have to have.

    Raises:
        ValueError: if shapes or dtypes say that they are no such steps.
    """

    def __init__(
        self,
        state: RegionState,
        reports: Report,
        digests: Any,
        first: int,
        tensors: int,
        every: int,
    ) -> None:
        shape = np.shape(reports.step)
        if len(shape) != 1:
            raise ValueError(
                "`reports` must be those of single steps stacked by one `lax.scan`, "
                f"got `reports.step` of shape {list(shape)}; use `add` for one step."
            )
        self.steps, self._every = range(first, first + shape[0]), every
        if np.ndim(state.step):
            raise self._another_state(state.step)
        if every:
            self._check_digests(digests, tensors)
        end = jnp.copy(state.step)
        self._under_way = reports, digests if every else None, end
        # To a guard these are as much asked for as `jax.device_get`, which ends them.
        with jax.transfer_guard_device_to_host("allow"):
            for leaf in jax.tree.leaves(self._under_way):
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()

    def fetch(self) -> tuple[Report, list[tuple[int, np.ndarray]]]:
        """Return, on the host, the reports and the digests there are of the state.

        This waits for the steps. A digest comes with the number of steps before it.

        Raises:
            ValueError: if the values say that they are other steps than those that come
                next, or have other digests.
        """
        reports, digests, end = jax.device_get(self._under_way)
        found = reports.step.tolist()
        if found != list(self.steps):
            raise ValueError(
                "`reports` must be of the steps that come next in the record, expected "
                f"{_span(self.steps)}, got {_span(found)}; record every scan once, in "
                "order."
            )
        if int(end) != self.steps.stop:
            raise self._another_state(end)
        return reports, self._rows(digests) if self._every else []

    def _check_digests(self, digests: Any, tensors: int) -> None:
        if digests is None:
            raise ValueError(
                "`digests` must come out of the scan, as the record has "
                f"every={self._every}, got None; {self._remedy}."
            )
        wanted = (len(self.steps), tensors, 2)
        if digests.shape != wanted or digests.dtype != np.uint32:
            raise ValueError(
                f"`digests` must be uint32{list(wanted)}, two words a tensor and step "
                f"of the scan, got {digests.dtype}{list(digests.shape)}; "
                f"{self._remedy}."
            )

    def _rows(self, digests: np.ndarray) -> list[tuple[int, np.ndarray]]:
        due = [step + 1 for step in self.steps if (step + 1) % self._every == 0]
        rows = digests[[count - self.steps.start - 1 for count in due]]
        # No state has it: a tensor's digest is zeros once in 2^64, or if it is empty.
        empty = ~rows.any(axis=(1, 2))
        if empty.any():
            raise ValueError(
                f"`digests` must hold one after every {self._every} steps, got none "
                f"after {due[int(np.argmax(empty))]}; {self._remedy}."
            )
        return list(zip(due, rows, strict=True))

    @property
    def _remedy(self) -> str:
        call = f"rjax.repro.scanned_digest(plan, state, {self._every})"
        return f"return {call} from its body"

    def _another_state(self, end: Any) -> ValueError:
        return ValueError(
            f"`state` must be the one after the last of {_span(self.steps)}, got one "
            f"after {np.asarray(end).tolist()} steps."
        )


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    return f"steps {steps[0]} to {steps[-1]}"
