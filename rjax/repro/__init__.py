"""Record what a run does, bit by bit, and say where two runs part."""

import importlib
from typing import TYPE_CHECKING, Any

from rjax.digests import Tensor, digest, tensors
from rjax.repro.beginning import record
from rjax.repro.determinism import deterministic
from rjax.repro.errors import RecordError
from rjax.repro.recording import Recording
from rjax.repro.scanned import scanned_digest

if TYPE_CHECKING:
    from rjax.repro.comparing import compare
    from rjax.repro.comparison import Comparison, Tolerance
    from rjax.runs.sweeps import Sweep, sweep

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

# Loaded where they are used: `import rjax` stays light. Sweeps train, so they live
# above this package; this is their front door, and nothing in here calls them.
_LATE = {
    "Comparison": "rjax.repro.comparison",
    "Sweep": "rjax.runs.sweeps",
    "Tolerance": "rjax.repro.comparison",
    "compare": "rjax.repro.comparing",
    "sweep": "rjax.runs.sweeps",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
