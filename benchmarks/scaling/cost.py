"""What a data-parallel step costs between devices: links as data, rings as formulas.

Source of the formulas: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations, 2009: a ring of n devices moves 2 (n - 1) / n of the bytes
over each link, in 2 (n - 1) hops; a reduce-scatter or an all-gather half of that.
"""

import dataclasses
import math

from scaling.models import Model

# Milliseconds of a small collective whatever it moves, launch included: what 207 of
# ResNet-50 took on two H200s, 34.2 ms a step less 30.7 on one. Their hops are those of
# a tree, as libraries choose one for few bytes.
SMALL_MS = 0.0145


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects a device with the next one in the ring.

    Attributes:
        name: of the technology.
        bandwidth: bytes a second, in each direction, of one device.
        hop: seconds from one device to the next, assumed.
        source: of the bandwidth.
    """

    name: str
    bandwidth: float
    hop: float
    source: str


LINKS = (
    Link("NVLink 4", 450e9, 1e-6, "NVIDIA H200: 900 GB/s both directions together"),
    Link("InfiniBand NDR", 50e9, 5e-6, "400 Gb/s, one port a device"),
    Link("Ethernet", 12.5e9, 20e-6, "100 Gb/s, one port a device"),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step over n devices, predicted, in milliseconds.

    Attributes:
        model: what is trained.
        link: what connects the devices.
        devices: how many there are.
        shard: whether the optimizer is sharded.
        moved: bytes that a device sends.
        deep: the reduction of the deep bucket, 0 of a sharded optimizer.
        late: all reductions and gathers that come after the backward pass.
        norms: exchanges within batch norms.
    """

    model: Model
    link: Link
    devices: int
    shard: bool
    moved: float
    deep: float
    late: float
    norms: float

    @property
    def exposed(self) -> float:
        """What the devices wait for: all but what hides behind the first layer."""
        return max(0.0, self.deep - self.model.window_ms) + self.late + self.norms

    @property
    def step(self) -> float:
        """The whole step."""
        return self.model.step_ms + self.exposed

    @property
    def efficiency(self) -> float:
        """Weak scaling: one device's time over this one."""
        return self.model.step_ms / self.step


def half_ring(nbytes: float, devices: int, link: Link) -> float:
    """Return milliseconds of a reduce-scatter or an all-gather over a ring."""
    hops = devices - 1
    return 1e3 * (hops / devices * nbytes / link.bandwidth + hops * link.hop)


def all_reduce(nbytes: float, devices: int, link: Link) -> float:
    """Return milliseconds of an all-reduce over a ring, none of nothing."""
    return 2 * half_ring(nbytes, devices, link) if nbytes else 0.0


def exchanges(devices: int) -> int:
    """Return how often a norm over so many devices exchanges: forward and backward.

    Up to eight devices gather their statistics, more sum them up twice.
    """
    return 2 if devices <= 8 else 3


def predict(
    model: Model, link: Link, devices: int, shard: bool, per_norm: int | None = None
) -> Step:
    """Return what a step is predicted to take.

    Args:
        model: what is trained.
        link: what connects the devices.
        devices: how many there are.
        shard: whether the optimizer is sharded.
        per_norm: exchanges of a norm, `None` for those of :func:`exchanges`.
    """
    small = SMALL_MS + 2e3 * math.ceil(math.log2(devices)) * link.hop
    norms = model.norms * (per_norm or exchanges(devices)) * small
    share = (devices - 1) / devices
    if shard:
        total = model.grad_bytes + model.half_bytes
        late = half_ring(model.grad_bytes, devices, link)
        late += half_ring(model.half_bytes, devices, link)
        return Step(model, link, devices, True, share * total, 0.0, late, norms)
    first = model.grad_bytes - model.deep_bytes
    return Step(
        model,
        link,
        devices,
        False,
        2 * share * model.grad_bytes,
        all_reduce(model.deep_bytes, devices, link),
        all_reduce(first, devices, link),
        norms,
    )


def hidden_from(nbytes: float, window_ms: float, devices: int, hop: float) -> float:
    """Return the bandwidth from which an all-reduce fits a window; infinity if none.

    Args:
        nbytes: that are reduced.
        window_ms: in which it has to be done.
        devices: in the ring.
        hop: seconds a hop.
    """
    left = window_ms / 1e3 - 2 * (devices - 1) * hop
    return 2 * (devices - 1) / devices * nbytes / left if left > 0 else float("inf")
