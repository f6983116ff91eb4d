"""Two runs' losses and loss scales as pictures: inline SVG, nothing from elsewhere.

A is a wide band below the thin line of B, so that where they agree both can be seen.
"""

import math
from collections.abc import Sequence

from rjax.repro.tracks import POINTS

Points = Sequence[tuple[float, float]]

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _TALL = 600, 62, 590, 10, 130, 150
# Larger spans than this are drawn on a logarithmic axis.
_SPAN = 50.0
# Colours that the colour-blind can tell apart (Okabe and Ito), for light and dark.
COLOURS = {"A": "#56b4e9", "B": "#d55e00"}
_STROKES = {"A": 5.0, "B": 1.5}
STYLE = (
    ".rjax-curve{font:11px sans-serif;fill:currentColor;width:100%;max-width:760px;"
    "height:auto;display:block}"
    ".rjax-curve path{fill:none;stroke-linejoin:round}"
    ".rjax-axis{stroke:currentColor;stroke-opacity:.35}"
    ".rjax-mark{stroke:currentColor;stroke-dasharray:3 3}"
)


def stairs(points: Points, last: float) -> list[tuple[float, float]]:
    """Return the corners of values that hold until the next, up to step `last`.

    Example:
        >>> stairs([(0, 8.0), (5, 4.0)], 9)
        [(0, 8.0), (5, 8.0), (5, 4.0), (9, 4.0)]
    """
    if not points:
        return []
    points = points[:: math.ceil(len(points) / (POINTS // 2))]
    ends = [step for step, _ in points[1:]] + [last]
    return [
        corner
        for (step, value), end in zip(points, ends, strict=True)
        for corner in ((step, value), (end, value))
    ]


def curves(title: str, a: Points, b: Points, mark: float | None) -> str:
    """Draw two curves over the steps.

    Args:
        title: what they show.
        a: (step, value) of the first run; what is not finite leaves a hole.
        b: the same of the second run.
        mark: step at which to draw a dashed line.

    Returns:
        An `<svg>` element.
    """
    shown = [(x, y) for x, y in (*a, *b) if math.isfinite(y)]
    if not shown:
        return ""
    steps, values = zip(*shown, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    logarithmic = low > 0 and high / low > _SPAN
    bounds = (math.log(low), math.log(high)) if logarithmic else (low, high)

    def place(step: float, value: float) -> tuple[float, float]:
        value = math.log(value) if logarithmic else value
        x = _LEFT + _share(step, first, last) * (_RIGHT - _LEFT)
        return x, _BOTTOM - _share(value, *bounds) * (_BOTTOM - _TOP)

    body = [
        f'<path class="rjax-axis" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>',
        _text(_LEFT - 4, _TOP + 8, f"{high:.6g}", "end"),
        _text(_LEFT, _BOTTOM + 14, f"step {first:g}", "start"),
        _text(_RIGHT, _BOTTOM + 14, f"{last:g}", "end"),
    ]
    if high > low:
        body.append(_text(_LEFT - 4, _BOTTOM, f"{low:.6g}", "end"))
    for name, points in (("A", a), ("B", b)):
        drawn = _path([place(x, y) if math.isfinite(y) else None for x, y in points])
        stroke = f'stroke="{COLOURS[name]}" stroke-width="{_STROKES[name]:g}"'
        body.append(f'<path d="{drawn}" {stroke}><title>{name}</title></path>')
    if mark is not None and first <= mark <= last:
        x = place(mark, low)[0]
        label = f"<title>first difference: step {mark:g}</title>"
        line = f'd="M{x:.1f} {_TOP}V{_BOTTOM}"'
        body.append(f'<path class="rjax-mark" {line}>{label}</path>')
    words = f"{title}{', logarithmic' if logarithmic else ''}"
    body.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 14, words, "middle"))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="rjax-curve" '
        f'viewBox="0 0 {_WIDTH} {_TALL}" role="img" aria-label="{title} of A and B">'
        f"{''.join(body)}</svg>"
    )


def _share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two others, 1/2 if those are one."""
    # Halved first: the span of two floats may be no float.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.5


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Return a path through points, broken where one is missing."""
    parts, pen = [], False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if pen else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen = point is not None
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'
