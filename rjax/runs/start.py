"""Where a run begins: with its first step, or where a checkpoint left it."""

import dataclasses
from typing import Any

import rjax


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far, and its state.

    Attributes:
        loss: on the watched set.
        epoch: after which it was seen.
        state: a copy, which no later step takes over.
    """

    loss: float
    epoch: int
    state: rjax.RegionState


@dataclasses.dataclass(frozen=True)
class TakenUp:
    """What a run that goes on has written already.

    Attributes:
        step: how many steps it has taken.
        rows: lines of `metrics.jsonl` of the epoch of the last of them.
        metrics: how many bytes of that file stay; `None` where there is none.
        evaluations: the same of `evaluations.jsonl`.
    """

    step: int
    rows: tuple[dict[str, Any], ...]
    metrics: int | None
    evaluations: int | None


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a loop begins.

    Attributes:
        state: to be given away to the next step.
        step: how many steps it has seen.
        best: the best evaluation until then, with early stopping.
        taken_up: what there is of the run; `None` for a new one.
        ended: whether no step is left to take.
    """

    state: rjax.RegionState
    step: int = 0
    best: Best | None = None
    taken_up: TakenUp | None = None
    ended: bool = False
