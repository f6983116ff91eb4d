"""Curves over the steps: inline SVG that stretches, with text beside it that does not.

The plot fills what width there is; its labels are text of the page, of one size on a
wide screen and a narrow one.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Iterable, Sequence

from rjax.repro.tracks import POINTS

Points = Sequence[tuple[float, float]]

# Units of a plot, whatever its size on the screen; a margin keeps wide lines whole.
_WIDTH, _TALL, _MARGIN = 1000.0, 100.0, 4.0
# Larger spans than this are drawn on a logarithmic axis.
_SPAN = 50.0
STYLE = (
    ".rjax-chart{margin:.4rem 0 1.1rem;display:grid;min-width:0;"
    "grid-template-columns:auto minmax(0,1fr);gap:.15rem .5rem;font-size:12px}"
    ".rjax-chart figcaption{grid-column:1/3;font-size:14px;font-weight:600}"
    ".rjax-chart svg{display:block;width:100%;height:9rem;"
    "border-left:1px solid #8889;border-bottom:1px solid #8889}"
    ".rjax-chart path{fill:none;stroke-linejoin:round;"
    "stroke-linecap:round;vector-effect:non-scaling-stroke}"
    ".rjax-ends{display:flex;justify-content:space-between;gap:.6rem}"
    ".rjax-up{flex-direction:column;text-align:right;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}"
    ".rjax-along{grid-column:2}"
    ".rjax-mark{stroke:currentColor;stroke-dasharray:4 4;fill:none;"
    "vector-effect:non-scaling-stroke}"
    ".rjax-key{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;font-size:13px;"
    "margin:.2rem 0}"
    ".rjax-key i{display:inline-block;width:1.5em;margin-right:.4em;"
    "vertical-align:middle;min-height:2px}"
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: shown where a pointer rests on it.
        points: (step, value); what is not finite leaves a hole.
        colour: of CSS.
        width: in pixels.
        dash: lengths of strokes and holes, as SVG has them; none for a whole line.
    """

    name: str
    points: Points
    colour: str
    width: float = 1.5
    dash: str = ""


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


def chart(title: str, curves: Iterable[Line], *, mark: float | None = None) -> str:
    """Draw curves over the steps.

    Args:
        title: what they show, as plain text.
        curves: the later ones above the earlier.
        mark: step at which to draw a dashed line.

    Returns:
        A `<figure>` element; nothing if no value is finite.
    """
    curves = list(curves)
    points = [point for curve in curves for point in curve.points]
    if not any(math.isfinite(value) for _, value in points):
        return ""
    frame = _Frame(points)
    body = "".join(map(frame.draw, curves))
    if mark is not None and frame.first <= mark <= frame.last:
        x = frame.across(mark)
        label = f"<title>first difference: step {mark:g}</title>"
        body += f'<path class="rjax-mark" d="M{x:.1f} 0V{_TALL:g}">{label}</path>'
    name = html.escape(title)
    words = f"{name}, logarithmic" if frame.logarithmic else name
    ends = [f"{x:.6g}" for x in dict.fromkeys((frame.high, frame.low))]
    along = f"step {frame.first:g}", f"{frame.last:g}"
    return (
        f'<figure class="rjax-chart"><figcaption>{words}</figcaption>'
        f'{_ends("rjax-up", ends)}<svg viewBox="0 0 {_WIDTH:g} {_TALL:g}" '
        f'preserveAspectRatio="none" role="img" aria-label="{name}">{body}</svg>'
        f"{_ends('rjax-along', along)}</figure>"
    )


def key(entries: Iterable[tuple[str, str, str]]) -> str:
    """Explain colours.

    Args:
        entries: (colour, height, words) of each, the height as CSS has it.
    """
    body = "".join(
        f'<span><i style="background:{colour};height:{height}"></i>'
        f"{html.escape(words)}</span>"
        for colour, height, words in entries
    )
    return f'<div class="rjax-key">{body}</div>'


class _Frame:
    """Where values lie in a plot.

    Args:
        points: all of them; the value of one at least is finite.
    """

    def __init__(self, points: Points) -> None:
        steps = [step for step, _ in points]
        values = [value for _, value in points if math.isfinite(value)]
        self.first, self.last = min(steps), max(steps)
        self.low, self.high = min(values), max(values)
        self.logarithmic = self.low > 0 and self.high / self.low > _SPAN
        self._bounds = self._value(self.low), self._value(self.high)

    def across(self, step: float) -> float:
        """Return the place of a step from the left."""
        return _share(step, self.first, self.last) * _WIDTH

    def draw(self, line: Line) -> str:
        """Return a line, broken where a value is not finite."""
        parts = []
        groups = itertools.groupby(line.points, key=lambda p: math.isfinite(p[1]))
        for points in (list(group) for finite, group in groups if finite):
            places = [f"{self.across(x):.1f} {self._down(y):.1f}" for x, y in points]
            # A line of no length: round ends make it a dot.
            parts.append("M" + "L".join(places) + "h0" * (len(places) == 1))
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        look = f'stroke="{line.colour}" stroke-width="{line.width:g}"{dash}'
        title = f"<title>{html.escape(line.name)}</title>"
        return f'<path d="{"".join(parts)}" {look}>{title}</path>'

    def _down(self, value: float) -> float:
        share = _share(self._value(value), *self._bounds)
        return _TALL - _MARGIN - share * (_TALL - 2 * _MARGIN)

    def _value(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value


def _share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two others, 1/2 if those are one."""
    # Halved first: the span of two floats may be no float.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.5


def _ends(kind: str, texts: Iterable[str]) -> str:
    body = "".join(f"<span>{text}</span>" for text in texts)
    return f'<div class="rjax-ends {kind}">{body}</div>'
