"""Record what a run does, bit by bit, and say where two runs part."""

from rjax.repro.comparing import compare
from rjax.repro.comparison import Comparison, Tolerance
from rjax.repro.determinism import deterministic
from rjax.repro.errors import RecordError
from rjax.repro.recording import Recording, record
from rjax.repro.tensors import Tensor, digest, tensors

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
    "tensors",
]
