"""Convolutions that give statistics of their result and norm their input themselves."""

from rjax.ops.conv_bn_relu.api import conv_bn_relu as conv_bn_relu
from rjax.ops.conv_bn_relu.api import conv_bn_relu_inference as conv_bn_relu_inference
from rjax.ops.conv_bn_relu.api import normalize as normalize
from rjax.ops.conv_bn_relu.norm import Norm as Norm
from rjax.ops.conv_bn_relu.norm import norm_of as norm_of
