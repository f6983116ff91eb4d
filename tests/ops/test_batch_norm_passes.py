"""What rides on a batch norm (a residual, pooling), by XLA and by kernels."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.range_kernels import (
    Runner,
    implementations,
    lowers_for_cuda,
    needs_kernels,
    refuses_where_there_is_none,
)
from ops.range_kernels import run as run  # a fixture

import rjax
from rjax.ops import mosaic
from rjax.ops.batch_norm import (
    batch_norm,
    batch_norm_inference,
    mosaic_gpu,
    mosaic_overlap,
    mosaic_pool,
    training,
)
from rjax.ops.batch_norm.columns import Columns, columns
from rjax.ops.max_pool import Window, max_pool

STEM = Window(3, 2, ((1, 1), (1, 1)))


def _eps(dtype):
    return float(jnp.finfo(dtype).eps)


def _f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def _case(shape, dtype, count=1):
    """Return x, scale, bias and `count` more arrays like x."""
    rng = np.random.default_rng(0)
    draw = lambda mean, std: jnp.asarray(rng.normal(mean, std, shape), jnp.float32)  # noqa: E731
    scale = jnp.asarray(rng.uniform(0.5, 2.0, shape[-1]), jnp.float32)
    scale = jnp.where(jnp.arange(shape[-1]) % 3 == 1, -scale, scale)
    bias = jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)
    others = [draw(0.0, 1.0).astype(dtype) for _ in range(count)]
    return draw(2.0, 3.0).astype(dtype), scale, bias, *others


def _places(z, window):
    """Yield output position and the position of its first largest element."""
    (top, _), (left, _) = window.pads(*z.shape[1:3])
    rows, columns = window.output(*z.shape[1:3])
    for n, i, j, c in np.ndindex(z.shape[0], rows, columns, z.shape[3]):
        inside = [
            (n, h, w, c)
            for h in range(i * window.strides[0] - top, i * window.strides[0] - top
                           + window.size[0])
            for w in range(j * window.strides[1] - left, j * window.strides[1] - left
                           + window.size[1])
            if 0 <= h < z.shape[1] and 0 <= w < z.shape[2]
        ]  # fmt: skip
        yield (n, i, j, c), max(inside, key=lambda at: z[at])


def _reference(x, scale, bias, dy, residual=None, relu=True, window=None):
    """Return float64 y, mean, var, dx, dscale, dbias, dresidual by the formulas."""
    x, scale, bias, dy = _f64(x), _f64(scale), _f64(bias), _f64(dy)
    axes = tuple(range(x.ndim - 1))
    mean, var = x.mean(axes), x.var(axes)
    istd = 1 / np.sqrt(var + 1e-5)
    xhat = (x - mean) * istd
    z = xhat * scale + bias + (0.0 if residual is None else _f64(residual))
    y, dz = np.maximum(z, 0) if relu else z, dy
    if window is not None:
        places = list(_places(y, window))
        y, dz = (
            np.array([y[at] for _, at in places]).reshape(dy.shape),
            np.zeros(z.shape),
        )
        for out, at in places:
            dz[at] += dy[out]
    dz = np.where(z > 0, dz, 0.0) if relu else dz
    dbias, dscale = dz.sum(axes), (dz * xhat).sum(axes)
    n = x.size // x.shape[-1]
    dx = scale * istd * (dz - dbias / n - xhat * dscale / n)
    found = [y, mean, var, dx, dscale, dbias]
    return found if residual is None else [*found, dz]


def _both(x, scale, bias, dy, *residual, implementation=None, **options):
    """Return what `_reference` does."""

    def norm(x, scale, bias, *residual):
        rest = dict(zip(["residual"], residual, strict=False))
        how = {**options, **rest, "implementation": implementation}
        return batch_norm(x, scale, bias, **how)

    (y, mean, var), pullback = jax.vjp(norm, x, scale, bias, *residual)
    if not options.get("twice"):
        return y, mean, var, *pullback((dy, mean, var))
    return y[0], mean, var, *pullback(((dy, jnp.zeros_like(dy)), mean, var))


def _assert_close(found, wanted, n):
    for got, want in zip(found, wanted, strict=True):
        # One rounding to the dtype, and float32 sums of n values of a few units.
        slack = (8 + n**0.5) * _eps(jnp.float32) * 10 * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(_f64(got), want, _eps(got.dtype), slack)


@pytest.fixture
def few_programs(monkeypatch):
    """Let every program visit several rows, in whole steps and in a rest."""
    for name in ("_STATISTICS", "_REDUCE", "_APPLY", "_GRADIENT"):
        monkeypatch.setattr(mosaic_gpu, name, (3, 2))
    monkeypatch.setattr(mosaic_pool, "_SUMS", 3)
    monkeypatch.setattr(mosaic_pool, "_WRITES", 3)
    monkeypatch.setattr(mosaic_overlap, "_PROGRAMS", 3)


# Strips that hold all channels several times, channels of several strips, neither.
SHAPES = [(5, 8, 8, 64), (4, 5, 1024), (28, 32, 3), (96, 96)]


@implementations
@pytest.mark.parametrize(("dtype", "relu"), [(jnp.float16, True), (jnp.float32, False)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("few_programs")
def test_passes_match_float64(run: Runner, dtype, shape, relu):
    x, scale, bias, dy = _case(shape, dtype)
    found = run(_both, x, scale, bias, dy, relu=relu)
    n = x.size // shape[-1]
    _assert_close(found, _reference(x, scale, bias, dy, relu=relu), n)


@implementations
def test_the_same_bits_every_time(run: Runner):
    x, scale, bias, dy = _case((64, 64), jnp.bfloat16)
    first, second = (run(_both, x, scale, bias, dy, relu=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@implementations
@pytest.mark.parametrize(
    ("dtype", "relu", "twice"),
    [
        (jnp.float16, True, False),
        (jnp.float16, True, True),
        (jnp.bfloat16, False, False),
    ],
)
@pytest.mark.parametrize("shape", [(5, 8, 8, 64), (2, 128)])
@pytest.mark.usefixtures("few_programs")
def test_a_residual_is_added_before_the_clamp(run: Runner, dtype, shape, relu, twice):
    x, scale, bias, dy, residual = _case(shape, dtype, 2)
    found = run(_both, x, scale, bias, dy, residual, relu=relu, twice=twice)
    wanted = _reference(x, scale, bias, dy, residual, relu)
    _assert_close(found, wanted, x.size // shape[-1])
    np.testing.assert_array_equal(_f64(found[-1]), wanted[-1])
    assert found[-1].dtype == dtype


@implementations
@pytest.mark.parametrize("window", [None, Window(2)])
@pytest.mark.usefixtures("few_programs")
def test_passes_run_within_shard_map(run: Runner, window):
    """Where arrays vary over a mesh axis, and statistics go over it."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x, scale, bias, dy = _case((2, 4, 8, 64), jnp.float16)
    dy = dy if window is None else dy[:, ::2, ::2]
    how: dict[str, Any] = {"relu": True, "pool": window, "axis_name": "data"}

    def sharded(x, scale, bias, dy, implementation):
        def local(x, scale, bias, dy):
            scale, bias = (lax.pcast(v, "data", to="varying") for v in (scale, bias))
            y, mean, var, dx, *own = _both(
                x, scale, bias, dy, implementation=implementation, **how
            )
            return y, mean, var, dx, *(lax.psum(g, "data") for g in own)

        specs = P("data"), P(), P(), P("data")
        outs = P("data"), P(), P(), P("data"), P(), P()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs)(
            x, scale, bias, dy
        )

    found = run(sharded, x, scale, bias, dy)
    wanted = _reference(x, scale, bias, dy, window=window)
    _assert_close(found, wanted, x.size // 64)


@implementations
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.usefixtures("few_programs")
def test_gradients_of_two_uses_are_added(run: Runner, with_residual):
    """In float32 where a residual was added and clamped: rounding them loses 1."""
    x, scale, bias, dy, residual = _case((4, 8, 128), jnp.float16, 2)
    less = 1.0 if with_residual else 512.0
    one, other = jnp.full_like(dy, 2048.0), jnp.full_like(dy, less)
    more = (residual,) if with_residual else ()

    def both(x, scale, bias, one, other, *more, implementation):
        def norm(x, scale, bias, *more):
            how: dict[str, Any] = dict(zip(["residual"], more, strict=False))
            how["implementation"] = implementation
            return batch_norm(x, scale, bias, relu=True, twice=True, **how)

        (ys, mean, var), pullback = jax.vjp(norm, x, scale, bias, *more)
        return *ys, pullback(((one, other), mean, var))[1:3]

    first, second, (_, dbias) = run(both, x, scale, bias, one, other, *more)
    np.testing.assert_array_equal(first, second)
    wanted = (2048.0 + less) * (_f64(first) > 0).sum((0, 1))
    np.testing.assert_allclose(_f64(dbias), wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 6, 4, 3), Window(2)),
        ((1, 5, 7, 2), Window(2)),
        ((2, 8, 6, 3), STEM),
        ((1, 7, 5, 2), Window((3, 2), (1, 2), "SAME")),
    ],
)
@pytest.mark.parametrize("relu", [False, True])
def test_windows_are_pooled_after_the_clamp(dtype, shape, window, relu):
    x, scale, bias, _ = _case(shape, dtype)
    out = (shape[0], *window.output(*shape[1:3]), shape[3])
    dy = jnp.asarray(np.random.default_rng(1).normal(size=out), dtype)
    found = jax.jit(functools.partial(_both, relu=relu, pool=window))(
        x, scale, bias, dy
    )
    wanted = _reference(x, scale, bias, dy, relu=relu, window=window)
    _assert_close(found, wanted, x.size // shape[-1])


@implementations
@pytest.mark.parametrize(
    ("shape", "dtype", "relu", "size"),
    [
        ((3, 4, 32, 64), jnp.float16, True, 2),
        ((5, 2, 6, 256), jnp.bfloat16, False, 2),
        ((1, 6, 16, 96), jnp.float32, True, (3, 2)),
        ((2, 4, 2, 1536), jnp.float16, True, 2),
    ],
)
@pytest.mark.usefixtures("few_programs")
def test_windows_that_tile_the_image_have_kernels(
    run: Runner, shape, dtype, relu, size
):
    x, scale, bias, _ = _case(shape, dtype)
    window = Window(size)
    out = (shape[0], *window.output(*shape[1:3]), shape[3])
    dy = jnp.asarray(np.random.default_rng(1).normal(size=out), dtype)
    found = run(_both, x, scale, bias, dy, relu=relu, pool=window)
    wanted = _reference(x, scale, bias, dy, relu=relu, window=window)
    _assert_close(found, wanted, x.size // shape[-1])


@implementations
@pytest.mark.parametrize(
    ("shape", "dtype", "relu", "window"),
    [
        ((2, 6, 8, 64), jnp.float16, True, STEM),
        ((1, 4, 8, 128), jnp.float32, False, Window(3, 2)),
        ((3, 6, 6, 256), jnp.bfloat16, True, Window((4, 3), (2, 2), "SAME")),
        ((2, 4, 4, 128), jnp.float16, True, Window((2, 3), (2, 1))),
    ],
)
@pytest.mark.usefixtures("few_programs")
def test_the_gradient_has_a_kernel_where_windows_overlap(
    run: Runner, shape, dtype, relu, window
):
    """All but the order in which two gradients are added is that of the base."""
    x, factor, bias, _ = _case(shape, dtype)
    out = (shape[0], *window.output(*shape[1:3]), shape[3])
    dy = jnp.asarray(np.random.default_rng(1).normal(size=out), dtype)
    mean, dz_mean, slope = (jnp.linspace(a, 1.0, shape[3]) for a in (2.0, 0.5, -0.5))

    def gradient(*arrays, implementation):
        how: dict[str, Any] = {"relu": relu, "window": window}
        return training.run_pass(
            "gradient", *arrays, implementation=implementation, **how
        )

    arrays = x, dy, mean, factor, bias, dz_mean, slope
    found = run(gradient, *arrays)
    wanted = jax.jit(functools.partial(gradient, implementation="xla"))(*arrays)
    largest = np.abs(_f64(wanted)).max()
    np.testing.assert_allclose(_f64(found), _f64(wanted), 0, 2 * _eps(dtype) * largest)


@implementations
@pytest.mark.usefixtures("few_programs")
def test_the_first_of_equal_values_gets_the_gradient(run: Runner):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 4, 8, 64)), jnp.float16)
    dy, one = jnp.ones((2, 2, 4, 64), jnp.float16), jnp.ones(64)
    found = run(_both, x, one, 2 * one, dy, relu=True, pool=Window(2))
    wanted = _reference(x, one, 2 * one, dy, window=Window(2))
    _assert_close(found, wanted, 64)


