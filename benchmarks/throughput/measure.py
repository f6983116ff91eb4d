"""How every contender is timed: the same loop around its own step."""

import time
from typing import Any, Protocol

from throughput.settings import Settings


class Rig(Protocol):
    """A contender with its state and the batch on the device."""

    def compile(self) -> None:
        """Compile what can be compiled before the first step."""
        ...

    def step(self) -> Any:
        """Start one step and return its loss, without waiting for it."""
        ...

    def wait(self) -> None:
        """Block until every step that was started is done."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return parameters, scale, peak memory, device and versions."""
        ...


def measure(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Return times, losses and facts of one contender as plain data.

    `compile_s` lasts until the first step is done, for all alike: some compile in it.
    A sample is a Python loop of `steps` steps that blocks at its end.
    """
    start = time.perf_counter()
    rig.compile()
    first = rig.step()
    rig.wait()
    compiled = time.perf_counter()
    last = first
    for _ in range(settings.warmup):
        last = rig.step()
    rig.wait()
    warm = time.perf_counter()
    samples = []
    for _ in range(settings.samples):
        begin = time.perf_counter()
        for _ in range(settings.steps):
            last = rig.step()
        rig.wait()
        samples.append(time.perf_counter() - begin)
    return {
        "compile_s": compiled - start,
        "warmup_s": warm - compiled,
        "samples": samples,
        "first_loss": float(first),
        "last_loss": float(last),
        **rig.facts(),
    }
