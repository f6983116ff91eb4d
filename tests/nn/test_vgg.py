import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.networks import KEY, drawn, halved, products_of, shapes_of

import rjax
from rjax.nn import VGG16BN
from rjax.nn.vgg import adaptive_mean
from rjax.trees import flatten

SMALL: Any = VGG16BN(5, dropout=0.0, width=2, hidden=16)
DROPPING: Any = VGG16BN(5, width=2, hidden=16)
# Two rows and three columns are left of these, so that none of 7x7 is of another size
# and rows are not columns; 79 is odd where it is halved.
IMAGES = (4, 79, 96, 3)
DEPTHS = (2, 2, 3, 3, 3)
EPS = 1e-5
# Compiling is what takes long here: XLA need not try hard.
QUICK: Any = {"xla_backend_optimization_level": 0}


@functools.cache
def _variables():
    return drawn(SMALL, *IMAGES)


def _batch(*sides):
    n, *image = IMAGES
    rng = np.random.default_rng(1)
    images = rng.uniform(size=(n, *(sides or image[:2]), image[2]))
    return jnp.asarray(images, jnp.float32), jnp.arange(n, dtype=jnp.int32)


def _windows(x, size, stride):
    found = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return found[:, ::stride, ::stride]


def _mean64(x, size):
    """Average as torch does, window by window."""
    x = np.asarray(x, np.float64)
    (height, width), edges = x.shape[1:3], np.arange(size + 1)
    y = np.empty((len(x), size, size, x.shape[3]))
    for i, j in np.ndindex(size, size):
        top, left = int(np.floor(i * height / size)), int(np.floor(j * width / size))
        bottom = int(np.ceil(edges[i + 1] * height / size))
        right = int(np.ceil(edges[j + 1] * width / size))
        y[:, i, j] = x[:, top:bottom, left:right].mean((1, 2))
    return y


def _vgg64(variables, x, train):
    """Return the logits of the small network, written out in float64."""
    params, stats = (
        {path: np.asarray(leaf, np.float64) for path, leaf in flatten(tree)[0]}
        for tree in (variables["params"], variables["batch_stats"])
    )
    x = np.asarray(x, np.float64)
    for stage, depth in enumerate(DEPTHS, start=1):
        for i in range(1, depth + 1):
            at = f"stage{stage}_cbr{i}"
            x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            kernel = params[f"{at}/conv/kernel"]
            x = np.einsum("nhwcij,ijcf->nhwf", _windows(x, 3, 1), kernel)
            mean, var = stats[f"{at}/bn/mean"], stats[f"{at}/bn/var"]
            if train:
                mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = (x - mean) / np.sqrt(var + EPS) * params[f"{at}/bn/scale"]
            x = np.maximum(x + params[f"{at}/bn/bias"], 0)
        x = _windows(x, 2, 2).max((-1, -2))
    x = _mean64(x, 7).reshape(len(x), -1)
    for at in ("hidden1", "hidden2"):
        x = np.maximum(x @ params[f"{at}/kernel"] + params[f"{at}/bias"], 0)
    return x @ params["head/kernel"] + params["head/bias"]


def _logits(variables, x, train):
    apply = functools.partial(SMALL.apply, train=train, mutable=["batch_stats"])
    return jax.jit(apply, compiler_options=QUICK)(variables, x)[0]


@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
def test_the_forward_pass_is_the_one_of_the_paper(train):
    variables, (x, _) = _variables(), _batch()
    want = _vgg64(variables, x, train)
    got = _logits(variables, x, train)
    # Sixteen layers; a sum of 49 * 16 products is off by some sqrt(784) roundings.
    bound = 16 * 28 * float(jnp.finfo(jnp.float32).eps) * np.abs(want).max()
    np.testing.assert_allclose(got, want, 0, bound)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_follow_the_kernels(dtype):
    variables, (x, _) = _variables(), _batch()
    half = {**variables, "params": halved(variables["params"], dtype)}
    got = _logits(half, x, train=True)
    assert got.dtype == dtype and got.shape == (4, 5)
    want = _vgg64(variables, x, train=True)
    # Sixteen layers, each as far off as one rounding of its output.
    bound = 16 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(got.astype(jnp.float32), want, 0, bound)


def test_it_has_the_size_of_torchvisions_but_for_biases():
    model: Any = VGG16BN()
    assert model == VGG16BN(1000, 0.5, None, 64, 4096)
    variables = shapes_of(model, 2, 224, 224, 3)
    leaves = jax.tree.leaves(variables)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    sizes = [leaf.size for leaf in jax.tree.leaves(variables["params"])]
    biases = 64 * (2 * 1 + 2 * 2 + 3 * 4 + 6 * 8)
    assert sum(sizes) == 138_365_992 - biases == 138_361_768
    kernels = [p for p, leaf in flatten(variables["params"])[0] if leaf.ndim > 1]
    assert len(kernels) == 16
    x = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    assert jax.eval_shape(model.apply, variables, x).shape == (2, 1000)


