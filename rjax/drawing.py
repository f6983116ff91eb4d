"""The layout of a plan as a picture: inline SVG without anything from elsewhere.

One bar per arena, one scale for all of them: an element stands at one place in every
bar, as it has one index in every arena. Text and lines take the colour of the page, so
that light and dark pages do.
"""

import html
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rjax.layout import Slot
from rjax.regions import REGIONS, ROLES, Region, Role

# Units of the view box: pixels on a page of `_WIDTH`, fewer on a narrower one.
_WIDTH, _LEFT, _RIGHT, _WIDEST = 600, 104, 536, 760
_TOP, _STRIP, _PITCH, _TALL, _LINE = 6, 18, 34, 26, 17
_LEAST_PART = 6  # narrower parts are drawn this wide
_LEAST_SLOT = 3  # narrower slots get no boundary
_MOST_SLOTS = 400  # more are not drawn one by one
_CHARACTER = 6.0  # width to reserve for one in the strip

# Eight arenas at the most, by series: their field in the state or in flight.
_FIELDS = {
    "W": "master", "A": "compute", "G": "grads", "G_FP16": "grads_half",
    "M": "mu", "V": "nu", "E": "ema", "E_FP16": "ema_compute",
}  # fmt: skip
# Mid-tones that the colour-blind can tell apart (Okabe and Ito), for light and dark.
_PARTS = {
    Role.BN_BIAS: ("#cc79a7", "norm biases"),
    Role.BN_WEIGHT: ("#56b4e9", "norm scales"),
    Role.FC_BIAS: ("#8c8c8c", "other biases"),
    Role.FC_WEIGHT: ("#009e73", "dense kernels"),
    Role.FIRST_CONV: ("#e69f00", "first conv"),
    Role.DEEP_CONV: ("#0072b2", "other convs"),
}
# The names are prefixed: a style in a page's SVG holds for the whole page.
_STYLE = (
    ".rjax-text{font:12px sans-serif;fill:currentColor}"
    ".rjax-small{font-size:10.5px}"
    ".rjax-edge{stroke:currentColor;stroke-opacity:.5;stroke-width:.75;fill:none;"
    "pointer-events:none}"
    ".rjax-slot{fill:currentColor;fill-opacity:.1}"
    ".rjax-slot:nth-of-type(even){fill-opacity:.2}"
    ".rjax-slot .rjax-text{fill-opacity:1;pointer-events:none}"
    ".rjax-column{fill-opacity:0;pointer-events:none}"
    ".rjax-slot:hover .rjax-column{fill-opacity:.35}"
)

# For a file of its own, which no page gives colours.
_PAGE = (
    "svg{color:#111;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#eee;background:#111}}"
)


class _Arena(NamedTuple):
    """One bar: an arena of the plan and what it holds."""

    field: str
    series: str
    owner: str
    dtype: np.dtype
    regions: tuple[tuple[Region, int, int], ...]  # with bounds, none of them empty
    first: int  # index of its first element in a full-length arena


class _Scale:
    """Element index to place: linear within each of the six parts.

    Attributes:
        widened: whether a part was too narrow to see and is not to scale.
    """

    def __init__(self, plan: Any):
        lengths = dict.fromkeys(ROLES, 0)
        for slot in plan.slots:
            lengths[slot.part] += slot.capacity
        sizes = np.array([n for n in lengths.values() if n], np.float64)
        narrow = np.zeros(len(sizes), bool)
        widths = sizes * 0
        # Widening one part takes from the others, which may make another too narrow.
        while (widths < _LEAST_PART).any():
            room = _RIGHT - _LEFT - _LEAST_PART * narrow.sum()
            shared = room * sizes / sizes[~narrow].sum()
            widths = np.where(narrow, _LEAST_PART, shared)
            narrow |= widths < _LEAST_PART
        self.widened = bool(narrow.any())
        self._indices = np.concatenate([[0], np.cumsum(sizes)])
        self._places = _LEFT + np.concatenate([[0], np.cumsum(widths)])

    def __call__(self, index: int) -> float:
        """Return the place of an element, to a hundredth."""
        return round(float(np.interp(index, self._indices, self._places)), 2)


def svg(plan: Any) -> str:
    """Draw every arena of a plan to one scale.

    The bars are aligned by element index; a bar's height is its bytes per element. A
    part of the arenas that would be too narrow to see is widened in all of them, and
    the picture says so. Names and sizes show on hovering.

    Args:
        plan: from :func:`rjax.make_plan`.

    Returns:
        An `<svg>` element, for a page or as a file of its own.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> plan = rjax.make_plan({"w": jnp.ones((3, 2))}, rjax.Config())
        >>> picture = rjax.drawing.svg(plan)
        >>> picture.count("W_FC_WEIGHT"), picture.count("A_FC_WEIGHT")
        (1, 1)
    """
    arenas, scale = _arenas(plan), _Scale(plan)
    parts = [role for role in ROLES if any(slot.part is role for slot in plan.slots)]
    top = _TOP + _STRIP + 8
    legend = top + _PITCH * len(arenas) + 12
    y = legend + _LINE * math.ceil(len(parts) / 3)
    body = []
    for i, arena in enumerate(arenas):
        body += _bar(plan, arena, scale, top + _PITCH * i)
    body += _legend(parts, legend)
    places = f"Left to right: element 0 to {plan.n:,}, at one place in every arena."
    body.append(_text(0, y, f"{places} Height: bytes per element.", small=True))
    if scale.widened:
        y += _LINE
        note = f"Not to scale: no part is narrower than {_LEAST_PART} px, in any arena."
        body.append(_text(0, y, note, small=True))
    # Last, so that what shows on hovering lies on top.
    body += _strip(plan, scale, legend - 20)
    label = f"Layout of {len(plan.slots)} slots in {len(arenas)} arenas"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {_WIDTH} {y + 10}" role="img" aria-label="{label}" '
        f'style="width:100%;max-width:{_WIDEST}px;height:auto;display:block">'
        f"<style>{_STYLE}</style>{''.join(body)}</svg>"
    )


