"""Record what a run does, bit by bit, and say where two runs part."""

from rjax.repro.errors import RecordError
from rjax.repro.record import Recording, record
from rjax.repro.tensors import Tensor, digest, tensors

__all__ = ["RecordError", "Recording", "Tensor", "digest", "record", "tensors"]
