"""What the learning check says: numbers in, PASS or FAIL out."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

# Steps in which a skip is the search for a loss scale, and those that make up a mean.
EARLY, LAST = 10, 20
# How far the mean losses may lie apart: a share of float32's, or this much.
CLOSE, CLOSE_BY = 0.02, 0.02
# The mean loss at the end is at most this share of the first.
FALLEN = 0.8


def mean_of_last(losses: list[float]) -> float:
    """Return the mean of the last losses: 20, or half of a short run."""
    return statistics.fmean(losses[-max(1, min(LAST, len(losses) // 2)) :])


def checks(half: Mapping[str, Any], full: Mapping[str, Any]) -> Iterator[tuple]:
    """Yield (passed, what was checked) for a run in half precision and in float32."""
    means = {}
    for run in (half, full):
        name, losses = run["precision"], run["losses"]
        means[name] = mean = mean_of_last(losses)
        yield (
            mean <= FALLEN * losses[0],  # false for a NaN, too
            f"{name} falls: {losses[0]:.4f} first, {losses[-1]:.4f} last, "
            f"{mean:.4f} mean of the last",
        )
        late = [step for step in run["skipped_steps"] if step >= EARLY]
        yield (
            not late,
            f"{name} skips early or never: {len(run['skipped_steps'])} skipped"
            + (f", at steps {run['skipped_steps']}" if run["skipped_steps"] else ""),
        )
        yield (
            math.isfinite(run["eval_loss"]),
            f"{name} evaluates by running statistics: loss {run['eval_loss']:.4f}, "
            f"accuracy {run['eval_accuracy']:.2%}",
        )
    a, b = means.values()
    bound = max(CLOSE * abs(b), CLOSE_BY)
    yield abs(a - b) <= bound, f"means lie {abs(a - b):.4f} apart, at most {bound:.4f}"


def lines(half: Mapping[str, Any], full: Mapping[str, Any]) -> Iterator[str]:
    """Yield the checks as text."""
    for passed, text in checks(half, full):
        yield f"  {'PASS' if passed else 'FAIL'}  {half['model']} {text}"