def test_activations_are_of_the_papers_size_and_stay_half():
    x = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    model: Any = VGG16BN(10)

    def activations(variables, x):
        half = {**variables, "params": halved(variables["params"], jnp.bfloat16)}
        how: Any = {"train": True, "capture_intermediates": True}
        how |= {"rngs": {"dropout": KEY}, "mutable": ["intermediates", "batch_stats"]}
        return model.apply(half, x, **how)[1]["intermediates"]

    found = jax.eval_shape(activations, jax.eval_shape(model.init, KEY, x), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("bfloat16")}
    side, stages = 224, enumerate(zip(DEPTHS, (64, 128, 256, 512, 512), strict=True), 1)
    for stage, (depth, channels) in stages:
        for i in range(1, depth + 1):
            side = side // 2 if i == depth else side
            (y,) = found[f"stage{stage}_cbr{i}"]["__call__"]
            assert y.shape == (2, side, side, channels)
    assert found["hidden2"]["__call__"][0].shape == (2, 4096)


@pytest.mark.parametrize("sides", [(7, 7), (14, 21), (1, 2), (10, 6), (8, 29)])
def test_adaptive_mean_is_torchs(sides):
    x = np.random.default_rng(0).normal(size=(2, *sides, 3))
    x = jnp.asarray(x, jnp.float32)
    got = adaptive_mean(x, 7)
    # A mean is at most one rounding a row and a column off, and those of the sums.
    bound = 8 * float(jnp.finfo(jnp.float32).eps) * float(jnp.abs(x).max())
    np.testing.assert_allclose(got, _mean64(x, 7), 0, bound)


def test_adaptive_mean_accumulates_in_float32_and_rounds_once():
    # In half precision the sum of four of these overflows.
    x = jnp.full((1, 14, 14, 1), 40000.0, jnp.float16).at[0, 0, 0].set(0.0)
    want = jnp.full((1, 7, 7, 1), 40000.0, jnp.float16).at[0, 0, 0].set(30000.0)
    got = adaptive_mean(x, 7)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == jnp.float16
    # 1 + 3/4 eps; the mean of either axis, rounded first, would be 1 + 1/2 eps.
    above = float(1 + jnp.finfo(jnp.float16).eps)
    x = jnp.full((1, 14, 14, 1), above, jnp.float16).at[:, ::2, ::2].set(1.0)
    assert (adaptive_mean(x, 7) == above).all()


def test_dropout_only_in_training():
    half = {**_variables(), "params": halved(_variables()["params"], jnp.float16)}
    x, _ = _batch(32, 32)

    @functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
    def run(key, train):
        how: Any = {"train": train, "capture_intermediates": True}
        how |= {"rngs": {"dropout": key}, "mutable": ["intermediates", "batch_stats"]}
        return DROPPING.apply(half, x, **how)[1]["intermediates"]

    def last(found):
        return found["__call__"][0]

    assert (last(run(KEY, True)) == last(run(KEY, True))).all()
    assert (last(run(KEY, True)) != last(run(jax.random.key(1), True))).any()
    assert (last(run(KEY, False)) == last(run(jax.random.key(1), False))).all()
    for train in (False, True):
        found = run(KEY, train)
        for i in (1, 2):
            before = jax.nn.relu(last(found[f"hidden{i}"]))
            after = last(found[f"Dropout_{i - 1}"])
            assert after.dtype == jnp.float16
            kept = (after != 0) | (before == 0)
            assert bool(kept.all()) != train
            # What is kept is divided by its share, one half: exact.
            want = jnp.where(kept, (1 + train) * before, 0)
            np.testing.assert_array_equal(after, want)


def _criterion(logits, labels, seen):
    seen["logits"] = logits.dtype
    return rjax.ops.softmax_cross_entropy(logits, labels)


