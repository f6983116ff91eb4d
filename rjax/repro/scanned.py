"""Steps within a `lax.scan`: their digests, and what a recording asks of them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from rjax.plan import Plan
from rjax.report import Report
from rjax.repro.tensors import digest
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
        ::

            def body(state, batch):
                state, report = step(state, batch)
                return state, (report, rjax.repro.scanned_digest(plan, state, 10))
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"`every` must be a whole number >= 1, got {every!r}.")
    # The barrier makes it read the state that goes on, not one computed once more.
    state = lax.optimization_barrier(state)
    of_plan = functools.partial(digest, plan)
    shape = jax.eval_shape(of_plan, state)
    due = state.step % jnp.int32(every) == 0
    return lax.cond(due, of_plan, lambda _: jnp.zeros_like(shape), state)


def steps_of(reports: Report, end: Any, first: int) -> range:
    """Return the numbers of the steps of stacked reports on the host.

    Args:
        reports: stacked by a scan.
        end: steps that the state after them has seen.
        first: number of the step that comes next in the record.

    Raises:
        ValueError: if they are others than those from `first` to `end`.
    """
    found = reports.step
    if found.ndim != 1:
        raise ValueError(
            "`reports` must be those of single steps stacked by one `lax.scan`, got "
            f"`reports.step` of shape {list(found.shape)}; use `add` for one step."
        )
    steps = range(first, first + len(found))
    if found.tolist() != list(steps):
        raise ValueError(
            "`reports` must be of the steps that come next in the record, expected "
            f"{_span(steps)}, got {_span(found.tolist())}; record every scan once, in "
            "order."
        )
    if np.ndim(end) or int(end) != steps.stop:
        raise ValueError(
            f"`state` must be the one after the last of {_span(steps)}, got one after "
            f"{np.asarray(end).tolist()} steps."
        )
    return steps


def rows_of(
    digests: Any, steps: range, tensors: int, every: int
) -> tuple[list[int], Sequence[np.ndarray]]:
    """Return after how many steps there are digests of the state, and these.

    Args:
        digests: on the host, as the scan stacked them, one entry a step.
        steps: their numbers.
        tensors: of the state.
        every: steps from one digest to the next, at least 1.

    Raises:
        ValueError: if they are not those of these steps.
    """
    remedy = f"return rjax.repro.scanned_digest(plan, state, {every}) from its body"
    if digests is None:
        raise ValueError(
            f"`digests` must come out of the scan, as the record has every={every}, "
            f"got None; {remedy}."
        )
    wanted = (len(steps), tensors, 2)
    if digests.shape != wanted or digests.dtype != np.uint32:
        raise ValueError(
            f"`digests` must be uint32{list(wanted)}, two words a tensor and step of "
            f"the scan, got {digests.dtype}{list(digests.shape)}; {remedy}."
        )
    due = [step + 1 for step in steps if (step + 1) % every == 0]
    rows = digests[[count - steps.start - 1 for count in due]]
    # No state has it: the digest of a tensor is zeros once in 2^64, or if it is empty.
    empty = ~rows.any(axis=(1, 2))
    if empty.any():
        raise ValueError(
            f"`digests` must hold one after every {every} steps, got none after "
            f"{due[int(np.argmax(empty))]}; {remedy}."
        )
    return due, rows


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "no step"
    return f"steps {steps[0]} to {steps[-1]}"
