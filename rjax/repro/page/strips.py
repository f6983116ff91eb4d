"""A timeline as a picture: one strip a region, coloured by where two runs agree."""

import html
import itertools
from collections.abc import Iterator

from rjax.repro.page.charts import key
from rjax.repro.timeline import Strip, Timeline

_WIDTH = 1000.0  # units of a strip, whatever its width on the screen
# Equal, some tensors of the group differ, all do: told apart by the colour-blind too.
_COLOURS = "#56b4e9", "#e69f00", "#d55e00"
_WORDS = "equal bits", "some of its tensors differ", "all of it differs"
STYLE = (
    ".rjax-strips{display:grid;gap:2px .7rem;align-items:center;font-size:12px;"
    "grid-template-columns:minmax(0,max-content) minmax(0,1fr)}"
    ".rjax-strips strong{grid-column:1/3;margin-top:.6rem}"
    ".rjax-strips span{overflow-wrap:anywhere;line-height:1.2}"
    ".rjax-strips svg{display:block;width:100%;height:1.05rem}"
    "@media(max-width:600px){.rjax-strips{grid-template-columns:8rem minmax(0,1fr);"
    "font-size:11px}}"
)
_TITLES = {
    "steps": "Numbers of each step",
    "gradients": "Gradients of a step, by their digests",
    "state": "State after a step, by its digests",
}


def strips(
    timelines: dict[str, Timeline], bounds: tuple[int, int], mark: float | None
) -> str:
    """Draw timelines below each other, over one axis of steps.

    Args:
        timelines: by "steps", "gradients" and "state".
        bounds: numbers of the first and the last step of either run.
        mark: step at which to draw a dashed line.

    Returns:
        An element for a page; nothing if there is no row in any timeline.
    """
    body = "".join(
        part
        for name, title in _TITLES.items()
        if name in timelines and timelines[name].bounds
        for part in _group(title, name == "state", timelines[name], bounds, mark)
    )
    if not body:
        return ""
    ends = f"<span>step {bounds[0]}</span><span>{bounds[1]}</span>"
    axis = f'<span></span><div class="rjax-ends">{ends}</div>'
    legend = [
        (colour, ".8em", words) for colour, words in zip(_COLOURS, _WORDS, strict=True)
    ]
    if mark is not None:
        legend.append(("currentColor", "1px", f"dashed: step {mark:g}"))
    return f'{key(legend)}<div class="rjax-strips">{body}{axis}</div>'


def _group(
    title: str,
    after: bool,
    timeline: Timeline,
    bounds: tuple[int, int],
    mark: float | None,
) -> Iterator[str]:
    yield f"<strong>{title}</strong>"
    for strip in timeline.strips:
        yield f"<span>{html.escape(strip.name)}</span>"
        yield _strip(strip, after, timeline, bounds, mark)


def _strip(
    strip: Strip,
    after: bool,
    timeline: Timeline,
    bounds: tuple[int, int],
    mark: float | None,
) -> str:
    first, last = bounds[0], bounds[1] + 1
    scale = _WIDTH / (last - first)
    body = []
    for level, low, high, most in _runs(strip, timeline):
        # The last row holds up to the end, whatever steps are between two rows.
        until = (
            timeline.bounds[high + 1][0] if high + 1 < len(timeline.bounds) else last
        )
        left = (timeline.bounds[low][0] - first) * scale
        # A state after the last step still gets a width that can be seen.
        left = min(left, _WIDTH - 3)
        wide = max((until - first) * scale - left, 3.0)
        said = _said(strip, after, timeline, low, high, most)
        body.append(
            f'<rect x="{left:.1f}" y="0" width="{wide:.1f}" height="10" '
            f'fill="{_COLOURS[level]}"><title>{html.escape(said)}</title></rect>'
        )
    if mark is not None:
        x = (mark - first) * scale
        body.append(f'<path class="rjax-mark" d="M{x:.1f} 0V10"/>')
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(strip.name)}">{"".join(body)}</svg>'
    )


def _runs(strip: Strip, timeline: Timeline) -> Iterator[tuple[int, int, int, int]]:
    """Yield (level, first column, last column, most that differ) of equal colour."""
    levels = [0 if not n else 2 if n == strip.size else 1 for n in strip.differ]
    places = range(len(timeline.bounds))
    for level, group in itertools.groupby(places, key=levels.__getitem__):
        columns = list(group)
        most = max(strip.differ[i] for i in columns)
        yield level, columns[0], columns[-1], most


def _said(
    strip: Strip, after: bool, timeline: Timeline, low: int, high: int, most: int
) -> str:
    """Return what shows where a pointer rests."""
    begin, end = timeline.bounds[low][0], timeline.bounds[high][1]
    span = f"{begin}" if begin == end else f"{begin} to {end}"
    when = f"after {span} steps" if after else f"step {span}"
    if not most:
        return f"{strip.name}, {when}: equal"
    rows = sum(timeline.rows[low : high + 1])
    if strip.size == 1:
        many = "differs" if rows == 1 else f"differs within these {rows} rows"
    else:
        many = f"{'' if rows == 1 else 'up to '}{most} of {strip.size} tensors differ"
    far = max(strip.largest[low : high + 1], default=0.0)
    apart = f", by up to {far:.2g} of the larger" if far else ""
    return f"{strip.name}, {when}: {many}{apart}"
