"""Write checkpoints while the training goes on."""

import concurrent.futures
import contextlib
import errno
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

import rjax
from rjax.checkpoint import files
from rjax.checkpoint.arrays import kinds, take, to_host
from rjax.checkpoint.described import describe
from rjax.checkpoint.errors import CheckpointError
from rjax.checkpoint.quiet import alone_in_orbax, quietly
from rjax.checkpoint.restoring import Restored, restore
from rjax.checkpoint.retention import Mode, best_of, superfluous
from rjax.plan import Plan
from rjax.state import RegionState
from rjax.trees import dtype_of

# What libraries below say where the system says that there is no room.
_NO_ROOM = {
    "No space left": errno.ENOSPC,
    "File too large": errno.EFBIG,
    "quota exceeded": errno.EDQUOT,
}


class Checkpoints:
    """A folder of checkpoints, written beside the training.

    A save copies the state on its devices and returns; a thread then fetches the copy
    and writes it, through Orbax, under a name that it gets once it is whole. One save
    is under way at a time: the next one waits for it. Leaving the context waits for the
    last. Over several processes all call `save`, and the first one writes.

    Checkpoints of later steps than the one saved, of a run that went back, are removed
    once that is there; one of the same step is replaced.

    Args:
        folder: new, empty, or one of checkpoints.
        plan: of the states.
        keep: how many of the last ones stay; `None` keeps all.
        best: name of a metric: the one with the best value stays as well, the earliest
            of several.
        mode: whether the best value is the largest, "max", or the smallest, "min".

    Raises:
        CheckpointError: if other things lie in the folder.
        ValueError: for `keep` below 1 or another mode.
        OSError: if the folder cannot be written to.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32))
        >>> step = jax.jit(rjax.make_train_step(rjax.stateless_loss(loss), plan))
        >>> state, x = rjax.init_state(plan, params), jnp.ones((8, 4), jnp.float16)
        >>> folder = tempfile.mkdtemp()
        >>> with Checkpoints(folder, plan, keep=2, best="loss", mode="min") as saved:
        ...     for epoch in range(4):
        ...         state, report = step(state, x)
        ...         metrics = {"loss": report.loss}
        ...         saved.save(state, data={"epoch": epoch}, metrics=metrics)
        >>> saved.steps(), saved.best()
        ((3, 4), 4)
        >>> found = saved.restore(like=state)
        >>> found.step, found.data, bool((found.state.master == state.master).all())
        (4, {'epoch': 3}, True)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: Plan,
        *,
        keep: int | None = 3,
        best: str | None = None,
        mode: Mode = "max",
    ) -> None:
        whole = isinstance(keep, int) and not isinstance(keep, bool)
        if keep is not None and (not whole or keep < 1):
            raise ValueError(
                f"`keep` must be a whole number >= 1, or None for all, got {keep!r}."
            )
        if mode not in ("max", "min"):
            raise ValueError(f"`mode` must be 'max' or 'min', got {mode!r}.")
        self.folder, self.plan = Path(folder), plan
        self._keep, self._best = keep, best
        self._mode: Mode = mode
        self._writes = jax.process_index() == 0
        if self._writes:
            files.claim(self.folder)
        self._manager: Any = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rjax-checkpoint")
        self._under_way: concurrent.futures.Future[None] | None = None

    def save(
        self,
        state: RegionState,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a state, without waiting for the device or the disk.

        Where the save before is still being written, this waits for that.

        Args:
            state: any state of the plan; it may be given away once this returns. While
                it is written, its copy takes as much memory on the devices.
            data: plain data to keep with it: the position in the data, options.
            metrics: numbers, Python's or arrays of one element.

        Raises:
            ValueError: for a state of another plan, `data` that is no plain data, or
                metrics that are no numbers or lack the one called best.
            OSError: of the save before, such as for a full disk.
        """
        text, found = _as_json(data), self._checked(metrics)
        self.wait()
        copy = take(self.plan, state)
        if self._writes:
            self._under_way = self._thread.submit(self._write, copy, text, found)

    @property
    def busy(self) -> bool:
        """Whether a save is under way, so that another one would wait."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            OSError: if it could not be written; those before it are there.
        """
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def restore(
        self, like: RegionState | None = None, *, step: int | None = None
    ) -> Restored:
        """Restore the newest checkpoint that is whole, or one of a step.

        Arguments and errors as for :func:`restore`.
        """
        self.wait()
        return restore(self.folder, self.plan, like, step=step)

    def steps(self) -> tuple[int, ...]:
        """Return the steps of which there is a checkpoint, in order."""
        self.wait()
        return tuple(step for step, seal in self._seals().items() if seal is not None)

    def best(self) -> int | None:
        """Return the step with the best metric, `None` if there is none."""
        self.wait()
        return best_of(self._candidates(self._seals()), self._mode)

    def close(self) -> None:
        """Wait for the last save and end the thread.

        Raises:
            OSError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._manager is not None:
                self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            if getattr(failure, "errno", 0) == getattr(error, "errno", None):
                return  # a full disk, say, is told once
            # What ended the loop is the one to tell.
            warnings.warn(f"The last save failed: {failure}", UserWarning, stacklevel=2)

    def _checked(self, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        found = dict(metrics or {})
        for name, value in found.items():
            if np.shape(value) != () or not _is_number(dtype_of(value)):
                raise ValueError(
                    f"`metrics` entry {name!r} must be a number, got {value!r}."
                )
        if found and self._best is not None and self._best not in found:
            raise ValueError(
                f"`metrics` must hold {self._best!r}, by which the best is found, got "
                f"{', '.join(found)}."
            )
        return found

    def _write(self, copy: RegionState, data: str, metrics: dict[str, Any]) -> None:
        """Write one checkpoint and remove those that are no longer kept."""
        try:
            self._written(copy, data, metrics)
        except Exception as error:
            for words, number in _NO_ROOM.items():
                if words.lower() in str(error).lower():
                    raise OSError(number, os.strerror(number)) from error
            raise

    def _written(self, copy: RegionState, data: str, metrics: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp

        arrays = to_host(self.plan, copy)
        step, keys = int(arrays["step"]), kinds(copy)
        del copy  # the device needs its memory
        manager, path = self._opened(), self.folder / str(step)
        if path.exists():
            manager.delete(step)
        tree = {name: x for name, x in arrays.items() if x.size}
        state = ocp.args.StandardSave(tree)  # pyright: ignore[reportCallIssue]
        arguments = ocp.args.Composite(**{files.STATE: state})
        with quietly():
            manager.save(step, args=arguments, force=True)
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        # Orbax refuses arrays without elements.
        empty = {k: (x.shape, str(x.dtype)) for k, x in arrays.items() if not x.size}
        content = {
            **describe(self.plan),
            "versions": {"rjax": rjax.__version__, "jax": jax.__version__},
            "step": step,
            "data": json.loads(data),
            "metrics": finite,
            "arrays": keys,
            "empty": empty,
        }
        files.seal(path, content)
        self._remove(manager, step)

    def _remove(self, manager: Any, newest: int) -> None:
        seals = self._seals()
        whole = [step for step, seal in seals.items() if seal is not None]
        best = best_of(self._candidates(seals, newest), self._mode)
        for step in superfluous(list(seals), whole, newest, self._keep, best):
            manager.delete(step)

    def _candidates(
        self, seals: Mapping[int, Any], newest: int | None = None
    ) -> dict[int, float | None]:
        """Return the metric of every step that has it, up to the newest."""
        found = {step: seal["metrics"] for step, seal in seals.items() if seal}
        name = self._best
        return {
            step: each[name]
            for step, each in found.items()
            if name in each and (newest is None or step <= newest)
        }

    def _seals(self) -> dict[int, dict[str, Any] | None]:
        """Return what each step's checkpoint says of itself, `None` if not whole.

        Those of later formats are left out: they are not for this version to remove.
        """
        found: dict[int, dict[str, Any] | None] = {}
        for step in files.steps_in(self.folder):
            with contextlib.suppress(CheckpointError):
                found[step] = files.read_seal_if_whole(self.folder / str(step))
        return found

    def _opened(self) -> Any:
        """Return the manager, made when there is something to write: Orbax is heavy."""
        if self._manager is None:
            self._manager = _manager(self.folder)
        return self._manager


def _manager(folder: Path) -> Any:
    import orbax.checkpoint as ocp
    from orbax.checkpoint.checkpoint_managers import preservation_policy

    several = alone_in_orbax()
    mode = ocp.options.AtomicityMode.ATOMIC_RENAME
    options = ocp.CheckpointManagerOptions(
        # What stays is decided once a checkpoint is sealed, not before.
        preservation_policy=preservation_policy.PreserveAll(),
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
        lightweight_initialize=True,
        atomicity_options=ocp.options.AtomicityOptions(mode=mode),
        create=not several,
        **several,
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_


def _as_json(data: Any) -> str:
    """Return plain data as text, now: the caller may change them."""
    try:
        return json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`data` must be plain data, as JSON has them: {error}; keep numbers, "
            "text, lists and dictionaries."
        ) from None


def save(
    folder: str | os.PathLike[str],
    plan: Plan,
    state: RegionState,
    *,
    data: Any = None,
    metrics: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Save one checkpoint, and wait for it.

    Args:
        folder: of checkpoints; new, empty or one of them.
        plan: of the state.
        state: the training state.
        data: plain data to keep with it.
        metrics: numbers of that step.
        keep: how many of the last checkpoints stay, `None` for all.

    Raises:
        CheckpointError: if other things lie in the folder.
        ValueError: as :meth:`Checkpoints.save`.
        OSError: if it cannot be written.

    Example:
        >>> import tempfile, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((3, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> folder = tempfile.mkdtemp()
        >>> save(folder, plan, rjax.init_state(plan, params), data={"epoch": 3})
        >>> rjax.checkpoint.restore(folder, plan).data
        {'epoch': 3}
    """
    with Checkpoints(folder, plan, keep=keep) as saved:
        saved.save(state, data=data, metrics=metrics)
