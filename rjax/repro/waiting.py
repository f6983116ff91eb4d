"""Reports that wait on the device until fetching them costs next to nothing."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from rjax.report import Report

# Reports fetched at once. One transfer costs a step's worth of time, so many share it.
FETCH = 50
# Reports left alone when others must be waited for, so that the device has work.
IN_FLIGHT = 8
# Seconds after which whatever is ready is fetched, for slow steps.
PATIENCE = 1.0


class Waiting:
    """A queue of reports, first in, first out."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._fetched = time.monotonic()

    def add(self, report: Report) -> None:
        """Take the report of a step that may not have run yet."""
        self._reports.append(report)

    def due(self) -> int:
        """Return how many reports to fetch now, most often none.

        Either a full load, of which all but the newest `IN_FLIGHT` may still have to be
        waited for, or after some time those that are ready anyway.
        """
        if len(self._reports) >= FETCH + IN_FLIGHT:
            return FETCH
        if time.monotonic() - self._fetched < PATIENCE:
            return 0
        first = self._reports[:FETCH]
        under_way = (i for i, report in enumerate(first) if not _is_ready(report))
        return next(under_way, len(first))

    def fetch(self, count: int) -> Report:
        """Return the `count` oldest reports on the host, stacked, and forget them.

        Args:
            count: from 1 to `FETCH`.
        """
        oldest = self._reports[:count]
        # Always a full load: one program, whatever the count.
        load = oldest + oldest[-1:] * (FETCH - count)
        stacked = jax.device_get(_stack(load))
        del self._reports[:count]
        self._fetched = time.monotonic()
        return jax.tree.map(lambda leaves: leaves[:count], stacked)

    def __len__(self) -> int:
        return len(self._reports)


def _is_ready(report: Report) -> bool:
    return report.loss.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


@jax.jit
def _stack(reports: list[Report]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)