@needs_kernels
@pytest.mark.parametrize(
    "shape", [(2, 224, 224, 64), (2, 28, 28, 512), (2, 14, 14, 512), (1, 8, 8, 64)]
)
def test_pooling_kernels_lower_for_cuda(shape):
    x, vector = (shape, jnp.float16), (shape[-1:], jnp.float32)
    dy = ((shape[0], shape[1] // 2, shape[2] // 2, shape[3]), jnp.float16)
    how = {"relu": True, "pool": Window(2), "implementation": "mosaic_gpu"}
    op = functools.partial(_both, **how)
    for name in ("apply", "reduce", "gradient"):
        lowers_for_cuda(f"rjax_bn_{name}_pool", op, x, vector, vector, dy)


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_are_those_of_the_plain_composition(relu):
    """Nothing rounds in float32, so the parts put together by JAX must agree."""
    x, scale, bias, _ = _case((2, 8, 8, 3), jnp.float32)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 4, 3)), jnp.float32)

    def plain(x, scale, bias):
        rows = x.reshape(-1, 3)
        centred = rows - rows.mean(0, keepdims=True)
        z = centred / jnp.sqrt((centred**2).mean(0, keepdims=True) + 1e-5)
        z = (z * scale[None] + bias[None]).reshape(x.shape)
        z = jnp.maximum(z, 0.0) if relu else z
        pads: Any = STEM.padding
        return jnp.sum(nn.max_pool(z, STEM.size, STEM.strides, pads) * dy)

    def ours(x, scale, bias):
        return jnp.sum(batch_norm(x, scale, bias, relu=relu, pool=STEM)[0] * dy)

    got = jax.jit(jax.grad(ours, (0, 1, 2)))(x, scale, bias)
    want = jax.jit(jax.grad(plain, (0, 1, 2)))(x, scale, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, 0, 100 * _eps(jnp.float32))


