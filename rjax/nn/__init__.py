"""Flax Linen modules that compute in the precision of the parameters they are given."""

from rjax.nn.layers import BatchNorm as BatchNorm
from rjax.nn.layers import Conv as Conv
from rjax.nn.layers import ConvBNReLU as ConvBNReLU
from rjax.nn.layers import Dense as Dense
from rjax.nn.models import CNN as CNN
from rjax.nn.models import MLP as MLP
from rjax.nn.resnet import BasicBlock as BasicBlock
from rjax.nn.resnet import ResNet as ResNet
from rjax.nn.resnet50 import BottleneckBlock as BottleneckBlock
from rjax.nn.resnet50 import ResNet50 as ResNet50
from rjax.nn.torchvision import from_torchvision as from_torchvision
from rjax.nn.transformer import LayerNorm as LayerNorm
from rjax.nn.transformer import LoRADense as LoRADense
from rjax.nn.transformer import Transformer as Transformer
from rjax.nn.transformer import TransformerBlock as TransformerBlock
from rjax.nn.transformer import masked_cross_entropy as masked_cross_entropy
from rjax.nn.vgg import VGG16BN as VGG16BN
from rjax.ops.max_pool import Window as Window