def _rig(precision, seen):
    """Return a state and a step; `seen` gets the dtypes of the view and of logits."""
    variables = _variables()
    inner = rjax.linen_loss(DROPPING, functools.partial(_criterion, seen=seen))

    def loss_fn(params, batch_stats, batch, key):
        seen["view"] = {path: leaf.dtype for path, leaf in flatten(params)[0]}
        return inner(params, batch_stats, batch, key)

    config = rjax.Config(precision=precision, learning_rate=0.02)
    plan = rjax.make_plan(variables["params"], config, variables["batch_stats"])
    state = rjax.init_state(plan, variables["params"], variables["batch_stats"])
    return plan, state, rjax.make_train_step(loss_fn, plan)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_step_multiplies_in_half_precision_only(precision):
    seen: dict[str, Any] = {}
    plan, state, step = _rig(precision, seen)
    program = jax.make_jaxpr(step)(state, _batch(32, 32))
    compute = plan.config.policy.compute_dtype
    for path, dtype in seen["view"].items():
        assert dtype == (compute if path.endswith("kernel") else jnp.float32), path
    assert seen["logits"] == compute
    products = list(products_of(program.jaxpr))
    # Each of 16 kernels forward, for its gradient and, but the first, its input's.
    assert len(products) == 3 * 16 - 1 and set.union(*products) == {compute}
    roles = {slot.path: str(slot.role) for slot in plan.slots}
    assert roles["stage1_cbr1/conv/kernel"] == "first_conv"
    assert roles["stage5_cbr1/conv/kernel"] == "deep_conv"
    assert roles["stage5_cbr3/bn/scale"] == "bn_weight"
    assert roles["hidden1/kernel"] == "fc_weight"


def test_it_trains_in_fp16():
    plan, state, step = _rig("fp16", {})
    step = jax.jit(step, donate_argnums=0, compiler_options=QUICK)
    losses, applied = [], []
    for _ in range(60):
        state, report = step(state, _batch(32, 32))
        losses.append(float(report.loss))
        applied.append(bool(report.applied))
        assert np.isfinite(report.grad_norm) or not applied[-1]
    # All of 7x7 are one pixel here, whose gradient is the sum of theirs: the loss scale
    # may be too large for it at first.
    assert all(applied[4:])
    # Single losses jump with what is dropped.
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:3])
    old = flatten(_variables()["batch_stats"])[0]
    new = dict(flatten(rjax.get_batch_stats(plan, state))[0])
    assert all((np.asarray(leaf) != new[path]).any() for path, leaf in old)


def test_devices_share_every_statistic():
    model: Any = VGG16BN(5, 0.0, "data", width=2, hidden=4)
    x, _ = _batch(32, 32)
    variables = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape), shapes_of(model, *x.shape)
    )

    def part(x):
        return model.apply(variables, x, train=True, mutable=["batch_stats"])[1]

    parts = x.reshape(2, 2, *x.shape[1:])
    shared = jax.jit(jax.vmap(part, axis_name="data"), compiler_options=QUICK)
    stats = shared(parts)["batch_stats"]
    for path, leaf in flatten(stats)[0]:
        np.testing.assert_allclose(leaf[0], leaf[1], 1e-6, err_msg=path)


def test_kernels_start_as_torchvisions():
    model, x = VGG16BN(64, width=4, hidden=64), _batch(32, 32)[0]
    layers = ("stage1_cbr1", "stage4_cbr1", "hidden1", "head")

    @functools.partial(jax.jit, compiler_options=QUICK)
    def start():  # and what is not returned is not compiled
        params = model.init(KEY, x)["params"]
        return {name: params[name] for name in layers}

    for path, kernel in flatten(start())[0]:
        if kernel.ndim == 1:
            assert (kernel == (1 if path.endswith("scale") else 0)).all(), path
            continue
        want = np.sqrt(2 / (9 * kernel.shape[-1])) if kernel.ndim == 4 else 0.01
        # The deviation of n normal numbers is off by some 1 / sqrt(2n).
        bound = 4 / np.sqrt(2 * kernel.size)
        np.testing.assert_allclose(kernel.std() / want, 1, bound, err_msg=path)
        # Not truncated at two deviations, of which 5% lie outside.
        if kernel.size > 4000:
            assert 0.03 < (jnp.abs(kernel) > 2 * want).mean() < 0.06, path


@pytest.mark.parametrize("sides", [(31, 32), (64, 16)])
def test_images_that_are_too_small(sides):
    with pytest.raises(ValueError, match="`x` must be images of at least 32x32.*got"):
        SMALL.init(KEY, jnp.ones((2, *sides, 3)))


@pytest.mark.parametrize("x", [jnp.ones((64, 64, 3)), jnp.ones((1, 9, 9, 3), jnp.int8)])
def test_what_is_no_image(x):
    with pytest.raises(ValueError, match="`x` must be"):
        SMALL.init(KEY, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, "`dropout` must be in .0, 1., got 1.0"),
        ({"width": 0}, "`width` must be at least 1, got 0"),
        ({"hidden": 0}, "`hidden` must be at least 1, got 0"),
    ],
)
def test_attributes_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        VGG16BN(3, **options).init(KEY, jnp.ones((2, 32, 32, 1)))
