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

__all__ = [
    "Comparison",
    "RecordError",
    "Recording",
    "Tensor",
    "Tolerance",
    "compare",
    "deterministic",
    "digest",
    "record",
    "scanned_digest",
    "tensors",
]

# Loaded where they are used: `import rjax` stays light.
_LATE = {"compare": "comparing", "Comparison": "comparison", "Tolerance": "comparison"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LATE[name]}")
    return getattr(module, name)
