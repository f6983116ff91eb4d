"""A 1x1 convolution and its batch norm, whose product is never stored."""

from rjax.ops.pointwise_batch_norm.api import (
    pointwise_batch_norm as pointwise_batch_norm,
)
