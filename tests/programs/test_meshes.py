"""The mesh of a saved program: refused where it is none, or larger than the machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from rjax.programs import meshes

MANY = jax.local_device_count() + 1
MESH = {"axes": ["data"], "sizes": [MANY], "types": ["Auto"]}


def exported(devices: int) -> Any:
    return SimpleNamespace(nr_devices=devices)


def test_a_program_of_one_device_has_no_mesh() -> None:
    here = SingleDeviceSharding(jax.local_devices()[0])
    assert meshes.described("step", [here, here]) is None


def test_several_devices_without_a_mesh_are_refused() -> None:
    several = SimpleNamespace(device_set=set(range(3)))
    with pytest.raises(NotImplementedError, match="`step` runs on 3 devices that are"):
        meshes.described("step", [several])


def test_fewer_devices_than_it_was_saved_for_are_refused() -> None:
    sentence = f"f was saved for {MANY} devices, JAX sees {MANY - 1} here; capture"
    with pytest.raises(ValueError, match=sentence):
        meshes.laid_out(Path("f"), MESH, exported(MANY))


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        "data",
        {**MESH, "sizes": ["many"]},
        {**MESH, "sizes": [MANY + 1]},
        {**MESH, "types": ["Other"]},
        {**MESH, "axes": ["data", "model"]},
    ],
    ids=str,
)
def test_a_damaged_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match="f is damaged"):
        meshes.laid_out(Path("f"), mesh, exported(MANY))
