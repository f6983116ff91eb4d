"""Record what a run does, bit by bit, and say where two runs part."""

import importlib
from typing import TYPE_CHECKING, Any

from rjax.repro.determinism import deterministic
from rjax.repro.errors import RecordError
from rjax.repro.recording import Recording, record
from rjax.repro.scanned import scanned_digest
from rjax.repro.tensors import Tensor, digest, tensors

if TYPE_CHECKING:
    from rjax.repro.comparing import compare
    from rjax.repro.comparison import Comparison, Tolerance
    from rjax.repro.sweeps import Sweep, sweep

__all__ = [
    "Comparison",
    "RecordError",
    "Recording",
    "Sweep",
    "Tensor",
    "Tolerance",
    "compare",
    "deterministic",
    "digest",
    "record",
    "scanned_digest",
    "sweep",
    "tensors",
]

# Loaded where they are used: `import rjax` stays light.
_LATE = {
    "Comparison": "comparison",
    "Sweep": "sweeps",
    "Tolerance": "comparison",
    "compare": "comparing",
    "sweep": "sweeps",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LATE[name]}")
    return getattr(module, name)
