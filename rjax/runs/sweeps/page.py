"""A sweep as a page, for readers who know neither it nor rjax."""

import html
import math
import shlex
from collections.abc import Iterator, Sequence

from rjax.repro.page import parts
from rjax.repro.page.charts import Line, Points, chart, stairs
from rjax.runs.sweeps.outcome import Setting, Sweep
from rjax.runs.sweeps.telling import bits as same_bits
from rjax.runs.sweeps.telling import compared, headline, mixed

# Okabe and Ito; the values of the first axis have a colour each, those of the others a
# dash.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c",
)  # fmt: skip
_DASHES = "", "7 4", "2 3", "10 3 2 3"
_FINISHED, _FAILED = "#00785a", "#b04a00"
STYLE = (
    ".rjax-dots{display:grid;gap:.1rem .8rem;align-items:center;font-size:13px;"
    "grid-template-columns:fit-content(40%) minmax(0,1fr)}"
    ".rjax-dots>span{overflow-wrap:anywhere}"
    ".rjax-dots>div{position:relative;height:1.3rem;border-bottom:1px solid #8884;"
    "margin:0 .5rem}"
    ".rjax-dots i{position:absolute;top:50%;border-radius:50%;width:11px;height:11px;"
    "margin:-5.5px;opacity:.75}"
    ".rjax-dots u{position:absolute;top:10%;height:80%;width:3px;margin-left:-1.5px;"
    "background:currentColor}"
    ".rjax-dots>div.rjax-ends{height:auto;border:0}"
    ".rjax-sample{width:30px;height:6px;margin-right:.4em;vertical-align:middle}"
)
_AXES = {
    "precision": (
        "The number format in which the model computes forward and backward. The "
        "weights that are trained, the masters, are float32 with all three. "
        "fp32: float32, 24 bits of precision. bf16: bfloat16, the range of float32 "
        "with 8 bits of precision. fp16: float16, 11 bits of precision and a narrow "
        "range: above 65504 a number is infinite, so small gradients are scaled up."
    ),
    "rule": (
        "How the loss scale moves: the factor that lifts gradients into the range of "
        "the number format, and is divided out before the weights move. halving: "
        "halved after a step whose gradient overflowed, never raised. static: never "
        "changed. dynamic: halved likewise, doubled after many clean steps. off: 1."
    ),
    "deterministic": (
        "Whether XLA must choose the same kernels every time, so that a second run "
        "gives the same bits on a GPU too."
    ),
    "implementation": (
        "What computes the operations over all weights at once, such as the update: "
        "xla, the compiler of JAX, or mosaic_gpu, rjax's kernels for NVIDIA GPUs. They "
        "sum in an order of their own, so that last places may differ."
    ),
    "devices": "How many devices share each batch.",
    "python": "The interpreter, with the versions of JAX installed for it.",
}
_AXES["scaling"] = _AXES["rule"]
_WORDS = (
    ("seed", "The number from which the first weights, the order of the images and the "
     "dropout are drawn. Runs of one setting differ by nothing else, so their spread "
     "shows how much chance there is in a single run."),
    ("test loss, test accuracy", "Of the trained float32 weights, on images that were "
     "not trained on. Lower loss and higher accuracy are better."),
    ("±", "The sample standard deviation over the seeds. Two settings whose means lie "
     "closer than that are not told apart by so few runs."),
    ("skipped", "Steps that changed nothing, because a gradient was infinite or no "
     "number at this loss scale. A few at the start of fp16 are the rule at work."),
    ("images/s", "Images that were trained on per second in the last epoch, without "
     "compilation. Only runs of one machine, one at a time, can be compared in it."),
    ("bits", "Settings with the same letter have weights that are equal in every bit, "
     "for every seed, when they were last digested. Another letter means that at least "
     "one bit differs."),
)  # fmt: skip


def page(found: Sweep) -> str:
    """Return a sweep as a page that needs nothing from elsewhere."""
    return parts.whole(f"rjax sweep: {headline(found)}", fragment(found))


def fragment(found: Sweep) -> str:
    """Return a sweep as an element for a page or a notebook."""
    word, colour = ("finished", _FINISHED)
    if found.failed:
        word, colour = f"{len(found.failed)} failed", _FAILED
    said = compared(found) or "One run of each setting: chance is not told from effect."
    heads, rows = found.table()
    numbers = len(found.axes) or 1
    return parts.element(
        (
            f"<style>{STYLE}</style>",
            parts.header(word, colour, headline(found), said),
            parts.section("What was varied", _varied(found)),
            parts.section(
                "What came out",
                parts.table(heads, rows, numbers),
                parts.text(_below(found), small=True),
            ),
            parts.section("Accuracy, one dot a seed", _dots(found, "accuracy", 100.0)),
            parts.section("Over the steps", *_curves(found)),
            parts.section("Same bits", _bits(found)),
            parts.section("Runs that failed", _failed(found)),
            parts.section("How to run it again", _command(found)),
            parts.folded("What the words mean", parts.definitions(_WORDS)),
        )
    )


def _varied(found: Sweep) -> str:
    said = parts.text(
        "The same training was run once for every combination of these, and for each "
        f"with the seeds {', '.join(map(str, found.seeds))}; all else is equal."
    )
    values: dict[str, list[str]] = {}
    for setting in found.settings:
        for name, value in setting.choice.values:
            if value not in values.setdefault(name, []):
                values[name].append(value)
    pairs = [
        (f"{name}: {', '.join(these)}", _AXES.get(name, f"The option --{name}."))
        for name, these in values.items()
    ]
    return said + parts.definitions(pairs)