@implementations
def test_inference_adds_clamps_and_folds(run: Runner):
    x, scale, bias, residual = _case((2, 8, 8, 64), jnp.float16)
    mean, var = jnp.linspace(-1.0, 3.0, 64), jnp.linspace(0.1, 4.0, 64)
    op = functools.partial(batch_norm_inference, relu=True)
    found = run(
        lambda x, r, **how: op(x, scale, bias, mean, var, residual=r, **how),
        x,
        residual,
    )
    z = (_f64(x) - _f64(mean)) / np.sqrt(_f64(var) + 1e-5) * _f64(scale) + _f64(bias)
    wanted = np.maximum(z + _f64(residual), 0.0)
    np.testing.assert_allclose(_f64(found), wanted, _eps(jnp.float16), 1e-4)
    pooled = op(x, scale, bias, mean, var, pool=Window(2))
    whole = op(x, scale, bias, mean, var)
    np.testing.assert_array_equal(pooled, max_pool(whole, 2))


def _far(where):
    """Return float32 rows far above their spread, perhaps with an outlier."""
    rows = np.where(np.arange(2048)[:, None] % 2 == 0, 1000.5, 1001.5) * np.ones(128)
    if where == "nowhere":
        rows = 1000.0 + 1e-3 * np.random.default_rng(0).normal(size=rows.shape)
    else:
        places = {"last": [-1], "first": [0], "block": [1024], "ends": [0, -1]}
        rows[places[where]] = 0.0
    return jnp.asarray(rows, jnp.float32)


