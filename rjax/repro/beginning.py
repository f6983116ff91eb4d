"""Begin the record of a run, or go on with the one that is there."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rjax.plan import Plan
from rjax.repro import format as on_disk
from rjax.repro.errors import RecordError
from rjax.repro.manifest import Manifest
from rjax.repro.recording import Recording
from rjax.repro.reopened import reopen
from rjax.state import RegionState


def record(
    folder: str | os.PathLike[str],
    plan: Plan,
    state: RegionState,
    *,
    every: int = 10,
    snapshot_every: int = 0,
    facts: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Recording:
    """Begin the record of a run; use it as a context manager.

    Recording changes no bit of the training: the digest is a program of its own,
    between two steps.

    Where reports hold digests of gradients (from a step made with
    `digest_grads=True`), those of step k are kept with each digest of the state before
    step k: 8 bytes a slot. So where the state is equal and a gradient differs, this
    gradient was the first to differ.

    Args:
        folder: of the run; new or empty, or one that holds no record yet. Gets
            `manifest.json` (unless there is one) and `record/`.
        plan: the static layout.
        state: the state before the first step.
        every: steps from one digest of the whole state to the next; the state before
            the first step always has one. 0 for no digests, of gradients neither.
        snapshot_every: steps from one snapshot of the whole state to the next, with
            which a comparison shows single elements; 0 for none. A snapshot waits for
            the device and takes the state's size on disk.
        facts: plain data for the manifest: seeds, data, options.
        resume: go on with the record that is there from the step of `state`, as one of
            an unbroken run would; what it holds of later steps is dropped.

    Returns:
        The record, to which every step is added: :meth:`Recording.add` in a loop of
        your own, :meth:`Recording.add_scanned` for the steps of a `lax.scan`.

    Raises:
        RecordError: if the folder holds a record already; with `resume`, if that ends
            before the state, or is of another plan or of other `every`.
        ValueError: for a negative number of steps.
        OSError: if the folder cannot be written to.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, rjax
        >>> params, folder = {"w": jnp.ones((4, 2))}, tempfile.mkdtemp()
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32))
        >>> step = jax.jit(rjax.make_train_step(rjax.stateless_loss(loss), plan))
        >>> state = rjax.init_state(plan, params)
        >>> with record(folder, plan, state, every=2) as recording:
        ...     for _ in range(4):
        ...         state, report = step(state, jnp.ones((8, 4), jnp.float16))
        ...         recording.add(state, report)
        >>> rjax.repro.compare(folder, folder).compared  # steps, states
        (4, 3)
    """
    for name, value in (("every", every), ("snapshot_every", snapshot_every)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"`{name}` must be a whole number >= 0, got {value!r}.")
    path = Path(folder)
    inner = path / on_disk.FOLDER
    if resume and inner.exists():
        going_on = reopen(inner, plan, state, every)
        if going_on is not None:
            return Recording(inner, plan, state, every, snapshot_every, None, going_on)
    if inner.exists():
        raise RecordError(
            f"{path} holds a record already; give a folder of its own to every run."
        )
    path.mkdir(parents=True, exist_ok=True)
    manifest = None
    if not (path / "manifest.json").exists():
        plan_facts = {"fingerprint": plan.fingerprint, "slots": len(plan.slots)}
        known = {"config": plan.config, "plan": plan_facts, **(facts or {})}
        manifest = Manifest(path, **known)
    return Recording(inner, plan, state, every, snapshot_every, manifest)
