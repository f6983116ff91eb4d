"""Statistics over several devices: their values, and how often devices must wait."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.ops import batch_norm, pointwise_batch_norm
from rjax.ops.batch_norm.moments import merge_devices
from rjax.ops.batch_norm.moments import moments as moments_of

AXIS = "data"
ROOM = sys.modules[merge_devices.__module__]


@pytest.mark.parametrize("gathered", [0, 8])
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1000.0, 1e-2), (-3.0, 0.0)])
def test_parts_of_a_batch_join(
    devices: int,
    gathered: int,
    mean: float,
    spread: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever they exchange; the mean of a part is only as good as its float32."""
    monkeypatch.setattr(ROOM, "_GATHERED", gathered)
    rng = np.random.default_rng(devices)
    rows, channels = 50, 7
    x = mean + spread * rng.normal(size=(devices, rows, channels))
    x = (x + spread * np.arange(devices)[:, None, None]).astype(np.float32)

    def each(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        return merge_devices(*moments_of(part), rows, AXIS)

    found, var = jax.jit(jax.vmap(each, axis_name=AXIS))(x)
    wide = x.astype(np.float64).reshape(-1, channels)
    for got in found:
        np.testing.assert_allclose(got, wide.mean(0), rtol=1e-6, atol=1e-6)
    ulp = np.spacing(np.float32(abs(mean) + spread))
    for got in var:
        np.testing.assert_allclose(
            got, wide.var(0), rtol=2e-5, atol=float(8 * ulp * max(spread, ulp))
        )
    # All have the same, to the bit.
    for same in map(np.asarray, (found, var)):
        np.testing.assert_array_equal(same, np.broadcast_to(same[0], same.shape))


def exchanges(loss, x: jax.Array, scale: jax.Array) -> tuple[int, int]:
    """Return the sums over devices of a forward pass, and of both passes."""
    forward = jax.make_jaxpr(loss, axis_env=[(AXIS, 2)])(x, scale)
    both = jax.make_jaxpr(jax.grad(loss, (0, 1)), axis_env=[(AXIS, 2)])(x, scale)
    first, second = (
        len(re.findall(r"= (?:psum|psum_invariant|all_gather)\w*\[", str(jaxpr)))
        for jaxpr in (forward, both)
    )
    return first, second


@pytest.mark.parametrize(("gathered", "sums"), [(8, 1), (0, 2)])
def test_devices_wait_for_each_other_once_a_pass(
    gathered: int, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each exchange takes as long as it takes to wait, whatever it moves."""
    monkeypatch.setattr(ROOM, "_GATHERED", gathered)
    x, scale, zero = jnp.ones((4, 3)), jnp.ones(3), jnp.zeros(3)

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        return batch_norm(x, scale, zero, axis_name=AXIS)[0].sum()

    assert exchanges(loss, x, scale) == (sums, sums + 1)


@pytest.mark.parametrize(("gathered", "sums"), [(8, 1), (0, 2)])
def test_a_folded_norm_waits_no_more_often(
    gathered: int, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROOM, "_GATHERED", gathered)
    x, kernel = jnp.ones((4, 2, 2, 3)), jnp.ones((3, 5))
    scale, bias = jnp.ones(5), jnp.zeros(5)

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        found = pointwise_batch_norm(x, kernel, scale, bias, axis_name=AXIS)
        return found[0].sum()

    assert exchanges(loss, x, scale) == (sums, sums + 1)
