"""A comparison as a page: the same words as the text, a table and two pictures."""

import html
from collections.abc import Iterator

from rjax.repro.comparison import Comparison, GradientDifference, StateDifference
from rjax.repro.curves import COLOURS, STYLE, curves, stairs
from rjax.repro.scan import when
from rjax.repro.telling import grouped, headline, sections

# Rows of a table before the rest is counted.
_ROWS = 500
# The names are prefixed: in a notebook a style holds for the whole page.
_STYLE = (
    ".rjax-compare{font:14px/1.5 sans-serif;max-width:60rem}"
    ".rjax-compare h1{font-size:1.3rem;margin:.4rem 0}"
    ".rjax-compare h2{font-size:1rem;margin:1.2rem 0 .3rem}"
    ".rjax-compare pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0;"
    "font:13px/1.5 monospace}"
    ".rjax-compare table{border-collapse:collapse;font-size:13px}"
    ".rjax-compare th,.rjax-compare td{text-align:left;padding:.15rem .9rem .15rem 0;"
    "border-bottom:1px solid #8884;overflow-wrap:anywhere}"
    ".rjax-compare i{display:inline-block;width:1.6em;margin-right:.4em;"
    "vertical-align:middle}"
    f"{STYLE}"
)
_PAGE = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width"><title>{title}</title>'
    "<style>:root{{color-scheme:light dark}}body{{margin:1.5rem}}</style></head>"
    "<body>{body}</body></html>\n"
)


def page(found: Comparison) -> str:
    """Return a comparison as a page that needs nothing from elsewhere."""
    title = html.escape(f"rjax compare: {found.verdict}")
    return _PAGE.format(title=title, body=fragment(found))


def fragment(found: Comparison) -> str:
    """Return a comparison as an element for a page or a notebook."""
    parts = [
        f"<style>{_STYLE}</style><h1>{html.escape(headline(found))}</h1>",
        f"<p>{html.escape(found.reason)}</p>",
        "".join(_runs(found)),
        "".join(_pictures(found)),
    ]
    for title, lines in sections(found):
        body = html.escape("\n".join(lines))
        parts.append(f"<h2>{html.escape(title)}</h2><pre>{body}</pre>")
    tables = [x for x in (found.state, found.gradients) if x is not None]
    parts += map(_tensors, sorted(tables, key=when))
    return f'<div class="rjax-compare">{"".join(parts)}</div>'


def _runs(found: Comparison) -> Iterator[str]:
    """Yield which run is which, in the colours of the curves."""
    for name, track in (("A", found.a), ("B", found.b)):
        height = ".35em" if name == "A" else ".12em"
        key = f'<i style="height:{height};background:{COLOURS[name]}"></i>'
        steps = f"{track.steps:,} steps, {track.digests:,} rows of digests"
        steps += f", {track.gradients:,} of gradients" if track.gradients else ""
        yield f"<div>{key}{name}: {html.escape(track.folder)}, {steps}</div>"


def _pictures(found: Comparison) -> Iterator[str]:
    mark = None if found.first is None else found.first.step
    yield curves("loss", found.a.loss, found.b.loss, mark)
    a, b = (stairs(track.scales, track.last) for track in (found.a, found.b))
    yield curves("loss scale", a, b, mark)


def _tensors(found: StateDifference | GradientDifference) -> str:
    rows = [
        (region, tensor.name, str(list(tensor.shape)), tensor.dtype)
        for region, tensors in grouped(found.tensors).items()
        for tensor in tensors
    ]
    title = f"<h2>{_title(found)}</h2>"
    return title + _table(("Region", "Tensor", "Shape", "dtype"), rows)


def _title(found: StateDifference | GradientDifference) -> str:
    count = f"{len(found.tensors)} of {found.compared}"
    if isinstance(found, StateDifference):
        return f"Tensors that differ after {found.step} steps: {count}"
    return f"Gradients that differ in step {found.step}: {count}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    more = len(rows) - _ROWS
    note = f"<p>... and {more:,} more</p>" if more > 0 else ""
    body = "".join(_row("td", row) for row in rows[:_ROWS])
    head = f"<thead>{_row('th', heads)}</thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>{note}"


def _row(cell: str, texts: tuple[str, ...]) -> str:
    cells = (f"<{cell}>{html.escape(text)}</{cell}>" for text in texts)
    return f"<tr>{''.join(cells)}</tr>"
