"""Orbax as it is used here: by one process, and without its log."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import jax

_LOGGERS = ("absl", "asyncio")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep Orbax from printing tracebacks of its threads beside what it raises.

    Of several arrays that cannot be written or read it raises for one, and closes the
    loop that the others still report to: after a failure their complaints stay unheard,
    as they may come at any later time.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    former = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            former(found)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = hook
    try:
        yield
        sys.unraisablehook = former
    except BaseException:
        logging.getLogger("asyncio").addFilter(_of_others)
        raise
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _of_others(record: logging.LogRecord) -> bool:
    """Whether a complaint of asyncio's is not that of an array left unawaited."""
    return "OCDBT" not in record.getMessage()


def alone_in_orbax() -> dict[str, Any]:
    """Return the options by which Orbax waits for no other process, if there are any.

    What it is given are arrays of this host.
    """
    if jax.process_count() == 1:
        return {}
    import orbax.checkpoint as ocp

    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"rjax{me}"
    )
    return {"multiprocessing_options": options}
