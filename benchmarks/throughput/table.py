"""Figures of the contenders, as lines and as a table."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def speeds(record: Record) -> list[float]:
    """Return images a second of every sample."""
    images = record["batch"] * record["steps"]
    return [images / seconds for seconds in record["samples"]]


def line(record: Record) -> str:
    """Return what was found of one contender, in one line."""
    name = f"{record['model']} {record['contender']}"
    if "failed" in record:
        return f"{name}: left out: {record['failed']}"
    found = speeds(record)
    text = (
        f"{name}: {statistics.median(found):,.1f} img/s [{min(found):,.1f} "
        f"{max(found):,.1f}], {milliseconds(record):.2f} ms/step, compile "
        f"{record['compile_s']:.1f} s, loss {record['first_loss']:.4f} -> "
        f"{record['last_loss']:.4f}, scale {record['scale']:g}"
    )
    if record.get("peak_bytes"):
        text += f", peak {record['peak_bytes'] / 1e9:.2f} GB"
    return text


def milliseconds(record: Record) -> float:
    """Return the median time of a step."""
    return 1e3 * statistics.median(record["samples"]) / record["steps"]


def doubts(records: Sequence[Record]) -> Iterator[str]:
    """Yield who is missing, and what makes a comparison doubtful."""
    for record in records:
        if "failed" in record:
            yield f"note: {record['contender']} was left out: {record['failed']}"
    measured = [record for record in records if "failed" not in record]
    for key in ("parameters", "device"):
        found = {r["contender"]: r[key] for r in measured}
        if len(set(found.values())) > 1:
            yield f"note: contenders differ in {key}: {found}"
    for record in measured:
        first, last = record["first_loss"], record["last_loss"]
        if not (math.isfinite(last) and last < first):
            yield f"note: the loss of {record['contender']} does not fall: {last}"


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield a Markdown table, and what is doubtful about it."""
    measured = [record for record in records if "failed" not in record]
    ours = [r for r in measured if r["contender"] == "rjax"]
    header = [
        "contender", "img/s median [min max]", "ms/step", "rjax is", "compile s",
        "peak GB", "first loss", "last loss",
    ]  # fmt: skip
    table = [header] + [_cells(record, ours) for record in measured]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = [_row(cells, widths) for cells in table]
    rule = [
        "-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)
    ]
    yield from [rows[0], f"|{'|'.join(rule)}|", *rows[1:], *doubts(records)]


def _cells(record: Record, ours: Sequence[Record]) -> list[str]:
    found, peak = speeds(record), record.get("peak_bytes")
    ratio = milliseconds(record) / milliseconds(ours[0]) if ours else None
    return [
        record["contender"],
        f"{statistics.median(found):,.1f} [{min(found):,.1f} {max(found):,.1f}]",
        f"{milliseconds(record):.2f}",
        "" if ratio is None or record in ours else f"{ratio:.2f}x",
        f"{record['compile_s']:.1f}",
        f"{peak / 1e9:.2f}" if peak else "",
        f"{record['first_loss']:.4f}",
        f"{record['last_loss']:.4f}",
    ]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(w) if i == 0 else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
