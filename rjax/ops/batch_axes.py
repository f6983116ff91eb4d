"""The mesh axes that a batch is split over, for ops that look at all of it.

A loss function is written for a batch and runs, on each of several devices, on a part
of it. Who splits the batch says so here, and batch norms find their axes by it.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_AXES: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "rjax_batch_axes", default=None
)


@contextlib.contextmanager
def batch_split_over(axes: tuple[str, ...] | None) -> Iterator[None]:
    """Say what the batch of everything traced inside is split over; `None`: nothing.

    Example:
      >>> with batch_split_over(("data",)):
      ...     shared_axes(None), shared_axes("other"), shared_axes(())
      (('data',), 'other', None)
    """
    token = _AXES.set(axes)
    try:
        yield
    finally:
        _AXES.reset(token)


def shared_axes(
    axis_name: str | tuple[str, ...] | None,
) -> str | tuple[str, ...] | None:
    """Return the mesh axes over which statistics are shared, `None` for none.

    Args:
      axis_name: what the caller asks for: axes by name, `()` for none; `None` takes
        those that the batch is split over.
    """
    return _AXES.get() if axis_name is None else axis_name or None
