"""The options of `rjax train` that say on which devices, and in which processes."""

import dataclasses
from typing import Annotated, Any

import tyro


def _hint(default: str) -> str:
    return "" if default == "None" else f"(default: {default})"


def _arg(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=_hint)


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """On which devices, and in which processes.

    Attributes:
        devices: Devices that share each batch, or `all` that there are; if not given,
            1, and over several processes all.
        shard_optimizer: Keep masters, momenta and average in ranges, one on each
            device, instead of whole on all.
        coordinator: Address of the first of several processes that train together
            (docs/many_devices.md); JAX_COORDINATOR_ADDRESS if not given. `auto` takes
            all three from Slurm, Open MPI or Kubernetes.
        processes: How many processes there are; JAX_NUM_PROCESSES if not given.
        process: Number of this one, from 0, which leaves the run's folder;
            JAX_PROCESS_ID if not given.
        heartbeat: Seconds without a sign of life after which a process counts as
            lost, and the others end.
    """

    devices: Annotated[str | None, _arg("INT|all")] = None
    shard_optimizer: bool = False
    coordinator: Annotated[str | None, _arg("HOST:PORT|auto")] = None
    processes: Annotated[int | None, _arg("INT")] = None
    process: Annotated[int | None, _arg("INT")] = None
    heartbeat: int = 30
