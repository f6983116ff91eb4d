"""What a data-parallel step asks of its mesh, its state and its batch."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rjax.plan import Plan
from rjax.state import RegionState
from rjax.trees import flatten

Axis = str | tuple[str, ...]


def check_mesh(mesh: Any) -> None:
    """Raise a `ValueError` for anything but a mesh of devices."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}; make one "
            'with `jax.make_mesh((jax.device_count(),), ("data",))`.'
        )


def check_axes(mesh: Any, axis: Axis) -> tuple[str, ...]:
    """Return the names of the axes that the batch is split over.

    Raises:
        ValueError: for anything but a mesh, an axis it does not have, or another one
            of more than one device.
    """
    check_mesh(mesh)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"`axis` must name axes of `mesh`, which has {mesh.axis_names}, each once, "
            f"got {axis!r}."
        )
    others = [n for n, size in mesh.shape.items() if n not in axes and size > 1]
    if others:
        raise ValueError(
            f"`mesh` has {mesh.shape[others[0]]} devices along {others[0]!r}, which "
            f"`axis` leaves out: they would all do the same; add it to `axis`, as in "
            f"axis={(*axes, *others)}, or take a mesh without it."
        )
    return axes


def check_share(batch: Any, devices: int, steps: int = 1) -> None:
    """Refuse a batch of which the devices cannot take equal shares.

    Args:
        batch: pytree of arrays.
        devices: how many there are.
        steps: micro-batches that each device makes of its share.

    Raises:
        ValueError: naming the leaf.
    """
    for path, leaf in flatten(batch)[0]:
        shape = np.shape(leaf)
        if shape and shape[0] % (devices * steps) == 0:
            continue
        size = shape[0] if shape else "no leading axis"
        micro = f" times accumulation_steps={steps}" if steps > 1 else ""
        raise ValueError(
            f"`batch` leaf {path or 'array'!r} must have a leading size divisible by "
            f"{devices} devices{micro}, as all take equal shares, got {size}; change "
            "the batch size, or leave out what does not fill the last batch."
        )


def check_state(plan: Plan, state: Any, length: int | None = None) -> None:
    """Refuse a state of another plan, or one that has to be placed first.

    Args:
        plan: the static layout.
        state: the training state.
        length: that a float32 arena must have, `None` for the plan's or more.

    Raises:
        ValueError: for either.
    """
    if not isinstance(state, RegionState):
        raise ValueError(
            f"`state` must be one from `rjax.init_state`, got {type(state).__name__}."
        )
    optional = {"mu": plan.gates.mu, "nu": plan.gates.nu, "ema": plan.gates.ema}
    gates = all((getattr(state, k) is not None) == v for k, v in optional.items())
    half = None if state.compute is None else len(state.compute)
    wanted = None if plan.half_dtype is None else plan.n - plan.bias_like
    n = len(state.master)
    if not gates or half != wanted or n < plan.n:
        raise ValueError(
            f"`state` is one of another plan than `plan`, of {plan.n} elements; make "
            "it with `rjax.init_state(plan, params)`."
        )
    if length is not None and n != length:
        raise ValueError(
            f"`state` has arenas of {n} elements, the step takes {length} over its "
            "devices; call `state = step.place(state)` first."
        )


def is_explicit(mesh: Any) -> bool:
    """Whether a mesh, concrete or abstract, has axes that are part of types."""
    return jax.sharding.AxisType.Explicit in (mesh.axis_types or ())
