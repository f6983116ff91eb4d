"""How a kernel walks over a channel-last array: in strips of whole columns.

The array is a matrix whose rows are `period` consecutive elements, a whole number of
times all channels. Columns are divided into strips; a program stays in one strip and
goes down its rows, so that each thread sees the same channels at every access and holds
what it knows of them in registers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rjax.ops.mosaic import ROW, program_index


class Columns(NamedTuple):
    """A channel-last array of `rows * strips * width` elements.

    Attributes:
        width: elements of a strip, which one access reads.
        strips: number of strips.
        rows: number of rows.
    """

    width: int
    strips: int
    rows: int

    @property
    def period(self) -> int:
        """Elements of a row, a multiple of the number of channels."""
        return self.width * self.strips


class Shares(NamedTuple):
    """How programs share an array.

    Attributes:
        columns: the array.
        groups: programs that share the rows of one strip.
        unroll: rows that a program reads before it goes on, to keep memory busy.
    """

    columns: Columns
    groups: int
    unroll: int

    @property
    def programs(self) -> int:
        """Size of the grid."""
        return self.groups * self.columns.strips


def columns(size: int, channels: int, largest: int = 1024) -> Columns | None:
    """Return how to walk over an array, `None` if strips of whole rows cannot fill it.

    Args:
        size: elements of the array.
        channels: length of its last axis.
        largest: elements of a strip at most, a power of two.

    Example:
        >>> columns(1 << 20, 64), columns(1 << 20, 2048), columns(7, 7)
        (Columns(width=1024, strips=1, rows=1024), Columns(width=1024, strips=2,
        rows=512), None)
    """
    width = largest
    while width >= ROW and size:
        period = math.lcm(width, channels)
        if size % period == 0:
            return Columns(width, period // width, size // period)
        width //= 2
    return None


def share(columns: Columns, programs: int, unroll: int) -> Shares:
    """Divide the rows among about that many programs."""
    groups = max(1, min(columns.rows, programs // columns.strips))
    return Shares(columns, groups, unroll)


def repeated(columns: Columns, *vectors: jax.Array) -> jax.Array:
    """Return `[channels]` vectors, each repeated over a row, one after the other."""
    table = jnp.stack(vectors)
    repeats = columns.period // table.shape[1]
    shape = (len(vectors), repeats, table.shape[1])
    return jnp.broadcast_to(table[:, None], shape).ravel()


class Walk:
    """The way of this program, inside a kernel.

    Attributes:
        count: i32[], rows that it visits, at least one.
    """

    def __init__(self, shares: Shares) -> None:
        (width, strips, rows), groups, unroll = shares
        i = program_index()
        self._start = lax.rem(i, jnp.int32(strips)) * width
        self._group = lax.div(i, jnp.int32(strips))
        self._shares = shares
        self.count = lax.div(rows - self._group + (groups - 1), jnp.int32(groups))

    def vector(self, table: Any, k: int) -> Any:
        """Return the k-th vector of `repeated`, of this strip."""
        columns = self._shares.columns
        return table[_window(k * columns.period + self._start, columns.width)]

    def row(self, j: Any) -> Any:
        """Return where row j of the array lies in this strip."""
        columns = self._shares.columns
        return _window(j * columns.period + self._start, columns.width)

    def mine(self, j: Any) -> Any:
        """Return where row j of those that this program visits lies."""
        return self.row(self._group + j * self._shares.groups)

    def first(self, act: Callable[[Any], None]) -> None:
        """Call `act` with this strip of a row if this is its first program."""
        from jax.experimental import pallas as pl

        pl.when(self._group == 0)(lambda: act(self.row(0)))

    def partial(self, k: int, count: int) -> Any:
        """Return where result k of `count` lies in `[groups, count, period]`."""
        columns = self._shares.columns
        part = (self._group * count + k) * columns.period
        return _window(part + self._start, columns.width)

    def __call__(self, carry: Any, visit: Callable[[list[Any], Any], Any]) -> Any:
        """Go down the rows.

        Args:
            carry: what the walk starts with.
            visit: from the indices of the next accesses in the flat array and the carry
                to the next carry. There are `unroll` indices, and one in the rest.

        Returns:
            The last carry.
        """
        unroll = self._shares.unroll

        def several(j: Any, carry: Any) -> Any:
            return visit([self.mine(j * unroll + k) for k in range(unroll)], carry)

        def one(j: Any, carry: Any) -> Any:
            return visit([self.mine(j)], carry)

        whole = lax.div(self.count, jnp.int32(unroll))
        carry = lax.fori_loop(0, whole, several, carry)
        return lax.fori_loop(whole * unroll, self.count, one, carry)


def _window(at: Any, width: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(at, width)
