"""What one process of the script measures: times in turn, memory, or a profile."""

import time
from typing import Any

import jax
from throughput import on_jax

from scaling import overlap
from scaling.rigs import Rig, count_devices
from scaling.settings import Settings

# Steps after which the most memory that a step takes has been taken.
SETTLED = 3


def run(job: str, settings: Settings) -> dict[str, Any]:
    """Return what a job found: "turns", "profile", or "memory:" and a part."""
    count_devices()
    kind, _, part = job.partition(":")
    jobs = {"turns": turns, "memory": memory, "profile": profile}
    found = jobs[kind](settings, part)
    return {**found, **on_jax.environment()}


def turns(settings: Settings, _: str) -> dict[str, Any]:
    """Time the parts in turn: one sample of each in every round, to and fro."""
    rigs, found = [], {}
    for part in settings.parts.split(","):
        rig = Rig(part, settings)
        start = time.perf_counter()
        rig.compile()
        rig.run(1)
        found[part] = {"compile_s": time.perf_counter() - start, "samples": []}
        rigs.append(rig)
    for rig in rigs:
        rig.run(settings.warmup)
    for i in range(settings.samples):
        for rig in rigs[:: 1 if i % 2 == 0 else -1]:
            start = time.perf_counter()
            rig.run(settings.steps)
            found[rig.part]["samples"].append(time.perf_counter() - start)
    return {"parts_found": {rig.part: found[rig.part] | rig.facts() for rig in rigs}}


def memory(settings: Settings, part: str) -> dict[str, Any]:
    """Take a few steps of one part alone; return what every device says of itself."""
    rig = Rig(part, settings)
    rig.compile()
    rig.run(SETTLED)
    stats = [d.memory_stats() or {} for d in jax.local_devices()[: rig.devices]]
    return {
        "part": part,
        "peak_bytes": [found.get("peak_bytes_in_use") for found in stats],
        "between_bytes": [found.get("bytes_in_use") for found in stats],
        **rig.facts(),
    }


def profile(settings: Settings, _: str) -> dict[str, Any]:
    """Return when the buckets of the step over all devices are reduced."""
    rig = Rig("all", settings)
    rig.compile()
    rig.run(1 + settings.warmup)
    roles = overlap.roles_of(rig.program.as_text(), rig.plan)
    found = overlap.profile(lambda: rig.run(1), roles, rig.devices)
    return {"part": "all", "profiled": found, **rig.facts()}
