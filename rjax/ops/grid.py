"""Who does what in a one-dimensional grid of programs.

A range of n elements is split among the programs of a one-dimensional grid: whole
blocks first, then at most one piece of each smaller power of two down to a row of 128
(one element a thread), then the last few elements one by one. Every program reads and
writes exactly its own elements, so nothing outside the range is touched and no mask is
needed; arenas are whole rows, so only other arrays have single elements.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops.mosaic import ROW, program_index


@dataclasses.dataclass(frozen=True)
class Parts:
    """A range of n elements, divided among programs.

    Attributes:
        n: length of the range.
        block: elements of a whole block.
        width: elements of one access; `block`, or a row where starts are unaligned.
    """

    n: int
    block: int
    width: int

    @property
    def blocks(self) -> int:
        """Number of whole blocks."""
        return self.n // self.block

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of each power of two between the blocks and the rest."""
        at, found, length = self.blocks * self.block, [], self.block // 2
        while length >= ROW:
            if at + length <= self.n:
                found.append((at, length))
                at += length
            length //= 2
        return tuple(found)

    @property
    def singles(self) -> int:
        """Number of last elements that fill no row."""
        return self.n % ROW

    @property
    def remainders(self) -> int:
        """Number of programs that handle what is left after the blocks."""
        return len(self.pieces) + self.singles


def split(n: int, block: int, *starts: int, width: int | None = None) -> Parts:
    """Divide n elements; `starts` are where the range begins in each array.

    Vector accesses need aligned addresses. A row has one element a thread, which is
    always aligned.

    Args:
        n: length of the range.
        block: elements of a whole block.
        *starts: where the range begins in each array.
        width: elements of one access at most; a narrow one keeps a fold in few
            registers.
    """
    aligned = all(start % ROW == 0 for start in starts)
    return Parts(n, block, min(block, width or block) if aligned else ROW)


def cut(ranges: Iterable[tuple[int, ...]], length: int) -> np.ndarray:
    """Cut ranges into chunks, one a program, each within one range.

    Args:
        ranges: (start, stop, *what the kernel wants to know of the range).
        length: of a chunk, but the last one of a range.

    Returns:
        i32[2 + k, chunks]: start, number of elements, what is known of the range.
    """
    found = [
        (at, min(length, stop - at), *known)
        for start, stop, *known in ranges
        for at in range(start, stop, length)
    ]
    return np.array(found, np.int32).T


Body = Callable[[Any, int], None]
Carry = tuple[jax.Array, ...]


def window(at: Any, length: int) -> Any:
    """Return the index of `length` elements at `at`; a scalar index for one."""
    from jax.experimental import pallas as pl

    return at if length == 1 else pl.ds(at, length)


def _remainder(parts: Parts, program: Any, body: Body) -> None:
    """Call `body(at, length)` on what is left to a program, counted after blocks."""
    from jax.experimental import pallas as pl

    for k, (at, length) in enumerate(parts.pieces):
        pl.when(program == k)(functools.partial(body, at, length))
    first = len(parts.pieces)
    if parts.singles:
        at = parts.n - parts.singles + program - first
        pl.when(program >= first)(lambda: body(at, 1))


def _accesses(at: Any, length: int, width: int) -> Iterator[tuple[Any, int]]:
    """Yield (at, length) of each access that a part is read or written by."""
    width = min(width, length)
    for offset in range(0, length, width):
        yield at + offset, width


def elementwise(parts: Parts, body: Body) -> None:
    """Call `body(at, length)` on every part of a range: a kernel without memory.

    Its grid has `parts.blocks + parts.remainders` programs. `length` is static, `at` a
    traced offset from the start of the range.
    """
    from jax.experimental import pallas as pl

    def run(at: Any, length: int) -> None:
        for access in _accesses(at, length, parts.width):
            body(*access)

    i = program_index()
    if parts.blocks:
        pl.when(i < parts.blocks)(lambda: run(i * parts.block, parts.block))
    _remainder(parts, i - parts.blocks, run)


def reduction(
    parts: Parts,
    programs: int,
    start: Callable[[tuple[int, ...]], Carry],
    step: Callable[[Any, int, Carry], Carry],
    finish: Callable[[jax.Array, Carry], None],
) -> None:
    """Fold every part of a range, in a fixed order: a kernel that keeps sums.

    Its grid has `programs + parts.remainders` programs. The first of them stride over
    the whole blocks, the others fold one remaining part each.

    Args:
        parts: the range.
        programs: how many share the whole blocks; none if there are none.
        start: from the shape of an access to what a fold starts with.
        step: from offset, length and what was folded to what is folded now.
        finish: gets the index of the program and what it folded, and writes it.
    """
    from jax.experimental import pallas as pl

    i = program_index()

    def fold(at: Any, length: int, carry: Carry) -> Carry:
        for access in _accesses(at, length, parts.width):
            carry = step(*access, carry)
        return carry

    def strided() -> None:
        count = lax.div(parts.blocks - i + (programs - 1), programs)
        block = lambda j: (i + j * programs) * parts.block  # noqa: E731
        carry = start((parts.width,))
        again = lambda j, carry: fold(block(j), parts.block, carry)  # noqa: E731
        finish(i, lax.fori_loop(0, count, again, carry))

    def rest(at: Any, length: int) -> None:
        shape = () if length == 1 else (min(length, parts.width),)
        finish(i, fold(at, length, start(shape)))

    if programs:
        pl.when(i < programs)(strided)
    _remainder(parts, i - programs, rest)


def chunk(
    size: jax.Array,
    block: int,
    width: int,
    start: Callable[[tuple[int, ...]], Any],
    step: Callable[[Any, int, Any], Any],
) -> tuple[Any, Any]:
    """Fold a chunk from :func:`cut` in a fixed order: whole blocks, then rows.

    Args:
        size: i32[], elements of the chunk; of the last row all 128 are visited.
        block: elements that one iteration visits.
        width: elements of one access.
        start: from the shape of an access to what a fold starts with.
        step: from offset in the chunk, length and what was folded to what is folded
            now; `length` is 128 in rows.

    Returns:
        What accesses of blocks have folded, and what rows have.
    """
    width = min(width, block)
    blocks = lax.div(size, jnp.int32(block))
    rows = lax.div(size - blocks * block + (ROW - 1), jnp.int32(ROW))

    def whole(j: Any, carry: Any) -> Any:
        for at, length in _accesses(j * block, block, width):
            carry = step(at, length, carry)
        return carry

    def row(j: Any, carry: Any) -> Any:
        return step(blocks * block + j * ROW, ROW, carry)

    return (
        lax.fori_loop(0, blocks, whole, start((width,))),
        lax.fori_loop(0, rows, row, start((ROW,))),
    )
