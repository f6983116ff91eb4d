"""A 1x1 convolution and its norm in one, against float64 and against the two."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rjax.ops import batch_norm, pointwise_batch_norm

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
SHAPES = [(2, 1, 1), (1025, 7, 2), (2, 3, 5, 3, 12)]
FLOAT32 = 2.0**-24


class Case(NamedTuple):
    x: jax.Array
    kernel: jax.Array
    scale: jax.Array
    bias: jax.Array
    residual: jax.Array | None
    ct: jax.Array


def f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def make(shape, dtype, residual=False, seed=0, shift=2.0) -> Case:
    """Return arrays for x of `shape[:-1]` and as many outputs as its last entry."""
    rng = np.random.default_rng(seed)

    def normal(*shape, loc=0.0):
        return jnp.asarray(rng.normal(loc, 1.0, shape), jnp.float32)

    *batch, inputs, outputs = shape
    signs = np.where(np.arange(outputs) % 3 == 2, -1.0, 1.0)
    return Case(
        normal(*batch, inputs, loc=shift).astype(dtype),
        normal(inputs, outputs).astype(dtype),
        jnp.asarray(signs * rng.uniform(0.5, 2.0, outputs), jnp.float32),
        normal(outputs),
        normal(*batch, outputs).astype(dtype) if residual else None,
        normal(*batch, outputs).astype(dtype),
    )


class Expected(NamedTuple):
    """In float64, values and how far rounded inputs of a product may move them."""

    values: tuple[np.ndarray, ...]
    bounds: tuple[np.ndarray, ...]


def reference(case: Case, relu: bool, unit: float, eps=1e-5) -> Expected:
    """Return y, mean, var, dx, dkernel, dscale, dbias, and dresidual if there is one.

    Bounds are those of one rounding, by at most `unit` of it, of every factor of every
    product, and of float32 sums of all terms.
    """
    x, kernel, scale, bias = map(f64, case[:4])
    rows, dy = x.reshape(-1, len(kernel)), f64(case.ct).reshape(-1, len(scale))
    n = len(rows)
    unit += 2 * (8 + n**0.5) * FLOAT32
    z = rows @ kernel
    mean, var = z.mean(0), z.var(0)
    istd = 1 / np.sqrt(var + eps)
    xhat = (z - mean) * istd
    y = xhat * scale + bias
    if case.residual is not None:
        y = y + f64(case.residual).reshape(y.shape)
    g = np.where(y > 0, dy, 0.0) if relu else dy
    dbias, dscale = g.sum(0), (g * xhat).sum(0)
    dz = scale * istd * (g - dbias / n - xhat * dscale / n)
    y = np.maximum(y, 0) if relu else y
    large, factor = np.abs(rows) @ np.abs(kernel), np.abs(scale) * istd
    # A variance that is off by so much, relative to itself, moves all that follows.
    off = FLOAT32 * (8 + n**0.5) * (large**2).mean(0) / (var + eps) + unit
    moved = (large + np.abs(mean)) * factor
    bound_y = 2 * unit * (moved + np.abs(y) + np.abs(bias)) + off * np.abs(y)
    size = np.abs(g) + np.abs(dbias / n) + moved * np.abs(dscale / n)
    bound_z = 4 * factor * size * (unit + off)
    values = [y, mean, var, dz @ kernel.T, rows.T @ dz, dscale, dbias, g]
    bounds = [
        bound_y,
        unit * large.max(0),
        off * (var + eps),
        bound_z @ np.abs(kernel).T,
        np.abs(rows).T @ bound_z,
        4 * (unit + off) * (np.abs(g) * moved).sum(0),
        unit * np.abs(g).sum(0),
        unit * np.abs(g),
    ]
    return Expected(tuple(values), tuple(bounds))


def results(case: Case, **options):
    """Return what `reference` does, by one compiled program."""

    @jax.jit
    def run(*arrays):
        def norm(*args):
            *args, residual = args
            return pointwise_batch_norm(*args, residual=residual, **options)

        (y, mean, var), pullback = jax.vjp(norm, *arrays)
        ct = (case.ct, case.ct) if options.get("twice") else case.ct
        found = pullback((ct, mean, var))
        return y, mean, var, *[a for a in found if a is not None]

    return run(*case[:-1])


def near_the_clamp(case: Case, plain: Expected) -> Case:
    """Return the case with no gradient where rounding may decide about the clamp."""
    y, bound = plain.values[0], plain.bounds[0]
    sure = (np.abs(y) > 4 * bound).reshape(case.ct.shape)
    return case._replace(ct=jnp.where(sure, case.ct, 0).astype(case.ct.dtype))


def check(case: Case, relu: bool, **options):
    unit = float(jnp.finfo(case.x.dtype).eps)
    if relu:
        plain = reference(case, False, unit)
        case = near_the_clamp(case, plain)
    want = reference(case, relu, unit)
    found = results(case, relu=relu, **options)
    tiny = float(jnp.finfo(case.x.dtype).smallest_subnormal)
    for got, value, bound in zip(found, want.values, want.bounds, strict=False):
        error = np.abs(f64(got).reshape(value.shape) - value)
        assert (error <= bound + tiny * (1 + np.abs(f64(case.kernel)).sum())).all()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("relu", "residual"), [(False, False), (True, False), (True, True)]
)
def test_value_and_gradients_match_float64(dtype, shape, relu, residual):
    case = make(shape, dtype, residual)
    found = check(case, relu)
    assert [a.dtype for a in found[:5]] == [dtype, "float32", "float32", dtype, dtype]
    assert {a.dtype for a in found[5:7]} == {jnp.dtype("float32")}
    assert len(found) == 7 + residual and all(a.dtype == dtype for a in found[7:])
    assert found[0].shape == case.ct.shape


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(2, 40),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    shift=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_matches_float64(rows, inputs, outputs, shift, seed):
    check(make((rows, inputs, outputs), jnp.float32, True, seed, shift), relu=True)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_it_is_no_less_exact_than_the_two_ops(dtype):
    case = make((4, 9, 9, 8, 32), dtype)

    def two(x, kernel, scale, bias):
        return batch_norm(jnp.matmul(x, kernel), scale, bias)[0]

    y, pullback = jax.vjp(jax.jit(two), *case[:4])
    want = reference(case, False, 0.0).values
    rows = [(results(case)[i], theirs) for i, theirs in
            zip((0, 3, 4, 5, 6), (y, *pullback(case.ct)), strict=True)]  # fmt: skip
    for value, (ours, theirs) in zip((want[0], *want[3:7]), rows, strict=True):
        size = np.linalg.norm(value)
        off, known = (
            np.linalg.norm(f64(a).reshape(value.shape) - value) / size
            for a in (ours, theirs)
        )
        assert off <= 2 * known + 2e-6


def test_variance_survives_a_mean_far_above_it():
    first = jnp.arange(802816) % 2 == 0
    x = jnp.where(first, 1000.5, 1001.5).astype(jnp.float16)[:, None]
    one, zero = jnp.ones(1), jnp.zeros(1)
    run = jax.jit(pointwise_batch_norm)
    y, mean, var = run(x, jnp.ones((1, 1), jnp.float16), one, zero)
    np.testing.assert_allclose(mean, 1001.0, rtol=1e-7)
    np.testing.assert_allclose(var, 0.25, rtol=1e-5)
    if jax.default_backend() != "gpu":  # where the folded bias is rounded too
        np.testing.assert_allclose(np.unique(y), [-1.0, 1.0], rtol=1e-3)


def test_small_gradients_keep_their_correction():
    """The matrix that multiplies x on the way back may be below half precision."""
    case = make((4096, 32, 64), jnp.float16, shift=0.0)
    kernel = (f64(case.kernel) / 8).astype(np.float16)
    z = f64(case.x) @ kernel  # what the gradient has in common with z is taken out

    def error(unit):
        ct = ((z + f64(case.ct) / 10) * unit).astype(np.float16)
        now = case._replace(kernel=jnp.asarray(kernel), ct=jnp.asarray(ct))
        exact = reference(now, False, 0.0).values[3]
        return np.linalg.norm(f64(results(now)[3]) - exact) / np.linalg.norm(exact)

    assert error(2.0**-14) < 2 * error(1.0)  # 5 times, if the matrix is just rounded


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_bad_input_shows_in_everything(bad):
    x = jnp.array([[bad], [1.0], [2.0]])
    kernel = jnp.ones((1, 2))
    for out in pointwise_batch_norm(x, kernel, jnp.ones(2), jnp.zeros(2), relu=True):
        assert not np.isfinite(out).all()


def test_a_pair_adds_the_gradients_of_its_uses():
    case = make((6, 7, 8), jnp.float16, residual=True)
    twice = results(case, relu=True, twice=True)
    assert twice[0][0] is not None and len(twice[0]) == 2
    double = case._replace(ct=2 * case.ct)
    once = results(double, relu=True)
    for a, b in zip(twice[3:], once[3:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(33, 5, 6, 4), (2, 3, 5, 3, 12, 2)])
def test_a_convolution_after_it(shape):
    *shape, features = shape
    case = make(tuple(shape), jnp.float32, residual=True)
    rng = np.random.default_rng(1)
    after = jnp.asarray(rng.normal(size=(shape[-1], features)), jnp.float32)
    ct = jnp.asarray(rng.normal(size=(*case.ct.shape[:-1], features)), jnp.float32)

    def run(together, *arrays):
        *args, residual, after = arrays
        norm = functools.partial(pointwise_batch_norm, *args, relu=True)
        if together:
            return norm(residual=residual, after=after)[0]
        y = norm(residual=residual)[0]
        return y, jnp.matmul(y, after)

    found, want = (
        jax.vjp(functools.partial(run, together), *case[:-1], after)
        for together in (True, False)
    )
    for a, b in zip(found[0], want[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    gradients = [pullback((case.ct, ct)) for _, pullback in (found, want)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))


def test_statistics_have_no_gradient():
    case = make((6, 2, 3), jnp.float32)

    def loss(x, kernel):
        _, mean, var = pointwise_batch_norm(x, kernel, case.scale, case.bias)
        return mean.sum() + var.sum()

    for found in jax.grad(loss, (0, 1))(case.x, case.kernel):
        np.testing.assert_array_equal(found, 0.0)


@pytest.mark.parametrize("relu", [False, True])
def test_devices_share_the_global_batch(relu):
    case = make((2, 7, 3, 5), jnp.float32)
    case = case._replace(x=case.x.at[1].add(3.0))  # devices differ in their means

    def gradients(x, ct, axis):
        def loss(x, kernel, scale, bias):
            options = {"relu": relu, "axis_name": axis}
            found = pointwise_batch_norm(x, kernel, scale, bias, **options)
            return jnp.sum(found[0] * ct), found

        run = jax.grad(loss, (0, 1, 2, 3), has_aux=True)
        return run(x, case.kernel, case.scale, case.bias)

    each = functools.partial(gradients, axis="data")
    got, found = jax.jit(jax.vmap(each, axis_name="data"))(case.x, case.ct)
    rows = case.x.reshape(14, 3), case.ct.reshape(14, 5)
    want, whole = jax.jit(functools.partial(gradients, axis=None))(*rows)
    np.testing.assert_allclose(found[0].reshape(14, 5), whole[0], 0, 2e-5)
    for local, shared in zip(found[1:], whole[1:], strict=True):
        np.testing.assert_allclose(local[0], shared, 2e-5)
        np.testing.assert_array_equal(local[0], local[1])
    np.testing.assert_allclose(got[0].reshape(14, 3), want[0], 0, 2e-5)
    for local, one in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(local.sum(0), one, 1e-4, 1e-4)


def test_replicated_parameters_in_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    case = make((6, 3, 4), jnp.float32)

    def gradients(kernel, x):
        def loss(kernel):
            y = pointwise_batch_norm(
                x, kernel, case.scale, case.bias, axis_name="data"
            )[0]
            return jnp.sum(y * case.ct)

        return jax.grad(loss)(kernel)

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    want = reference(case, False, 0.0).values[4]
    np.testing.assert_allclose(jax.jit(sharded)(case.kernel, case.x), want, 1e-4, 1e-5)


def test_neither_the_product_nor_its_gradient_is_kept():
    case = make((2, 4, 4, 8, 32), jnp.float16, residual=True)
    norm = functools.partial(pointwise_batch_norm, relu=True)
    _, pullback = jax.vjp(lambda *a: norm(*a[:4], residual=a[4])[0], *case[:5])
    kept = [a.shape for a in jax.tree.leaves(pullback) if hasattr(a, "shape")]
    images = [shape for shape in kept if len(shape) == 4]
    assert sorted(images) == [case.x.shape, case.ct.shape]  # x and y


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((1, 3))}, "at least 2 values per channel, got 1"),
        ({"x": jnp.ones(3)}, "`x` must have a batch and a channel axis"),
        ({"x": jnp.ones((4, 3), jnp.int32)}, "`x` must be floating"),
        ({"kernel": jnp.ones((2, 5))}, "`kernel` must be .inputs, outputs. for the 3"),
        ({"kernel": jnp.ones((1, 1, 3, 5))}, "`kernel` must be .inputs, outputs. for"),
        ({"kernel": jnp.ones((3, 5), jnp.float16)}, "float32 like it, got float16"),
        ({"scale": jnp.ones(4)}, "`scale` must have one value per output"),
        ({"bias": jnp.ones(4)}, "`bias` must have one value per output"),
        ({"residual": jnp.ones((4, 4))}, "`residual` must be like the result"),
        ({"eps": 0.0}, "`eps` must be above 0"),
        ({"after": jnp.ones((4, 2))}, "`after` must be .outputs, features. for the 5"),
        ({"after": jnp.ones((1, 1, 5, 2))}, "`after` must be .outputs, features. for"),
        ({"after": jnp.ones((5, 2), jnp.float16)}, "float32 like it, got float16"),
        ({"after": jnp.ones((5, 2)), "relu": False}, "`after` needs relu=True"),
        ({"after": jnp.ones((5, 2)), "twice": True}, "with twice=True: it already"),
    ],
)
def test_wrong_arguments(change, message):
    case = make((4, 3, 5), jnp.float32)
    arrays: dict[str, Any] = {**case._asdict(), "relu": True, **change}
    del arrays["ct"]
    with pytest.raises(ValueError, match=message):
        pointwise_batch_norm(**arrays)
