"""Read checkpoints back, and make states of them."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rjax.checkpoint import files
from rjax.checkpoint.arrays import assemble, blank, differences, refuse
from rjax.checkpoint.described import changes, describe, layout_differences
from rjax.checkpoint.errors import CheckpointError, DamagedError
from rjax.checkpoint.quiet import alone_in_orbax, quietly
from rjax.plan import Plan
from rjax.state import RegionState
from rjax.trees import flatten


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back.

    Attributes:
        state: the training state.
        step: how many steps it has seen.
        data: what was kept with it, such as the position in the data; `None` if
            nothing was.
        metrics: of that step, by name; a number that was not finite is `None`.
        changes: in what the configuration differs from the one then, such as
            "learning_rate: 0.1 -> 0.05".
        refused: what is wrong with later checkpoints that could not be used.

    Example:
        >>> import tempfile, jax.numpy as jnp, rjax
        >>> params, folder = {"w": jnp.ones((3, 2))}, tempfile.mkdtemp()
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> rjax.checkpoint.save(folder, plan, rjax.init_state(plan, params))
        >>> slower = rjax.make_plan(params, rjax.Config(learning_rate=0.05))
        >>> found = rjax.checkpoint.restore(folder, slower)
        >>> found.step, found.changes
        (0, ('learning_rate: 0.1 -> 0.05',))
    """

    state: RegionState
    step: int
    data: Any
    metrics: Mapping[str, float | None]
    changes: tuple[str, ...]
    refused: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Read:
    """A checkpoint as it lies on disk, verified.

    Attributes:
        path: its folder.
        content: what it says of itself.
        arrays: by name.
    """

    path: Path
    content: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


def restore(
    path: str | os.PathLike[str],
    plan: Plan,
    like: RegionState | None = None,
    *,
    step: int | None = None,
) -> Restored:
    """Restore a training state, bit for bit.

    Every byte is verified first. If the newest checkpoint is damaged, was never written
    to its end or is of a later format, a warning says so and the one before it is
    restored.

    The layout must be that of `plan`. Other hyperparameters are allowed: the state goes
    on with those of `plan`, and what has changed is told. With another learning rate
    that is a number the state has the new one, and another loss-scale rule starts anew;
    else rate and scale are those of the checkpoint. (An Optax transformation has no
    numbers to compare; what its state holds is restored.)

    Args:
        path: a folder of checkpoints, or that of one of them.
        plan: the static layout.
        like: a state of the plan, such as the one that a step is compiled for; what is
            restored has its structure and lies where it lies: on one device, or placed
            by `DataParallelStep.place` over any number. It is read only. `None` is a
            state as :func:`rjax.init_state` makes it, with statistics in dictionaries.
        step: which checkpoint; the newest that is whole, if not given.

    Returns:
        The state and what was kept with it.

    Raises:
        CheckpointError: if there is none, it is of another layout, or (with `step`, or
            if no other is left) it is damaged or of a later format.

    Example:
        >>> import tempfile, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((3, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> state, folder = rjax.init_state(plan, params), tempfile.mkdtemp()
        >>> rjax.checkpoint.save(folder, plan, state)
        >>> found = restore(folder, plan, like=state).state
        >>> bool((found.master == state.master).all())
        True
    """
    read, refused = read_newest(Path(path), step=step)
    for sentence in refused:
        warnings.warn(
            f"{sentence[:-1].rsplit(';')[0]}; step {read.content['step']} is restored "
            "instead.",
            UserWarning,
            stacklevel=2,
        )
    return restored(read, plan, like, refused)


def read_newest(
    path: Path,
    *,
    step: int | None = None,
    suits: Callable[[int], bool] = lambda step: True,
) -> tuple[Read, tuple[str, ...]]:
    """Read the newest checkpoint that is whole, or the one of a step.

    Args:
        path: a folder of checkpoints, or that of one of them.
        step: which one.
        suits: whether a step will do, where none is named.

    Returns:
        The checkpoint, and what is wrong with later ones.

    Raises:
        CheckpointError: as :func:`restore`.
    """
    folder, own = files.located(path)
    wanted = own if step is None else step
    known = files.steps_in(folder)
    if wanted is not None:
        if wanted not in known:
            there = ", ".join(map(str, known)) or "none"
            raise CheckpointError(
                f"{folder} has no checkpoint of step {wanted}: it has {there}."
            )
        return read_one(folder / str(wanted)), ()
    found = [x for x in reversed(known) if suits(x)]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint yet: save one first.")
    refused: list[CheckpointError] = []
    for number in found:
        try:
            return read_one(folder / str(number)), tuple(map(str, refused))
        except CheckpointError as error:
            refused.append(error)
    raise refused[0]


def read_one(checkpoint: Path) -> Read:
    """Read a checkpoint, if every byte is as it was written.

    Raises:
        DamagedError: if not.
        CheckpointError: if it is of another format.
    """
    import orbax.checkpoint as ocp

    content = files.read_seal(checkpoint)
    files.verify(checkpoint, content)
    try:
        alone = alone_in_orbax()
        with quietly(), ocp.StandardCheckpointer(**alone) as reader:
            arrays = dict(reader.restore(checkpoint.absolute() / files.STATE))
        for name, (shape, dtype) in content["empty"].items():
            arrays[name] = np.zeros(shape, jnp.dtype(dtype))
        arrays = {name: np.asarray(x) for name, x in arrays.items()}
    except Exception as error:
        # What Orbax says of files that it wrote is not for the reader to work out.
        raise DamagedError(
            f"{checkpoint} cannot be read by this version of Orbax ({_short(error)}); "
            "restore another step."
        ) from error
    return Read(checkpoint, content, arrays)


def restored(
    read: Read,
    plan: Plan,
    like: RegionState | None,
    refused: tuple[str, ...] = (),
) -> Restored:
    """Make a state of a checkpoint; see :func:`restore`."""
    content, now = read.content, describe(plan)
    if words := layout_differences(content["plan"], now["plan"]):
        raise refuse(read.path, words)
    changed = dict(changes(content["config"], now["config"]))
    arrays, keys = dict(read.arrays), dict(content["arrays"])
    if any(name.partition(".")[0] == "scaling" for name in changed):
        _restart_scaling(plan, arrays, keys)
    if "learning_rate" in changed:
        rate = plan.config.learning_rate
        arrays["learning_rate"] = np.asarray(
            0.0 if callable(rate) or rate is None else rate, np.float32
        )
    template = blank(plan, arrays, keys) if like is None else like
    if words := differences(plan, template, arrays, keys):
        raise refuse(read.path, words)
    return Restored(
        assemble(template, arrays, keys),
        content["step"],
        content["data"],
        content["metrics"],
        tuple(f"{name}: {change}" for name, change in changed.items()),
        refused,
    )


def _restart_scaling(plan: Plan, arrays: dict[str, Any], keys: dict[str, Any]) -> None:
    """Put the start of the plan's loss-scale rule in the place of another's state."""
    for name in [name for name in arrays if name.partition("/")[0] == "scaling_state"]:
        del arrays[name], keys[name]
    scale, own = plan.config.scale_rule.init()
    for name, leaf in flatten({"scale": scale, "scaling_state": own})[0]:
        arrays[name], keys[name] = np.asarray(leaf), None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
