"""The mesh of a saved program: what of it is kept, and how its arrays lie on it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

_DAMAGED = "{} is damaged: it has no mesh that its program could run on."


def described(name: str, shardings: Sequence[Any]) -> dict[str, Any] | None:
    """Return the mesh that a program runs on as plain data, `None` for one device.

    Args:
        name: of the program, for the sentence.
        shardings: of its arguments.

    Raises:
        NotImplementedError: for devices of several processes, or without a mesh.
    """
    several = [s for s in shardings if len(s.device_set) > 1]
    if not several:
        return None
    count = len(several[0].device_set)
    if not all(isinstance(s, NamedSharding) for s in several):
        raise NotImplementedError(
            f"`{name}` runs on {count} devices that are no mesh; only programs for one "
            "device or a jax.sharding.Mesh can be saved."
        )
    if not all(s.is_fully_addressable for s in several):
        raise NotImplementedError(
            f"`{name}` runs on the {count} devices of several processes; only programs "
            "for those of one can be saved."
        )
    mesh = several[0].mesh
    types = mesh.axis_types or (AxisType.Auto,) * len(mesh.axis_names)
    return {
        "axes": list(mesh.axis_names),
        "sizes": [mesh.shape[axis] for axis in mesh.axis_names],
        "types": [kind.name for kind in types],
    }


def laid_out(path: Path, mesh: Any, exported: jax.export.Exported) -> list[Any]:
    """Return the shapes of a program's arguments, on the first devices there are.

    Args:
        path: of the file, for the sentence.
        mesh: from :func:`described`.
        exported: the program.

    Raises:
        ValueError: for too few devices, or what is no mesh.
    """
    try:
        sizes = tuple(int(size) for size in mesh["sizes"])
        axes = tuple(str(axis) for axis in mesh["axes"])
        types = tuple(AxisType[kind] for kind in mesh["types"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(_DAMAGED.format(path)) from None
    count, found = math.prod(sizes), jax.local_devices()
    if count != exported.nr_devices or not len(sizes) == len(axes) == len(types):
        raise ValueError(_DAMAGED.format(path))
    if count > len(found):
        raise ValueError(
            f"{path} was saved for {count} devices, JAX sees {len(found)} here; "
            "capture the step for those."
        )
    devices = np.array(found[:count]).reshape(sizes)
    shardings = exported.in_shardings_jax(Mesh(devices, axes, axis_types=types))
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