def _below(found: Sweep) -> str:
    means = "Means over the seeds ± their standard deviation. " * (len(found.seeds) > 1)
    return f"{means}What each column means stands at the end of this page."


def _dots(found: Sweep, of: str, factor: float) -> str:
    """Draw a number of every run on one axis, and the mean of each setting."""
    shown = [setting for setting in found.settings if setting.runs]
    values = [factor * x for s in shown for x in s.values(of) if math.isfinite(x)]
    if not values:
        return ""
    low, high = min(values), max(values)

    def place(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.5
        return f"left:{100 * share:.2f}%"

    body = []
    for setting in shown:
        colour, _ = _look(found, setting)
        marks = "".join(
            f'<i style="{place(factor * x)};background:{colour}" '
            f'title="seed {run.seed}: {factor * x:.2f}"></i>'
            for run, x in zip(setting.runs, setting.values(of), strict=True)
            if math.isfinite(x)
        )
        mean = factor * setting.mean(of)
        if math.isfinite(mean):
            marks += f'<u style="{place(mean)}" title="mean: {mean:.2f}"></u>'
        body.append(f"<span>{html.escape(setting.name)}</span><div>{marks}</div>")
    ends = dict.fromkeys((f"{low:.2f} %", f"{high:.2f} %"))
    axis = "".join(f"<span>{end}</span>" for end in ends)
    body.append(f'<span></span><div class="rjax-ends">{axis}</div>')
    note = parts.text("The bar is the mean of its row; further right is better.",
                      small=True)  # fmt: skip
    return f'{note}<div class="rjax-dots">{"".join(body)}</div>'


def _curves(found: Sweep) -> Iterator[str]:
    shown = [setting for setting in found.settings if setting.runs]
    # Each a little thinner than the one before, so that equal ones can be seen.
    widths = [2.0 + 1.2 * (len(shown) - 1 - i) for i in range(len(shown))]
    each = [*zip(shown, widths, strict=True)]
    courses = [_line(found, s, _course(s), width) for s, width in each]
    scales = [_line(found, s, _scales(s), width) for s, width in each]
    drawn = [
        chart("loss of the evaluations, mean over the seeds", courses),
        chart(f"loss scale, seed {found.seeds[0]}", scales),
    ]
    if not any(drawn):
        return
    yield parts.text(
        "Where curves are equal, the wider ones lie below the thinner.", small=True
    )
    yield f'<div class="rjax-grid">{"".join(drawn)}</div>'
    yield _legend(found, shown)


def _line(found: Sweep, setting: Setting, points: Points, width: float) -> Line:
    colour, dash = _look(found, setting)
    return Line(setting.name, points, colour, width, dash)


def _legend(found: Sweep, shown: Sequence[Setting]) -> str:
    """Explain colours, and dashes by drawing them."""
    entries = []
    for setting in shown:
        colour, dash = _look(found, setting)
        entries.append(
            '<span><svg class="rjax-sample" viewBox="0 0 30 6">'
            f'<path d="M0 3H30" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash or "none"}"/></svg>'
            f"{html.escape(setting.name)}</span>"
        )
    return f'<div class="rjax-key">{"".join(entries)}</div>'


def _look(found: Sweep, setting: Setting) -> tuple[str, str]:
    """Return colour and dash of a setting: by its first value, and by the others."""
    first = [s.choice.values[:1] for s in found.settings]
    rest = [s.choice.values[1:] for s in found.settings]
    colour = [*dict.fromkeys(first)].index(setting.choice.values[:1])
    dash = [*dict.fromkeys(rest)].index(setting.choice.values[1:])
    return _COLOURS[colour % len(_COLOURS)], _DASHES[dash % len(_DASHES)]


def _course(setting: Setting) -> list[tuple[float, float]]:
    """Return the mean over the seeds of the evaluations that all of them have."""
    courses = [dict(run.course) for run in setting.runs]
    steps = sorted(set.intersection(*(set(course) for course in courses)))
    return [(s, sum(c[s] for c in courses) / len(courses)) for s in steps]


def _scales(setting: Setting) -> Points:
    run = setting.runs[0]
    return stairs(run.scales, max(run.steps - 1, 0))


def _bits(found: Sweep) -> str:
    rows = [
        (
            setting.name,
            setting.bits or "-",
            "not known" if setting.agrees is None else f"{setting.agrees}",
        )
        for setting in found.settings
    ]
    if not found.classes:
        return ""
    first = found.settings[0].name
    heads = "setting", "bits", f"steps with the masters of {first}"
    said = (
        "The masters were digested every few steps: equal digests stand for equal bits."
        f" The last column is of seed {found.seeds[0]}."
    )
    sentences = "".join(map(parts.text, same_bits(found)))
    return parts.text(said) + sentences + parts.table(heads, rows)


def _failed(found: Sweep) -> str:
    rows = [(x.choice.name, str(x.seed), x.error) for x in found.failed]
    return parts.table(("setting", "seed", "what it said"), rows)


def _command(found: Sweep) -> str:
    runs = [run for setting in found.settings for run in setting.runs]
    said = [f"All runs share: {shlex.join(found.command)}"]
    if runs:
        versions = ", ".join(f"{k} {v}" for k, v in runs[0].versions.items())
        said += [f"Versions: {versions}", f"Device: {runs[0].device}"]
    if warning := mixed(found):
        said.append(warning)
    return parts.lines(said)
