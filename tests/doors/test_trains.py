"""Networks of three libraries learn in half precision what they learn in float32."""

import pytest
from doors.models import LAST, losses

pytestmark = pytest.mark.standard_promotion  # stock Flax and Optax

# One of each network and of each optimizer; the others take as long each.
QUICK = {("linen", "sgd"), ("nnx", "adamw"), ("transformer", "adamw")}


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [
        pytest.param(n, o, marks=[] if (n, o) in QUICK else [pytest.mark.slow])
        for n in ("linen", "nnx", "transformer")
        for o in ("sgd", "adamw", "optax")
    ],
)
def test_fp16_ends_where_fp32_does(network, optimizer):
    wide, _ = losses(network, optimizer, "fp32")
    half, skipped = losses(network, optimizer, "fp16")
    assert skipped == 0
    end, wanted = half[-LAST:].mean(), wide[-LAST:].mean()
    assert abs(end - wanted) <= max(0.02, 0.02 * wanted)
    assert wanted < 0.9 * wide[0], "nothing was learned, so nothing was compared"
    assert (half != wide).any(), "one of them did not run in its precision"
