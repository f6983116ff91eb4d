"""A sweep in words."""

import math
from collections.abc import Iterator, Sequence

from rjax.runs.sweeps.outcome import Sweep

_PLUS_MINUS = (
    "Means over the seeds ± their sample standard deviation; throughput is that of the "
    "last epoch."
)


def text(found: Sweep) -> str:
    """Return a sweep as lines."""
    heads, rows = found.table()
    lines = [headline(found), "", *_aligned([heads, *rows], len(found.axes) or 1)]
    lines += ["", *(f"{line}" for line in notes(found))]
    lines += [f"{run.choice.name}, seed {run.seed} {run.error}" for run in found.failed]
    return "\n".join(lines)


def headline(found: Sweep) -> str:
    """Return how many runs there are, of what."""
    runs = sum(len(setting.runs) for setting in found.settings)
    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    many = f"{len(found.settings)} settings x {seeds}"
    failed = f", {len(found.failed)} failed" if found.failed else ""
    return f"{many}: {runs} runs finished{failed}"


def notes(found: Sweep) -> Iterator[str]:
    """Yield what the numbers mean, and what to see in them."""
    if len(found.seeds) > 1:
        yield _PLUS_MINUS
    if said := compared(found):
        yield said
    yield from bits(found)
    if said := mixed(found):
        yield said


def compared(found: Sweep) -> str:
    """Return how the differences between settings compare with those between seeds."""
    shown = [setting for setting in found.settings if len(setting.runs) > 1]
    means = [100 * setting.mean("accuracy") for setting in shown]
    spreads = [100 * setting.spread("accuracy") for setting in shown]
    if len(shown) < 2 or not all(map(math.isfinite, means + spreads)):
        return ""
    apart, seeds = max(means) - min(means), max(spreads)
    weighed = (
        "the seed matters as much as the setting, and these runs prefer none"
        if apart <= seeds
        else "some settings differ by more than a change of the seed explains"
    )
    return (
        f"Mean accuracies of the settings lie within {apart:.2f} points of each other; "
        f"seeds of one setting spread by up to {seeds:.2f}: {weighed}."
    )


def bits(found: Sweep) -> Iterator[str]:
    """Yield which settings end with masters of the same bits, when last seen."""
    for letter, members in found.classes.items():
        if len(members) > 1:
            names = "; ".join(setting.name for setting in members)
            yield f"Bits {letter}, equal masters for every seed: {names}."
    if found.classes and all(len(x) == 1 for x in found.classes.values()):
        yield "No two settings end with masters of the same bits."
    runs = [run for setting in found.settings for run in setting.runs if run.masters]
    if early := [run for run in runs if max(run.masters) < run.steps]:
        last, steps = max(early[0].masters), early[0].steps
        yield (
            f"The last digests are those after {last} of {steps} steps: what happened "
            "in the steps after them is not in the letters."
        )


def mixed(found: Sweep) -> str:
    """Return in what the runs differ that was not asked for."""
    runs = [run for setting in found.settings for run in setting.runs]
    versions = {name for run in runs for name in run.versions}
    other = [
        name
        for name in sorted(versions)
        if len({run.versions.get(name) for run in runs}) > 1
    ]
    if not other:
        return ""
    return f"Not all runs have the same version of {', '.join(other)}."


def _aligned(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(cells)
        ).rstrip()
