"""Data sets in memory, and batches as pure functions of seed and step."""

from rjax.data.batches import batch_at as batch_at
from rjax.data.batches import batch_indices as batch_indices
from rjax.data.batches import evaluation_batches as evaluation_batches
from rjax.data.batches import steps_per_epoch as steps_per_epoch
from rjax.data.dataset import Dataset as Dataset
from rjax.data.digits import load_digits as load_digits