@implementations
@pytest.mark.parametrize("outlier", ["nowhere", "last", "first", "block", "ends"])
@pytest.mark.usefixtures("few_programs")
def test_statistics_survive_a_mean_far_above_the_spread(run: Runner, outlier):
    """Wherever an outlier lies, what it is compared with may not cancel the rest."""
    x = _far(outlier)

    def statistics(x, implementation):
        return training.run_pass("statistics", x, implementation=implementation)

    mean, squares = run(statistics, x)
    wanted = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, wanted.mean(0), rtol=1e-6)
    # Two of three values looked at are far away: what is left of n equal addends.
    rtol = len(wanted) * _eps(jnp.float32) / 2 if outlier == "ends" else 1e-5
    np.testing.assert_allclose(squares, wanted.var(0) * len(wanted), rtol=rtol)


def _saved(**options):
    """Return what the backward pass keeps besides the arguments, as (shape, dtype)."""
    x, scale, bias, residual = _case((2, 4, 4, 8), jnp.float16)
    given = {"residual": residual} if options.pop("residual", False) else {}

    def norm(x, scale, bias, given):
        return batch_norm(x, scale, bias, **given, **options)[0]

    _, pullback = jax.vjp(norm, x, scale, bias, given)
    return sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(pullback))


def test_the_backward_pass_keeps_x_and_vectors():
    x, vectors = ((2, 4, 4, 8), "float16"), [((8,), "float32")] * 4
    assert _saved() == _saved(relu=True) == _saved(relu=True, pool=STEM)
    assert _saved(relu=True) == sorted([x, *vectors])
    assert _saved(residual=True) == sorted([x, *vectors])
    # y is the input of the next layer, which keeps it anyway.
    assert _saved(relu=True, residual=True) == sorted([x, x, *vectors])


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": STEM}, {"pool": Window(2)}, {"residual": True, "twice": True}],
)
def test_what_was_kept_is_first_read_with_the_gradient(options):
    """Or XLA computes a part of the backward pass early, and keeps that as well."""
    x, scale, bias, residual = _case((2, 4, 4, 8), jnp.float16)
    if options.get("residual"):
        options = {**options, "residual": residual}

    def norm(x):
        return batch_norm(x, scale, bias, relu=True, **options)[0]

    y, pullback = jax.vjp(norm, x)
    jaxpr = jax.make_jaxpr(pullback)(y).jaxpr
    kept = [v for v in jaxpr.constvars if v.aval.shape == x.shape]
    readers = [e for e in jaxpr.eqns if any(v in kept for v in e.invars)]
    assert [str(e.primitive) for e in readers] == ["optimization_barrier"]
    assert all(v in readers[0].invars for v in [*kept, *jaxpr.invars])


