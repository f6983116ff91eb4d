"""The columns of a record: which numbers of a report it holds."""

from typing import Any

import jax
import jax.numpy as jnp

from rjax.report import Report
from rjax.trees import flatten

# Scalars of a report, in the order of their columns; metrics follow.
_COLUMNS = (
    "loss", "scale", "applied", "offender", "grad_norm", "learning_rate", "skipped",
    "consecutive_skips", "bad_stats",
)  # fmt: skip


def numbers(report: Report) -> list[tuple[str, Any]]:
    """Return (column, value) of the numbers of a report, or of stacked ones.

    A metric of any axes of its own, or of more than 32 bits a value, has no column.
    """
    ndim = report.loss.ndim
    metrics = [
        (f"metrics/{path}".rstrip("/"), leaf)
        for path, leaf in flatten(report.metrics)[0]
        if leaf.ndim == ndim
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        and leaf.dtype.itemsize <= 4
    ]
    return [(name, getattr(report, name)) for name in _COLUMNS] + metrics
