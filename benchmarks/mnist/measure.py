"""How every contender is timed: the same loop around its own epochs."""

import time
from typing import Any, Protocol

from mnist.settings import Settings


class Rig(Protocol):
    """A contender with the data on the device."""

    def compile(self) -> None:
        """Compile all that a run needs, and run an epoch and an evaluation of it."""
        ...

    def reset(self, seed: int) -> None:
        """Start a run: weights, moments, schedule and order from the seed."""
        ...

    def epoch(self) -> Any:
        """Start an epoch and the evaluation after it; return what `read` takes."""
        ...

    def read(self, begun: Any) -> tuple[float, float, float]:
        """Wait for an epoch: its mean loss, test loss and test accuracy."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return device, versions and what a step launches, as far as it is known."""
        ...

    def ending(self) -> dict[str, Any]:
        """Return skipped steps and loss scale at the end of a run."""
        ...


def measure(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Return times, losses and accuracies of every run of a contender.

    A sample is the time from the results of one epoch to those of the next, evaluation
    included. The host may begin an epoch before it has the results of the last, as all
    do here; all samples of a run together are the time of the whole run.
    """
    start = time.perf_counter()
    rig.compile()
    compiled = time.perf_counter() - start
    runs = []
    for seed in settings.seeds:
        rig.reset(seed)
        runs.append({"seed": seed, **_run(rig, settings.epochs), **rig.ending()})
    return {"compile_s": compiled, "runs": runs, **rig.facts()}


def _run(rig: Rig, epochs: int) -> dict[str, Any]:
    seconds, results = [], []
    last = time.perf_counter()

    def take(begun: Any) -> None:
        nonlocal last
        results.append(rig.read(begun))
        now = time.perf_counter()
        seconds.append(now - last)
        last = now

    begun = rig.epoch()
    for _ in range(epochs - 1):
        after = rig.epoch()
        take(begun)
        begun = after
    take(begun)
    loss, test_loss, accuracy = zip(*results, strict=True)
    return {
        "seconds": seconds,
        "loss": loss,
        "test_loss": test_loss,
        "accuracy": accuracy,
    }
