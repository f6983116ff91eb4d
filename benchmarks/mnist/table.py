"""Figures of the contenders, as lines and as a table."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def rates(record: Record) -> list[float]:
    """Return epochs a second of every run, all its epochs together."""
    return [len(run["seconds"]) / sum(run["seconds"]) for run in record["runs"]]


def microseconds(record: Record) -> float:
    """Return the time of an epoch over its steps, in the median run."""
    return 1e6 / statistics.median(rates(record)) / record["steps"]


def lines(record: Record) -> Iterator[str]:
    """Yield what was found of one contender."""
    name = record["contender"]
    if "failed" in record:
        yield f"{name}: left out: {record['failed']}"
        return
    found, kernels = rates(record), record.get("kernels_per_step")
    yield (
        f"{name} on {record['device']}: {statistics.median(found):.2f} epochs/s "
        f"[{min(found):.2f} {max(found):.2f}], {microseconds(record):.1f} µs a step"
        + (f", {kernels:.1f} kernels a step" if kernels else "")
        + f"; compiled and warm after {statistics.median(record['compile_s']):.1f} s"
    )
    for run in record["runs"]:
        accuracy = run["accuracy"]
        best = max(range(len(accuracy)), key=accuracy.__getitem__)
        yield (
            f"  seed {run['seed']}: best {accuracy[best]:.2%} (epoch {best + 1}), last "
            f"{accuracy[-1]:.2%}; loss {run['loss'][0]:.4f} -> {run['loss'][-1]:.4f}, "
            f"skipped {run['skipped']}, scale {run['scale']:g}"
        )


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yield a Markdown table; "rjax is" how many times as fast as the contender."""
    measured = [record for record in records if "failed" not in record]
    ours = [r for r in measured if r["contender"] == "rjax"]
    yield "| contender | epochs/s | µs a step | rjax is | best | last |"
    yield "|---|---:|---:|---:|---|---|"
    for record in measured:
        rate, ratio = statistics.median(rates(record)), ""
        if ours and record not in ours:
            ratio = f"{statistics.median(rates(ours[0])) / rate:.2f}x"
        best = " ".join(f"{max(run['accuracy']):.2%}" for run in record["runs"])
        last = " ".join(f"{run['accuracy'][-1]:.2%}" for run in record["runs"])
        cells = record["contender"], f"{rate:.2f}", f"{microseconds(record):.1f}", ratio
        yield f"| {' | '.join((*cells, best, last))} |"
