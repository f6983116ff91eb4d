"""The plan's regions as rows, as text and as HTML."""

import dataclasses
import html as html_escape
from typing import Any

import jax.numpy as jnp

from rjax import drawing
from rjax.regions import REGIONS, Owner, Region

_FIXED = {
    Region.R_RESULT: 2,
    Region.R_RESULT_ACCUMULATED: 2,
    Region.S_SCALAR_FP32: 2,  # scale, learning rate
    Region.S_SCALAR_FP16: 0,
    Region.S_SCALAR_INT32: 4,  # step, applied, skipped, consecutive skips
    Region.S_SCALAR_INT8: 1,  # the flag
}
_STATISTIC = {
    Region.B_PREV_MEAN: "mean",
    Region.B_PREV_VAR: "var",
    Region.B_NEXT_MEAN: "mean",
    Region.B_NEXT_VAR: "var",
    Region.W_EQ_BIAS: "mean",
    Region.W_EQ_SCALE: "var",
}
_HEADER = ("no", "region", "owner", "dtype", "offset", "elements", "bytes")


@dataclasses.dataclass(frozen=True)
class Row:
    """One enabled region.

    Attributes:
        region: the region; its number is `int(region)`.
        owner: "state", "step", "input", "eval" or "xla".
        dtype: name of the element type, "any" where the batch or XLA decides.
        offset: first element within the arena of its series.
        elements: number of elements, `None` where the plan does not know.
        nbytes: its bytes, `None` where the plan does not know.
    """

    region: Region
    owner: Owner
    dtype: str
    offset: int
    elements: int | None
    nbytes: int | None


def loose_elements(plan: Any, region: Region) -> int | None:
    """Return the elements of a region that holds no parameters, `None` if unknown."""
    if region in _FIXED:
        return _FIXED[region]
    if region in _STATISTIC:
        name = _STATISTIC[region]
        return sum(
            _size(leaf.shape)
            for leaf in plan.batch_stats
            if leaf.path.rpartition("/")[2] == name
        )
    return None


def rows(plan: Any) -> tuple[Row, ...]:
    """Return a :class:`Row` for every enabled region, by number."""
    found = []
    for region, info in REGIONS.items():
        if not info.enabled(plan.gates):
            continue
        dtype = info.storage if info.storage != "half" else plan.half_dtype.name
        start, stop = plan.bounds(region)
        elements: int | None = stop - start
        if info.role is None:
            elements = loose_elements(plan, region)
        nbytes = None
        if elements is not None:
            nbytes = elements * jnp.dtype(dtype).itemsize
        found.append(Row(region, info.owner, dtype, start, elements, nbytes))
    return tuple(found)


def text(plan: Any) -> str:
    """Return the table as aligned text with a summary line."""
    cells = [_HEADER, *(_cells(row) for row in rows(plan))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADER))]
    lines = []
    for line in cells:
        left = [line[i].ljust(widths[i]) for i in (1, 2, 3)]
        right = [line[i].rjust(widths[i]) for i in (4, 5, 6)]
        lines.append("  ".join([line[0].rjust(widths[0]), *left, *right]))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([summary(plan), *lines])


def summary(plan: Any) -> str:
    """Return one line: parameters, precision, optimizer, bytes, fingerprint."""
    parameters = sum(slot.size for slot in plan.slots)
    frozen = sum(_size(leaf.shape) for leaf in plan.frozen)
    aside = f" + {frozen:,} frozen" if frozen else ""
    return (
        f"{parameters:,} parameters in {len(plan.slots)} slots{aside}, "
        f"{plan.config.precision}, {plan.n:,} elements an arena, "
        f"{drawing.readable(plan.nbytes)} planned, layout {plan.fingerprint[:12]}"
    )


def html(plan: Any) -> str:
    """Return the picture and, folded, the table: for a light and a dark page."""
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _HEADER)
    body = []
    found = rows(plan)
    for row in found:
        cells = (
            f"<td style='text-align:{'right' if i in (0, 4, 5, 6) else 'left'}'>"
            f"{html_escape.escape(cell)}</td>"
            for i, cell in enumerate(_cells(row))
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f"<div><p><b>rjax plan</b>: {html_escape.escape(summary(plan))}</p>"
        f"{drawing.svg(plan)}"
        f"<details><summary>{len(found)} regions</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        "</details></div>"
    )


def _cells(row: Row) -> tuple[str, ...]:
    known = row.elements is not None
    return (
        f"{int(row.region):03d}",
        row.region.name,
        row.owner,
        row.dtype,
        f"{row.offset:,}" if known else "-",
        f"{row.elements:,}" if known else "-",
        f"{row.nbytes:,}" if known else "-",
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
