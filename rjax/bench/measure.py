"""Time ops on the device, after a look at their results.

One program runs the op on several distinct arrays, one after the other, and several
such programs are in flight; a sample is the time of all of them, divided. So at tiny
sizes a figure is what one more operation costs inside a jitted step, launch included,
not what a call from Python costs. The variants of an op take turns, sample by sample:
clocks and neighbours change within seconds. All samples are kept, tables show medians.
Every kernel that is timed is first run on arrays of its own and compared with XLA.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rjax.bench.cases import Case
from rjax.bench.programs import Program, Variant, build_all, memory, needed

_SAMPLES, _SECONDS, _IN_FLIGHT = 7, 0.02, 50
_KEPT = 1 << 22  # elements


class BenchError(Exception):
    """Measuring cannot go on; the text says why, in one line."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """What was measured of one variant of one op at one size.

    Attributes:
        op: name of the op.
        n: number of elements.
        implementation: "xla" or "mosaic_gpu".
        block: the kernel's block, `None` if it was not given.
        nbytes: read and written per element.
        samples: seconds per operation.
    """

    op: str
    n: int
    implementation: str
    block: int | None
    nbytes: float
    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    @property
    def bandwidth(self) -> float:
        """Bytes read and written per second."""
        return self.nbytes * self.n / self.seconds


def verify(program: Program, wanted: list[Any]) -> None:
    """Run a program once and compare its results.

    Raises:
        BenchError: if they are further from `wanted` than the case allows.
    """
    found = program.compiled(*program.arguments())
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        if not _floating(a):
            how = "in its bits" if bool(jnp.any(a != b)) else None
        else:
            difference, largest = map(float, _difference(a, b))
            bound = program.case.ulps * float(jnp.finfo(a.dtype).eps) * largest
            how = f"by {difference:.3g} of {largest:.3g}"
            how = None if difference <= bound else how  # a NaN is not
        if how:
            raise BenchError(
                f"{program.case.name}, {size_name(program.n)}, {program.variant}: a "
                f"result differs from XLA's {how}; please report this, with the "
                "device and the version of jax"
            )


@jax.jit
def _difference(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest difference and the largest value of `b`, as f32[]."""
    a, b = (x.astype(jnp.float32) for x in (a, b))
    return jnp.max(jnp.abs(a - b)), jnp.max(jnp.abs(b))


def _floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def time_programs(programs: Sequence[Program]) -> list[tuple[float, ...]]:
    """Return seconds per operation of each program, which take turns."""
    # Making small arrays takes longer than the op, keeping large ones all the memory.
    small = all(program.n <= _KEPT for program in programs)
    kept = [program.arguments() if small else None for program in programs]
    return list(zip(*(_round(programs, kept) for _ in range(_SAMPLES)), strict=True))


def _round(programs: Sequence[Program], kept: list[Any]) -> list[float]:
    """Return one sample of each program, whose arrays are kept or made anew."""
    found = []
    for i, program in enumerate(programs):
        seconds, after = _sample(program, kept[i] or program.arguments())
        kept[i] = after if kept[i] else None
        del after  # large arrays, before the next are made
        found.append(seconds)
    return found


def _sample(program: Program, arguments: Any) -> tuple[float, Any]:
    """Return seconds per operation, after two runs, and the arrays as they are then."""
    firsts, rest = arguments

    def repeat(times: int) -> float:
        nonlocal firsts
        out = None
        start = time.perf_counter()
        for _ in range(times):
            out = program.compiled(firsts, rest)
            if program.case.donated:
                firsts = out
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / times

    repeat(1)
    times = max(1, min(_IN_FLIGHT, math.ceil(_SECONDS / repeat(1))))
    return repeat(times) / program.count, (firsts, rest)


def figures(programs: Sequence[Program]) -> Iterator[Figure]:
    """Verify and time the variants of one op at one size, XLA's first."""
    wanted = None
    for program in programs:
        if program.variant.implementation != "xla":
            wanted = wanted or programs[0].compiled(*programs[0].arguments())
            verify(program, wanted)
    wanted = None  # its memory is needed
    for program, samples in zip(programs, time_programs(programs), strict=True):
        case, variant = program.case, program.variant
        how = variant.implementation, variant.block
        yield Figure(case.name, program.n, *how, case.nbytes, samples)


def sweep(
    cases: Sequence[Case],
    sizes: Sequence[int],
    variants: Callable[[Case, int], Sequence[Variant]],
    say: Callable[[str], None],
) -> Iterator[Iterator[Figure]]:
    """Measure every case at every size: one iterator of figures each.

    Args:
        cases: what to measure.
        sizes: numbers of elements.
        variants: from case and size to how it is run, XLA first.
        say: takes a line about what goes on, or what is left out.
    """
    limit = memory() or math.inf
    for n in sizes:
        jobs = []
        for case in cases:
            if n < case.least:
                say(f"{case.name}, {size_name(n)}: left out, its kernel needs more")
            elif needed(case, n) > limit:
                what = f"{case.name}, {size_name(n)}: left out"
                say(f"{what}, needs {needed(case, n) / 1e9:.1f} GB of memory")
            else:
                jobs += [(case, n, variant) for variant in variants(case, n)]
        say(f"{size_name(n)} elements: compiling {len(jobs)} programs")
        built = build_all(jobs)
        for case in cases:
            mine = [program for program in built if program.case is case]
            if mine:
                yield figures(mine)


def size_name(n: int) -> str:
    """Return a power of two as such.

    Example:
        >>> size_name(1024)
        '2^10'
    """
    return f"2^{n.bit_length() - 1}"
