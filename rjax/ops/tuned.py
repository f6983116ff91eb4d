"""What was measured on this kind of device: which implementation, which block.

Tables are data, one file a kind of device, written by `rjax bench --tune` and never by
hand. Those that come with rjax lie in `rjax/ops/tuning/`; a table of the user's own, in
the folder that :func:`user_folder` names, goes before it.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

FORMAT = 1
_MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class Choice:
    """One op at one size.

    Attributes:
        n: number of elements.
        xla: seconds that XLA takes, median.
        mosaic_gpu: seconds that the kernel takes at its best block, median.
        block: that block, in elements.
    """

    n: int
    xla: float
    mosaic_gpu: float
    block: int


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What was measured on one kind of device.

    Attributes:
        device: kind of the device, as JAX names it.
        jax: version of JAX that measured, the last one where a table grew.
        choices: by op, ascending in n.
    """

    device: str
    jax: str
    choices: Mapping[str, tuple[Choice, ...]]

    def nearest(self, op: str, n: int) -> Choice | None:
        """Return the choice for the measured size whose ratio to `n` is the least."""
        found = self.choices.get(op, ())
        distance = lambda choice: abs(math.log(choice.n / max(1, n)))  # noqa: E731
        return min(found, key=distance, default=None)


def prefers_kernel(op: str, n: int) -> bool:
    """Whether the kernel was measured to be the faster one, here, near that size.

    Faster by less than can be told apart is not enough: what XLA does can also become
    part of its neighbours.
    """
    choice = _nearest(op, n)
    return choice is not None and choice.mosaic_gpu < (1 - _MARGIN) * choice.xla


def block(op: str, n: int) -> int | None:
    """Return the block measured to be best, here, near that size; `None` if unknown."""
    choice = _nearest(op, n)
    return None if choice is None else choice.block


def _nearest(op: str, n: int) -> Choice | None:
    tuning = here()
    return None if tuning is None else tuning.nearest(op, n)


@functools.cache
def here() -> Tuning | None:
    """Return the table for the first device that JAX sees, `None` if there is none."""
    if jax.default_backend() != "gpu":
        return None
    name = file_name(jax.devices()[0].device_kind)
    for folder in (user_folder(), _shipped_folder()):
        if (folder / name).is_file():
            return read(folder / name)
    return None


def file_name(device_kind: str) -> str:
    """Return the name of the file for a kind of device.

    Example:
        >>> file_name("NVIDIA H200")
        'NVIDIA_H200.json'
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device_kind) + ".json"


def user_folder() -> pathlib.Path:
    """Return the folder of tables of this user: `$XDG_CACHE_HOME/rjax/tuning`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(cache).expanduser() / "rjax" / "tuning"


def _shipped_folder() -> pathlib.Path:
    return pathlib.Path(__file__).parent / "tuning"


def read(path: pathlib.Path) -> Tuning:
    """Read a table.

    Raises:
        ValueError: for a file that `rjax bench --tune` of this version did not write.
    """
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError("another format")
        choices = {
            str(op): tuple(sorted((_choice(row) for row in rows), key=lambda c: c.n))
            for op, rows in found["choices"].items()
        }
        if any(len({c.n for c in row}) < len(row) for row in choices.values()):
            raise ValueError("a size twice")
        return Tuning(str(found["device"]), str(found["jax"]), choices)
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"{path} is no tuning table of this version ({error}); delete it, or write "
            "it again by `rjax bench --tune`."
        ) from None


def _choice(row: Any) -> Choice:
    found = Choice(int(row["n"]), row["xla"], row["mosaic_gpu"], int(row["block"]))
    times = (found.xla, found.mosaic_gpu)
    if (found.n, found.block) != (row["n"], row["block"]):
        raise ValueError(f"{row} has no whole numbers")
    if found.n < 1 or found.block < 1 or not all(0 < t < math.inf for t in times):
        raise ValueError(f"{row} cannot have been measured")
    return found


def write(path: pathlib.Path, tuning: Tuning) -> None:
    """Write a table, whole or not at all."""
    record = {"format": FORMAT, **dataclasses.asdict(tuning)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)
