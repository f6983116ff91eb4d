"""Batch norm of channel-last arrays; adds, clamps and pools in the same pass."""

from rjax.ops.batch_norm.api import batch_norm as batch_norm
from rjax.ops.batch_norm.api import batch_norm_inference as batch_norm_inference
from rjax.ops.batch_norm.running import fold as fold
from rjax.ops.batch_norm.running import running_update as running_update
from rjax.ops.batch_norm.training import values_per_channel as values_per_channel
