"""Checkpoints of the whole training state, and weights on their own.

A checkpoint holds every array of the state bit for bit, what the plan and the
configuration were, and what the loop keeps with it; it can be restored over any number
of devices. Nothing in it is pickled.
"""

from rjax.checkpoint.errors import CheckpointError, DamagedError
from rjax.checkpoint.restoring import Restored, restore
from rjax.checkpoint.saving import Checkpoints, save
from rjax.checkpoint.weights import export_weights, load_weights

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "DamagedError",
    "Restored",
    "export_weights",
    "load_weights",
    "restore",
    "save",
]