def page_svg(plan: Any) -> str:
    """Draw a plan as a file of its own: black on a light page, white on a dark one.

    Args:
        plan: from :func:`rjax.make_plan`.

    Returns:
        The picture of :func:`svg` with a colour and a background of its own, which in
        a page are those of the page.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> plan = rjax.make_plan({"w": jnp.ones((3, 2))}, rjax.Config())
        >>> "prefers-color-scheme:dark" in rjax.drawing.page_svg(plan)
        True
    """
    return svg(plan).replace("<style>", f"<style>{_PAGE}", 1)


def readable(nbytes: int) -> str:
    """Return bytes in the unit that suits them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} B"


def _arenas(plan: Any) -> list[_Arena]:
    found = []
    for series, field in _FIELDS.items():
        infos = [i for i in REGIONS.values() if i.series == series and i.role]
        infos = [info for info in infos if info.enabled(plan.gates)]
        if not infos:
            continue
        half = infos[0].storage == "half"
        dtype = np.dtype(plan.half_dtype if half else np.float32)
        bounds = [(info.region, *plan.bounds(info.region)) for info in infos]
        regions = tuple(bound for bound in bounds if bound[1] < bound[2])
        first = plan.bias_like if half else 0
        found.append(_Arena(field, series, infos[0].owner, dtype, regions, first))
    return found


def _strip(plan: Any, scale: _Scale, bottom: float) -> Iterator[str]:
    """Draw the slots, each with a column over all arenas that shows on hovering."""
    yield _text(0, _TOP + 13, "slots")
    if len(plan.slots) > _MOST_SLOTS:
        many = f"{len(plan.slots):,}, too many to draw one by one"
        yield _text(_LEFT, _TOP + 13, many, small=True)
        return
    for slot in plan.slots:
        left, right = scale(slot.offset), scale(slot.offset + slot.capacity)
        inner = f"<title>{_about(plan, slot)}</title>"
        inner += _rect(left, right, _TOP, _STRIP)
        if _CHARACTER * len(slot.path) < right - left - 6:
            inner += _text(left + 3, _TOP + 13, _escaped(slot.path), small=True)
        inner += _rect(left, right, _TOP, bottom - _TOP, 'class="rjax-column"')
        yield f'<g class="rjax-slot">{inner}</g>'


def _bar(plan: Any, arena: _Arena, scale: _Scale, top: float) -> Iterator[str]:
    """Draw an arena: its name, its regions, the boundaries of its slots, its bytes."""
    yield _text(0, top + 11, arena.field)
    yield _text(0, top + 24, f"{arena.series} {arena.dtype.name}", small=True)
    item = arena.dtype.itemsize
    nbytes = sum(stop - start for _, start, stop in arena.regions) * item
    yield _text(_WIDTH, top + 11, readable(nbytes), end=True)
    yield _text(_WIDTH, top + 24, arena.owner, small=True, end=True)
    tall = _TALL * item // 4
    top += (_TALL - tall) / 2
    for region, start, stop in arena.regions:
        left, right = scale(arena.first + start), scale(arena.first + stop)
        role = REGIONS[region].role
        assert role is not None, "an arena holds parameters"
        title = (
            f"{region.name}: elements {start:,} to {stop:,} of {arena.field}, "
            f"{arena.dtype.name}, {(stop - start) * item:,} bytes"
        )
        look = f'class="rjax-region" fill="{_PARTS[role][0]}"'
        yield _rect(left, right, top, tall, look, f"<title>{title}</title>")
    edges = (
        f"M{scale(slot.offset)} {top:g}v{tall}"
        for slot in plan.slots
        if slot.offset > arena.first
        and scale(slot.offset + slot.capacity) - scale(slot.offset) >= _LEAST_SLOT
    )
    yield f'<path class="rjax-edge" d="{"".join(edges)}"/>'


def _legend(parts: list[Role], top: float) -> Iterator[str]:
    """Explain the colours, three a line."""
    for i, role in enumerate(parts):
        left, y = _WIDTH / 3 * (i % 3), top + _LINE * (i // 3)
        colour, words = _PARTS[role]
        yield _rect(left, left + 10, y - 9, 10, f'class="rjax-key" fill="{colour}"')
        yield _text(left + 15, y, f"{role.name} {words}", small=True)


def _about(plan: Any, slot: Slot) -> str:
    """Return what hovering over a slot shows."""
    lines = [
        f"{slot.path} {list(slot.shape)}, {slot.part.name}",
        f"{slot.size:,} of {slot.capacity:,} elements used, from {slot.offset:,}",
        f"float32: {4 * slot.capacity:,} bytes",
    ]
    if slot.half and plan.half_dtype is not None:
        start = slot.offset - plan.bias_like
        name = plan.half_dtype.name
        lines.append(f"{name}: {2 * slot.capacity:,} bytes, from {start:,}")
    return "\n".join(map(_escaped, lines))


def _text(
    x: float, y: float, text: str, *, small: bool = False, end: bool = False
) -> str:
    kind = "rjax-text rjax-small" if small else "rjax-text"
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{anchor}>{text}</text>'


def _rect(
    left: float, right: float, top: float, tall: float, look: str = "", inner: str = ""
) -> str:
    place = f'x="{left:g}" y="{top:g}" width="{right - left:.2f}" height="{tall:g}"'
    return f"<rect {look} {place}>{inner}</rect>"


def _escaped(text: str) -> str:
    """Escape for HTML and for XML, which has no place for control characters."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in text))
