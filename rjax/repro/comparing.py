"""Compare the records of two runs: equal, nearly equal, or where they part."""

import os

from rjax.repro.comparison import (
    Comparison,
    Difference,
    Distance,
    Finding,
    GradientDifference,
    StateDifference,
    Tolerance,
)
from rjax.repro.elements import distances, first_element
from rjax.repro.manifests import causes
from rjax.repro.opened import Opened, open_record
from rjax.repro.scan import Digests, scan_digests, scan_gradients, scan_steps, when
from rjax.repro.structure import findings
from rjax.repro.verdict import judge

Distances = tuple[int, tuple[Distance, ...]] | None


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tolerance: Tolerance | None = None,
) -> Comparison:
    """Compare two runs by their records, bit by bit.

    Bits decide: NaN equals NaN of the same bits, and -0 differs from 0. Both records
    are read once, in pieces of bounded size; neither needs a device.

    Args:
        a: folder of a run, with `record/` and usually `manifest.json`.
        b: folder of another run.
        tolerance: what is still numerically equivalent; `None` for 1e-3 on the
            numbers of every step and 1e-2 on the tensors of the last snapshots.

    Returns:
        The verdict, where the runs differ first, how, and what may be the cause.

    Raises:
        RecordError: if a record is missing, damaged, empty or of another format.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, rjax
        >>> params, folder = {"w": jnp.ones((4, 2))}, tempfile.mkdtemp()
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32))
        >>> step = jax.jit(rjax.make_train_step(rjax.stateless_loss(loss), plan))
        >>> for name, last in (("a", 1), ("b", 2)):
        ...     state = rjax.init_state(plan, params)
        ...     with rjax.repro.record(f"{folder}/{name}", plan, state) as recording:
        ...         for factor in (1, 1, last):
        ...             batch = jnp.full((8, 4), factor, jnp.float16)
        ...             state, report = step(state, batch)
        ...             recording.add(state, report)
        >>> found = compare(f"{folder}/a", f"{folder}/b")
        >>> found.verdict, found.first.step, found.first.name
        ('diverged', 2, 'loss')
    """
    left, right = open_record(a), open_record(b)
    steps, digests = scan_steps(left, right), scan_digests(left, right)
    of_gradients = scan_gradients(left, right)
    state, gradients = _state(left, right, digests), _gradients(of_gradients)
    differences = [x for x in (state, *steps.columns, gradients) if x is not None]
    first = min(differences, key=when, default=None)
    noticed = findings(left, right, steps, digests, of_gradients)
    apart = _distances(left, right, first, noticed)
    verdict, reason = judge(
        steps, digests, of_gradients, noticed, apart, tolerance or Tolerance()
    )
    plans = left.layout.plan, right.layout.plan
    return Comparison(
        verdict=verdict,
        reason=reason,
        first=first,
        state=state,
        gradients=gradients,
        columns=steps.columns,
        findings=noticed,
        a=steps.tracks[0],
        b=steps.tracks[1],
        compared=(steps.common, digests.common),
        equal=None if digests.equal < 0 else digests.equal,
        distances=apart,
        causes=causes(left.folder, right.folder, plans),
        timelines={
            name: found.timeline
            for name, found in (
                ("steps", steps),
                ("gradients", of_gradients),
                ("state", digests),
            )
            if found is not None
        },  # fmt: skip
    )


def _state(a: Opened, b: Opened, digests: Digests) -> StateDifference | None:
    """Return the first digests that differ, with an element if there are snapshots."""
    if digests.step is None:
        return None
    step, element, hint = digests.step, None, ""
    if step in a.snapshots() & b.snapshots():
        element = first_element(a, b, step, digests.tensors[0])
        if element is None:
            hint = f"The snapshots after {step} steps do not show it."
    else:
        # A first state always has a snapshot, so few others are wanted then.
        many = step if step > max(a.first, b.first) else max(a.last, b.last) + 1
        every = f"snapshot_every={many}"
        hint = (
            f"To see which element differs, record both runs with {every}, or add "
            f"--replay {step} to `rjax compare` of two runs of `rjax train`."
        )
    return StateDifference(
        step,
        None if digests.equal < 0 else digests.equal,
        digests.tensors,
        digests.compared,
        digests.a,
        digests.b,
        element,
        hint,
    )


def _gradients(digests: Digests | None) -> GradientDifference | None:
    """Return the first digests of gradients that differ."""
    if digests is None or digests.step is None:
        return None
    equal = None if digests.equal < 0 else digests.equal
    return GradientDifference(
        digests.step, equal, digests.tensors, digests.compared, digests.a, digests.b
    )


def _distances(
    a: Opened,
    b: Opened,
    first: Difference | None,
    found: tuple[Finding, ...],
) -> Distances:
    """Return how far apart the last snapshots in common are, if anything differs."""
    differs = any(finding.kind in ("shape", "dtype") for finding in found)
    if first is None and not differs:
        return None
    start = 0 if first is None else first.step
    common = [step for step in a.snapshots() & b.snapshots() if step >= start]
    return (max(common), distances(a, b, max(common))) if common else None
