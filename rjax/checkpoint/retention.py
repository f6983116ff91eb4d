"""Which checkpoints stay: a matter of steps and metrics, never of clocks."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

Mode = Literal["max", "min"]


def best_of(metrics: Mapping[int, float | None], mode: Mode) -> int | None:
    """Return the step with the best value, the earliest of several.

    `None` stands for a value that was not finite: any other one is better.

    Example:
        >>> best_of({10: 0.5, 20: None, 30: 0.9, 40: 0.9}, "max")
        30
    """
    sign = -1.0 if mode == "max" else 1.0

    def rank(step: int) -> tuple[float, int]:
        value = metrics[step]
        return (math.inf if value is None else sign * value), step

    return min(metrics, key=rank, default=None)


def superfluous(
    known: Sequence[int],
    whole: Sequence[int],
    newest: int,
    keep: int | None,
    best: int | None,
) -> list[int]:
    """Return the steps whose checkpoints go, now that the newest is there.

    Args:
        known: steps of which there is something, in order.
        whole: those that were written to their end.
        newest: the one just written.
        keep: how many of the last ones stay, `None` for all.
        best: one that stays in any case.

    Example:
        >>> superfluous([1, 2, 3, 4, 5, 9], [1, 2, 3, 5, 9], newest=5, keep=2, best=1)
        [2, 4, 9]
    """
    kept = [step for step in whole if step <= newest]
    if keep is not None:
        kept = kept[-keep:]
    return [step for step in known if step not in kept and step != best]