def test_a_single_gradient_is_not_written_before_it_is_clamped():
    """It may be a broadcast: what reads it is one select."""
    x, scale, bias, residual = _case((2, 4, 4, 8), jnp.float16)

    def norm(x):
        return batch_norm(x, scale, bias, relu=True, residual=residual)[0]

    y, pullback = jax.vjp(norm, x)
    jaxpr = jax.make_jaxpr(pullback)(y).jaxpr
    readers = [e for e in jaxpr.eqns if any(v in jaxpr.invars for v in e.invars)]
    assert ["select_n" in str(e) for e in readers] == [True]


def test_nothing_scatters_and_no_window_is_reduced():
    x, scale, bias, _ = _case((2, 8, 8, 4), jnp.float16)
    dy = jnp.ones((2, 4, 4, 4), jnp.float16)
    both = jax.jit(functools.partial(_both, relu=True, pool=STEM))
    text = both.lower(x, scale, bias, dy).as_text()
    for word in ("reduce_window", "select_and_scatter", "scatter", "gather"):
        assert word not in text
    assert "stablehlo.reduce" in text  # there is something to read


@pytest.mark.parametrize(
    ("size", "channels", "found"),
    [
        (1 << 20, 64, Columns(1024, 1, 1024)),
        (1 << 20, 2048, Columns(1024, 2, 512)),
        (1024 * 96, 96, Columns(1024, 3, 32)),
        (128 * 7, 7, Columns(128, 7, 1)),
        (3 * 384, 384, Columns(128, 3, 3)),
        (5 * 64, 64, None),
        (0, 64, None),
    ],
)
def test_columns(size, channels, found):
    assert columns(size, channels) == found
    if found:
        assert found.rows * found.period == size and found.period % channels == 0


