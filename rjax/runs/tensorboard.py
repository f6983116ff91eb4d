"""TensorBoard events, through whichever writer is installed."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rjax.runs.errors import UsageError


def find_writer() -> str:
    """Return the writer that is installed, "tensorboardX" or "clu".

    Raises:
        UsageError: if there is neither (clu writes events through TensorFlow only).
    """
    if _imports("tensorboardX"):
        return "tensorboardX"
    if _imports("tensorflow") and _imports("clu.metric_writers"):
        return "clu"
    raise UsageError(
        "--tensorboard needs a writer, and none is installed: "
        "run pip install tensorboardX"
    )


class TensorBoard:
    """Writes scalars to a folder.

    Args:
        folder: where the events go.
        first: step from which on old events count for nothing (tensorboardX).
    """

    def __init__(self, folder: Path, first: int | None = None) -> None:
        if find_writer() == "clu":
            writers = importlib.import_module("clu.metric_writers")
            self._writer = writers.SummaryWriter(str(folder))
            self._write: Any = self._writer.write_scalars
        else:
            how = {} if first is None else {"purge_step": first}
            self._writer = importlib.import_module("tensorboardX").SummaryWriter(
                str(folder), **how
            )
            self._write = self._one_by_one

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` at `step`."""
        self._write(step, values)

    def close(self) -> None:
        """Write what is still held."""
        self._writer.close()

    def _one_by_one(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
