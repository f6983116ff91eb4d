"""Figures of weak scaling, as lines and as a table."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]
HEADER = (
    "part", "devices", "img/s median [min max]", "ms/step", "weak scaling",
    "compile s", "state MB a device", "first loss", "last loss",
)  # fmt: skip
# How far the first loss of a part may be from that of one device, as a share of it:
# all devices have the same images, so only rounding tells them apart, and dropout.
CLOSE, DROPOUT, CLOSE_BY_DROPOUT = 0.01, ("vgg16bn",), 0.05


def ratios(found: Record, part: str) -> list[float]:
    """Return the weak scaling in every round: one device's time over the part's."""
    ones, alls = found["one"]["samples"], found[part]["samples"]
    return [one / all_ for one, all_ in zip(ones, alls, strict=True)]


def lines(record: Record) -> Iterator[str]:
    """Yield a Markdown table of the parts, and what is doubtful about it."""
    found = record["parts_found"]
    rows = [HEADER, *(_cells(record, part) for part in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield _row(rows[0], widths)
    rules = ["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]
    yield f"|{'|'.join(rules)}|"
    for row in rows[1:]:
        yield _row(row, widths)
    close = CLOSE_BY_DROPOUT if record["model"] in DROPOUT else CLOSE
    yield from doubts(found, close)


def _cells(record: Record, part: str) -> tuple[str, ...]:
    found = record["parts_found"]
    own = found[part]
    images = record["batch"] * record["steps"] * own["devices"]
    speeds = [images / seconds for seconds in own["samples"]]
    scaling = ""
    if part != "one" and "one" in found:
        each = ratios(found, part)
        scaling = f"{statistics.median(each):.1%} [{min(each):.1%} {max(each):.1%}]"
    return (
        part,
        str(own["devices"]),
        f"{statistics.median(speeds):,.1f} [{min(speeds):,.1f} {max(speeds):,.1f}]",
        f"{1e3 * statistics.median(own['samples']) / record['steps']:.2f}",
        scaling,
        f"{own['compile_s']:.1f}",
        f"{own['state_bytes'] / 1e6:.1f}",
        f"{own['first_loss']:.4f}",
        f"{own['last_loss']:.4f}",
    )


def doubts(found: Record, close: float = CLOSE) -> Iterator[str]:
    """Yield what makes the figures doubtful."""
    for part, own in found.items():
        first, last = own["first_loss"], own["last_loss"]
        if not (math.isfinite(last) and last < first):
            yield f"note: the loss of {part} does not fall: {first} -> {last}"
        if own["skipped"]:
            yield f"note: {part} skipped {own['skipped']} steps"
        if "one" in found and part != "one":
            right = found["one"]["first_loss"]
            if not abs(first - right) <= close * abs(right):
                yield f"note: {part} begins with loss {first}, one device {right}"


def memory_line(record: Record) -> str:
    """Return what the devices of a part say of their memory."""
    text = (
        f"{record['model']} {record['part']}: state {record['state_bytes'] / 1e6:.1f} "
        f"MB a device by plan; temporaries {_megabytes(record['temporary_bytes'])} by "
        "XLA's plan"
    )
    if record["peak_bytes"][0] is None:
        return f"{text}; the devices say nothing of their memory"
    between = _list(record["between_bytes"])
    return (
        f"{text}; in use between steps {between} (batch included), at most "
        f"{_list(record['peak_bytes'])} MB"
    )


def fall_line(one: Record, other: Record) -> str | None:
    """Return by how much sharding lowers what a device holds, beside the plan."""
    if one["between_bytes"][0] is None:
        return None
    measured = [
        a - b for a, b in zip(one["between_bytes"], other["between_bytes"], strict=True)
    ]
    return (
        f"{one['model']}: sharded, a device holds {_list(measured)} MB less, "
        f"{(one['state_bytes'] - other['state_bytes']) / 1e6:.1f} predicted"
    )


def _list(values: Any) -> str:
    return ", ".join(f"{value / 1e6:.1f}" for value in values)


def _megabytes(value: Any) -> str:
    return "unknown" if value is None else f"{value / 1e6:.1f} MB"


def _row(cells: Any, widths: Any) -> str:
    padded = [
        cell.ljust(w) if i == 0 else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
