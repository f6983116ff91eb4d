"""Operations over arenas and tensors, one folder each.

`api.py` validates, documents and chooses; `base.py` is plain jnp: reference, fallback
and documentation at once. Nothing here knows plans or states.
"""

from rjax.ops.batch_norm import batch_norm, batch_norm_inference
from rjax.ops.cast import cast
from rjax.ops.check_finite import check_finite
from rjax.ops.conv_bn_relu import (
    Norm,
    conv_bn_relu,
    conv_bn_relu_inference,
    norm_of,
    normalize,
)
from rjax.ops.dense import dense
from rjax.ops.digest import digest, digest_slots
from rjax.ops.ema import ema
from rjax.ops.max_pool import max_pool
from rjax.ops.pointwise_batch_norm import pointwise_batch_norm
from rjax.ops.softmax_cross_entropy import softmax_cross_entropy
from rjax.ops.update import fused_update, unscale, update

__all__ = [
    "Norm",
    "batch_norm",
    "batch_norm_inference",
    "cast",
    "check_finite",
    "conv_bn_relu",
    "conv_bn_relu_inference",
    "dense",
    "digest",
    "digest_slots",
    "ema",
    "fused_update",
    "max_pool",
    "norm_of",
    "normalize",
    "pointwise_batch_norm",
    "softmax_cross_entropy",
    "unscale",
    "update",
]
