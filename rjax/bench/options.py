"""The options of `rjax bench`, read and checked."""

import dataclasses
from typing import Annotated

import tyro

from rjax.bench.cases import CASES, Case
from rjax.runs.errors import UsageError

LEAST, MOST = 7, 28

_Names = Annotated[str | None, tyro.conf.arg(metavar="NAME,...", help_behavior_hint="")]
_Logs = Annotated[str | None, tyro.conf.arg(metavar="INT,...", help_behavior_hint="")]
_File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
_Switch = Annotated[
    tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")
]


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Measure operations on this machine: XLA beside the GPU kernels.

    Attributes:
        ops: What to measure, all if not given: copy, cast, ema, check_finite, digest,
            digest_slots, fused_update, batch_norm (its passes, of 64 and of 256
            channels), pointwise_batch_norm (its passes, as ResNet has them), or one
            kind, such as digest/16 or fused_update/adam+ema. The copy, x + 1, is the
            yardstick and always measured.
        sizes: Numbers of elements, as logarithms to base 2 from 7 to 28. If not given,
            every other one from 10 to 28, on a CPU to 22.
        tune: Measure the kernels at every block size, and write the table by which
            rjax chooses between XLA and kernel on this kind of device. It takes
            minutes; what was measured before and is not now stays in the table.
        out: With --tune, the file of the table; if not given, the one in your cache
            folder that rjax reads.
        json: Write all samples to this file.
    """

    ops: _Names = None
    sizes: _Logs = None
    tune: _Switch = False
    out: _File = None
    json: _File = None


def chosen_cases(names: str | None) -> list[Case]:
    """Return the cases that `--ops` names, after the copy.

    Example:
        >>> [case.name for case in chosen_cases("digest,ema")]
        ['copy', 'digest/32', 'digest/16', 'ema']

    Raises:
        UsageError: for a name that is none.
    """
    found = {"copy": CASES["copy"]}
    for name in CASES if names is None else map(str.strip, names.split(",")):
        mine = {
            full: case
            for full, case in CASES.items()
            if name in (full, full.partition("/")[0])
        }
        if not mine:
            known = ", ".join(dict.fromkeys(full.partition("/")[0] for full in CASES))
            raise UsageError(
                f"--ops knows no {name!r}: use names from {known}, or one of their "
                "kinds such as fused_update/adam+ema, with commas between"
            )
        found |= mine
    return list(found.values())


def chosen_sizes(logs: str | None, largest: int) -> list[int]:
    """Return the numbers of elements that `--sizes` names, ascending.

    Example:
        >>> chosen_sizes("12,10", largest=28), chosen_sizes(None, largest=12)
        ([1024, 4096], [1024, 4096])

    Raises:
        UsageError: for anything but integers from 7 to 28.
    """
    allowed = [str(log) for log in range(LEAST, MOST + 1)]
    if logs is None:
        return [1 << log for log in range(10, largest + 1, 2)]
    words = {word.strip() for word in logs.split(",")}
    if not words <= set(allowed):
        raise UsageError(
            f"--sizes takes logarithms from {LEAST} to {MOST} with commas between, "
            f"such as 10,20,28, got {logs!r}"
        )
    return [1 << int(log) for log in allowed if log in words]
