"""Matrix multiply with a bias, whose weight gradient comes out in float32."""

from rjax.ops.dense.api import dense as dense
from rjax.ops.dense.taps import Taps as Taps
from rjax.ops.dense.taps import float32_weight_gradients as float32_weight_gradients
