"""The passes of a pointwise batch norm, by XLA and by kernels, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.range_kernels import implementations, lowers_for_cuda, needs_kernels
from ops.range_kernels import run as run  # a fixture

from rjax.ops import mosaic
from rjax.ops.pointwise_batch_norm import mosaic_gpu, mosaic_products
from rjax.ops.pointwise_batch_norm.training import back, mask, moments, pull


def f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


@implementations
@pytest.mark.parametrize("shape", [(64, 256), (4, 8, 16, 64), (3, 128), (33, 2048)])
@pytest.mark.parametrize("uses", [1, 2])
def test_masked_sums(run, shape, uses):
    rng = np.random.default_rng(uses)
    y, *dys = (
        jnp.asarray(rng.normal(1.0, 1.0, shape), jnp.float16) for _ in range(uses + 1)
    )
    total, dz = run(lambda y, *dys, implementation: mask(dys, y, implementation),
                    y, *dys)  # fmt: skip
    want = np.where(f64(y) > 0, sum(map(f64, dys)), 0.0)
    np.testing.assert_array_equal(f64(dz), want.astype(np.float16))
    sums = want.reshape(-1, shape[-1]).sum(0)
    np.testing.assert_allclose(total, sums, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("shape", [(256, 56, 56, 256), (256, 7, 7, 2048)])
def test_masked_sums_lower_for_cuda(shape):
    image = shape, jnp.float16
    lowers_for_cuda(
        mosaic_gpu.NAME, lambda y, a, b: mosaic_gpu.mask((a, b), y), image, image, image
    )


def drawn(*shapes, dtype=jnp.float16, shift=1.0):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(shift, 1.0, s), dtype) for s in shapes]


@implementations
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (4, 8, 10, 128), (192, 256)])
def test_moments(run, shape, dtype):
    (x,) = drawn(shape, dtype=dtype)
    mean, covariance = run(moments, x)
    rows = f64(x).reshape(-1, shape[-1])
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5, atol=1e-6)
    # Two roundings of values that are five spreads from the shift at most.
    bound = 2 * 5 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(covariance, np.cov(rows.T, bias=True), atol=bound)


@needs_kernels
def test_narrow_tiles_have_the_results_of_wide_ones():
    x, dy, dafter, after = drawn((128, 128), (128, 128), (128, 64), (128, 64))

    def found(block):
        with mosaic.mode("interpret", block):
            moments = jax.jit(mosaic_products.moments)(x)
            return *moments, *jax.jit(mosaic_products.pull)(dy, dafter, after, x)

    for narrow, wide in zip(found(64), found(128), strict=True):
        np.testing.assert_allclose(f64(narrow), f64(wide), rtol=1e-5, atol=1e-5)


@implementations
def test_moments_of_values_far_from_zero(run):
    (x,) = drawn((128, 64), shift=1000.0)
    mean, covariance = run(moments, x)
    np.testing.assert_allclose(mean, f64(x).mean(0), rtol=1e-6)
    np.testing.assert_allclose(covariance, np.cov(f64(x).T, bias=True), atol=1e-2)


@implementations
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 256), (128, 64), (256, 128)])
def test_back(run, inputs, outputs):
    dz, kernel, x, steps = drawn(
        (2, 4, 8, outputs), (inputs, outputs), (2, 4, 8, inputs), (inputs, inputs)
    )
    unit, (bias,) = jnp.float32(2.0**-9), drawn((inputs,), dtype=jnp.float32)
    found = run(back, dz, kernel, x, steps, unit, bias)
    want = f64(dz) @ f64(kernel).T - 2.0**-9 * (f64(x) @ f64(steps)) + f64(bias)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(f64(found), want, rtol=2.0**-10, atol=2.0**-8)


@implementations
@pytest.mark.parametrize(("channels", "features"), [(256, 64), (64, 128), (128, 256)])
def test_pull(run, channels, features):
    dy, dafter, after = drawn((128, channels), (128, features), (channels, features))
    (y,) = drawn((128, channels), shift=0.5)
    y = jnp.maximum(y, 0)
    total, dz = run(pull, dy, dafter, after, y)
    want = np.where(f64(y) > 0, f64(dy) + f64(dafter) @ f64(after).T, 0.0)
    np.testing.assert_allclose(f64(dz), want, rtol=2.0**-9, atol=2.0**-9)
    np.testing.assert_allclose(total, want.sum(0), rtol=1e-3)


@needs_kernels
@pytest.mark.parametrize(
    ("x", "widths", "why"),
    [
        ((64, 64), (), None),
        ((64, 64), (256, 512), None),
        ((65, 64), (), "65 rows do not fill tiles of 64"),
        ((64, 96), (), "96 channels do not fill tiles of 64"),
        ((64, 192), (), "192 channels do not fill tiles of 64 or 128"),
        ((64, 64), (32,), "32 channels do not fill"),
        ((2**16, 64), (2**16,), "2^31 elements or more"),
    ],
)
def test_what_products_serve(x, widths, why):
    found = mosaic_products.why_not(jax.ShapeDtypeStruct(x, jnp.float16), *widths)
    if why is None:
        assert found is None or "Hopper" in found or "NVIDIA GPU" in found
    else:
        assert found is not None and why in found
    wide = jax.ShapeDtypeStruct(x, jnp.float32)
    assert "16 bits" in str(mosaic_products.why_not(wide, *widths))


@needs_kernels
def test_products_lower_for_cuda():
    rows, inputs, outputs = 50176, 256, 1024
    half = lambda *shape: (shape, jnp.float16)  # noqa: E731
    x, y, kernel = half(rows, inputs), half(rows, outputs), half(inputs, outputs)
    square, unit, bias = (
        half(inputs, inputs),
        ((), jnp.float32),
        ((inputs,), jnp.float32),
    )
    lowers_for_cuda(mosaic_products.MOMENTS, mosaic_products.moments, x)
    lowers_for_cuda(
        mosaic_products.BACK, mosaic_products.back, y, kernel, x, square, unit, bias
    )
    lowers_for_cuda(
        mosaic_products.PULL, mosaic_products.pull, y, x, half(outputs, inputs), y
    )