@needs_kernels
@pytest.mark.parametrize("shape", [(8, 56, 56, 64), (2, 7, 7, 2048), (128, 96)])
@pytest.mark.parametrize("residual", [False, True])
def test_kernels_lower_for_cuda(shape, residual):
    x, vector = (shape, jnp.float16), (shape[-1:], jnp.float32)
    arrays = [x, vector, vector, x] + [x] * residual
    how: dict[str, Any] = {"relu": True, "twice": residual}
    op = functools.partial(_both, **how, implementation="mosaic_gpu")
    for name in ("statistics", "apply", "reduce", "gradient"):
        lowers_for_cuda(f"rjax_bn_{name}", op, *arrays)


@needs_kernels
def test_the_kernel_is_refused_where_it_cannot_serve():
    x, scale, bias = jnp.ones((2, 8, 8, 64)), jnp.ones(64), jnp.zeros(64)
    refuses_where_there_is_none(functools.partial(batch_norm, x, scale), bias)
    for wrong, options, why in [
        (jnp.ones((3, 64)), {}, "does not fill whole rows"),
        (x, {"pool": STEM}, "overlap, only the gradient has a kernel"),
        (x, {"pool": Window(3)}, "do not tile"),
        (x[:, :, :4], {"pool": Window(2)}, "do not tile"),
    ]:
        options["implementation"] = "mosaic_gpu"
        refused = pytest.raises(NotImplementedError, match=why)
        with mosaic.mode("lower"), refused:
            jax.eval_shape(lambda x, o=options: batch_norm(x, scale, bias, **o), wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": jnp.ones((2, 4, 4, 2))}, "`residual` must be like `x`"),
        ({"residual": jnp.ones((2, 4, 4, 3), jnp.float16)}, "got float16"),
        ({"residual": jnp.ones((2, 4, 4, 3)), "pool": Window(2)}, "cannot both"),
        ({"pool": Window(5)}, "must be at most the padded image"),
    ],
)
def test_wrong_arguments(options, message):
    x, one = jnp.ones((2, 4, 4, 3)), jnp.ones(3)
    with pytest.raises(ValueError, match=message):
        batch_norm(x, one, one, **options)
    with pytest.raises(ValueError, match=message):
        batch_norm_inference(x, one, one, one, one, **options)


def test_only_images_are_pooled():
    with pytest.raises(ValueError, match="`x` must be images"):
        batch_norm(jnp.ones((4, 3)), jnp.ones(3), jnp.ones(3), pool=Window(2))


def test_the_modules_hand_it_on():
    x = _case((2, 4, 4, 4), jnp.float16)[0]
    key, how = jax.random.key(0), {"use_running_average": False}
    norm: Any = rjax.nn.BatchNorm(relu=True, pool=Window(2))
    y, _ = norm.init_with_output(key, x, **how)
    wanted = batch_norm(x, jnp.ones(4), jnp.zeros(4), relu=True, pool=Window(2))[0]
    np.testing.assert_array_equal(y, wanted)
    norm = rjax.nn.BatchNorm(relu=True)
    y, _ = norm.init_with_output(key, x, residual=x, **how)
    wanted = batch_norm(x, jnp.ones(4), jnp.zeros(4), relu=True, residual=x)[0]
    np.testing.assert_array_equal(y, wanted)
    block: Any = rjax.nn.ConvBNReLU(3, pool=Window(2))
    variables = block.init(key, x)
    assert block.apply(variables, x).shape == (2, 2, 2, 3)
