"""Data parallelism: the train step over the devices of a mesh."""

from rjax.parallel.placement import bytes_per_device as bytes_per_device
from rjax.parallel.placement import gather as gather
from rjax.parallel.placement import replicate as replicate
from rjax.parallel.placement import shard_batch as shard_batch
from rjax.parallel.step import DataParallelStep as DataParallelStep
from rjax.parallel.step import data_parallel as data_parallel
