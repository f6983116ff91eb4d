"""What pages are made of: the frame, tables, lists; and how they look.

All text and lines take the colour of the page and all fills are translucent or of a
middle tone, so that a light page and a dark one show the same, in a notebook too. The
names of styles are prefixed: in a notebook they hold for the whole page.
"""

import html
from collections.abc import Iterable, Sequence

from rjax.repro.page.charts import STYLE as CHARTS

# Rows of a table before the rest is counted.
ROWS = 500
# Of the colour-blind-safe set of Okabe and Ito, some darkened to carry white text.
STYLE = (
    ".rjax-page{font:15px/1.55 system-ui,sans-serif;max-width:70rem;margin:0 auto}"
    ".rjax-page *{box-sizing:border-box}"
    ".rjax-page h1{font-size:1.35rem;line-height:1.3;margin:.5rem 0 .3rem;"
    "overflow-wrap:anywhere}"
    ".rjax-page h2{font-size:1.05rem;margin:0 0 .5rem}"
    ".rjax-page p{margin:.3rem 0 .6rem;max-width:48rem}"
    ".rjax-page section,.rjax-page details{border:1px solid #8885;border-radius:8px;"
    "padding:.9rem 1.1rem;margin:1rem 0;background:#8881}"
    ".rjax-page summary{cursor:pointer;font-weight:600}"
    ".rjax-page summary+*{margin-top:.7rem}"
    ".rjax-note{opacity:.75;font-size:13px}"
    ".rjax-badge{display:inline-block;padding:.1rem .7rem;border-radius:1rem;"
    "font-weight:600;color:#fff}"
    ".rjax-wide{overflow-x:auto}"
    ".rjax-page table{border-collapse:collapse;font-size:14px;text-align:left;"
    "background:none}"
    ".rjax-page th,.rjax-page td{text-align:left;vertical-align:top;"
    "padding:.25rem 1.1rem .25rem 0;border:0;border-bottom:1px solid #8884;"
    "background:none;overflow-wrap:break-word}"
    ".rjax-page .rjax-long td{overflow-wrap:anywhere;min-width:6rem}"
    ".rjax-page th{font-weight:600}"
    ".rjax-page .rjax-long td:first-child{overflow-wrap:break-word;min-width:8rem}"
    ".rjax-page td.rjax-number,.rjax-page th.rjax-number{text-align:right;"
    "font-variant-numeric:tabular-nums;white-space:nowrap}"
    ".rjax-page pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0;"
    "font:13px/1.55 ui-monospace,monospace;background:none;color:inherit;padding:0}"
    ".rjax-page dt{font-weight:600}.rjax-page dd{margin:0 0 .5rem}"
    ".rjax-grid{display:grid;gap:0 2rem;"
    "grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}"
    f"{CHARTS}"
)
_PAGE = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    '<title>{title}</title><link rel="icon" href="data:,">'
    "<style>:root{{color-scheme:light dark}}body{{margin:1.2rem}}</style></head>"
    "<body>{body}</body></html>\n"
)


def whole(title: str, body: str) -> str:
    """Return a page around an element.

    Args:
        title: as plain text.
        body: as HTML.
    """
    return _PAGE.format(title=html.escape(title), body=body)


def element(parts: Iterable[str]) -> str:
    """Return the element of a page, with all its styles, from its parts."""
    return f'<div class="rjax-page"><style>{STYLE}</style>{"".join(parts)}</div>'


def header(word: str, colour: str, title: str, reason: str) -> str:
    """Return the head of a page: a word on a colour, a title, a sentence."""
    badge = f'<span class="rjax-badge" style="background:{colour}">{word}</span>'
    reason = html.escape(reason)
    return f"<header>{badge}<h1>{html.escape(title)}</h1><p>{reason}</p></header>"


def section(title: str, *body: str) -> str:
    """Return a part with a title, or nothing where it has no body.

    Args:
        title: as plain text.
        body: as HTML.
    """
    inner = "".join(body)
    if not inner:
        return ""
    return f"<section><h2>{html.escape(title)}</h2>{inner}</section>"


def folded(title: str, *body: str) -> str:
    """Return a part that shows its body when its title is clicked."""
    summary = f"<summary>{html.escape(title)}</summary>"
    return f"<details>{summary}{''.join(body)}</details>"


def text(sentence: str, *, small: bool = False) -> str:
    """Return a paragraph of plain text."""
    kind = ' class="rjax-note"' if small else ""
    return f"<p{kind}>{html.escape(sentence)}</p>"


def lines(texts: Iterable[str]) -> str:
    """Return lines of plain text, with the blanks they begin with."""
    return f"<pre>{html.escape(chr(10).join(texts))}</pre>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return words and what they mean, as plain text."""
    body = "".join(
        f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>"
        for word, meaning in pairs
    )
    return f"<dl>{body}</dl>"


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: int | None = None,
    *,
    long: bool = False,
) -> str:
    """Return a table of plain text, nothing where it has no rows.

    Args:
        heads: of the columns.
        rows: of cells; the first 500 are shown and the others counted.
        numbers: the first column of those that are set as numbers, if there are any.
        long: whether cells hold words so long that they must be broken.
    """
    if not rows:
        return ""
    body = "".join(_row("td", row, numbers) for row in rows[:ROWS])
    more = len(rows) - ROWS
    note = text(f"... and {more:,} more") if more > 0 else ""
    head = f"<thead>{_row('th', heads, numbers)}</thead>"
    body = f"<table>{head}<tbody>{body}</tbody></table>"
    kind = "rjax-wide rjax-long" if long else "rjax-wide"
    return f'<div class="{kind}">{body}</div>{note}'


def _row(cell: str, texts: Sequence[str], numbers: int | None) -> str:
    right = len(texts) if numbers is None else numbers
    cells = "".join(
        f"<{cell}{' class=rjax-number' if i >= right else ''}>"
        f"{html.escape(text)}</{cell}>"
        for i, text in enumerate(texts)
    )
    return f"<tr>{cells}</tr>"
