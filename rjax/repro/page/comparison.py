"""A comparison as a page: the verdict, when and where the runs part, and why."""

from collections.abc import Iterator

from rjax.repro.comparison import Comparison, GradientDifference, StateDifference
from rjax.repro.page import parts
from rjax.repro.page.charts import Line, chart, key, stairs
from rjax.repro.page.strips import STYLE, strips
from rjax.repro.scan import when
from rjax.repro.telling import causes_title, grouped, headline, sections
from rjax.repro.timeline import Timeline
from rjax.repro.tracks import Track

# A wide band below a thin line, so that where they agree both can be seen.
COLOURS = {"A": "#56b4e9", "B": "#d55e00"}
_WIDTHS = {"A": 5.0, "B": 1.5}
_VERDICTS = {
    "bit-identical": "#00785a",
    "incomplete": "#666",
    "numerically equivalent": "#8a6100",
    "diverged": "#b04a00",
}
# Columns whose distance is drawn, if they differ.
_APART = {"loss": "#56b4e9", "grad_norm": "#e69f00"}
_WORDS = (
    ("bit-identical", "Every recorded word and every digest that both runs have is the "
     "same. NaN equals NaN of the same bits; -0 is not 0."),
    ("digest", "A fingerprint of all the bits of one tensor, taken on the device. "
     "Equal digests stand for equal bits; one changed bit changes the digest."),
    ("region", "A range of the parameters' memory: W holds the float32 masters, A the "
     "half-precision copies, G gradients, M and V the optimizer's moments, E the "
     "average of the masters."),
    ("ULP", "Floats that lie between two numbers: 1 is the smallest difference that "
     "there can be."),
    ("loss scale", "What the loss is multiplied by, so that half-precision gradients "
     "do not vanish. A step whose gradient is not finite is skipped."),
)  # fmt: skip


def page(found: Comparison) -> str:
    """Return a comparison as a page that needs nothing from elsewhere."""
    return parts.whole(f"rjax compare: {found.verdict}", fragment(found))


def fragment(found: Comparison) -> str:
    """Return a comparison as an element for a page or a notebook."""
    mark = None if found.first is None else float(found.first.step)
    told = dict(sections(found))
    tables = [x for x in (found.state, found.gradients) if x is not None]
    title = headline(found).removeprefix(found.verdict).removeprefix(": ")
    title = title or _agreed(found)
    reasons = causes_title(found)
    return parts.element(
        (
            f"<style>{STYLE}</style>",
            parts.header(found.verdict, _VERDICTS[found.verdict], title, found.reason),
            _runs(found),
            parts.section("Where they agree", _timeline(found, mark)),
            *(
                parts.section(name, parts.lines(told[name]))
                for name in ("Where", "Not the same in both records")
                if name in told
            ),
            parts.section("Over the steps", *_curves(found, mark)),
            parts.section(reasons, _causes(found, told.get(reasons, []))),
            *(
                parts.section(name, parts.lines(told[name]))
                for name in ("Loss scale", "Snapshots")
                if name in told
            ),
            *(_tensors(x) for x in sorted(tables, key=when)),
            parts.folded("What the words mean", parts.definitions(_WORDS)),
        )
    )


def _agreed(found: Comparison) -> str:
    steps = f"{found.compared[0]:,} steps in common"
    return f"no difference in {steps}" if found.compared[0] else "nothing in common"


def _runs(found: Comparison) -> str:
    """Return which run is which."""
    a, b = found.a, found.b
    rows = [
        (name, of(a), of(b))
        for name, of in (
            ("folder", lambda track: track.folder),
            ("steps", _steps),
            ("rows of digests", lambda track: f"{track.digests:,}"),
            ("rows of digests of gradients", lambda track: f"{track.gradients:,}"),
            ("steps skipped", lambda track: _or_none(track.skipped)),
            ("loss", _last_loss),
            ("loss scale at the end", _last_scale),
        )
        if (of(a), of(b)) != ("0", "0")
    ]
    return parts.section("The two runs", parts.table(("", "A", "B"), rows, long=True))


def _steps(track: Track) -> str:
    return f"{track.steps:,} ({track.first} to {track.last})"


def _or_none(number: int | None) -> str:
    return "not recorded" if number is None else f"{number:,}"


def _last_loss(track: Track) -> str:
    if not track.loss:
        return "not recorded"
    step, loss = track.loss[-1]
    return f"{loss:.6g} in step {step}"


def _last_scale(track: Track) -> str:
    return f"{track.scales[-1][1]:g}" if track.scales else "not recorded"


def _timeline(found: Comparison, mark: float | None) -> str:
    a, b = found.a, found.b
    bounds = min(a.first, b.first), max(a.last, b.last)
    drawn = strips(dict(found.timelines), bounds, mark)
    if not drawn:
        return ""
    said = "From left to right the steps, one line for each thing that was recorded."
    more = [x for x in found.timelines.values() if any(n > 1 for n in x.rows)]
    if more:
        rows = max(max(x.rows) for x in more)
        said += f" One place stands for up to {rows:,} rows: it shows the worst."
    return parts.text(said, small=True) + drawn


def _curves(found: Comparison, mark: float | None) -> Iterator[str]:
    a, b = found.a, found.b
    drawn = [
        chart("loss", _both(a.loss, b.loss), mark=mark),
        chart(
            "loss scale",
            _both(stairs(a.scales, a.last), stairs(b.scales, b.last)),
            mark=mark,
        ),
        _apart(found.timelines["steps"], mark),
    ]
    if not any(drawn):
        return
    yield key(
        (COLOURS[name], ".35em" if name == "A" else ".13em", words)
        for name, words in (("A", "A, wide"), ("B", "B, thin"))
    )
    yield f'<div class="rjax-grid">{"".join(drawn)}</div>'


def _both(a: tuple | list, b: tuple | list) -> list[Line]:
    pairs = (("A", a), ("B", b))
    return [Line(name, of, COLOURS[name], _WIDTHS[name]) for name, of in pairs]


def _apart(timeline: Timeline, mark: float | None) -> str:
    """Draw how far the numbers of the steps lie apart."""
    curves = [
        Line(
            strip.name,
            [
                (first, far if far > 0 else float("nan"))
                for (first, _), far in zip(timeline.bounds, strip.largest, strict=True)
            ],
            _APART[strip.name],
        )
        for strip in timeline.strips
        if strip.name in _APART and any(strip.largest)
    ]
    if not curves:
        return ""
    figure = chart("|a - b| / max(|a|, |b|)", curves, mark=mark)
    return f"<div>{figure}{key((c.colour, '.15em', c.name) for c in curves)}</div>"


def _causes(found: Comparison, told: list[str]) -> str:
    """Return the differences of the manifests as a table, and what else is to say."""
    rows = [(cause.name, cause.a, cause.b) for cause in found.causes.found]
    table = parts.table(("In the manifests", "A", "B"), rows, long=True)
    rest = told[len(rows) :]
    return table + (parts.lines(rest) if rest else "")


def _tensors(found: StateDifference | GradientDifference) -> str:
    rows = [
        (region, tensor.name, str(list(tensor.shape)), tensor.dtype)
        for region, tensors in grouped(found.tensors).items()
        for tensor in tensors
    ]
    heads = "Region", "Tensor", "Shape", "dtype"
    return parts.folded(_title(found), parts.table(heads, rows))


def _title(found: StateDifference | GradientDifference) -> str:
    count = f"{len(found.tensors)} of {found.compared}"
    if isinstance(found, StateDifference):
        return f"Tensors that differ after {found.step} steps: {count}"
    return f"Gradients that differ in step {found.step}: {count}"
