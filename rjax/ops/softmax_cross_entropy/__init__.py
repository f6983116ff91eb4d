"""Softmax cross-entropy with integer labels, in float32."""

from rjax.ops.softmax_cross_entropy.api import (
    softmax_cross_entropy as softmax_cross_entropy,
)
