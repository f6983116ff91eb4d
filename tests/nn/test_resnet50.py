import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.networks import KEY, drawn, halved, products_of, shapes_of

import rjax
from rjax.nn import BottleneckBlock, ResNet50, layers
from rjax.trees import flatten

# A block with its input as the shortcut, one whose shortcut has other channels, and
# one that strides.
SMALL: Any = ResNet50(5, blocks=(2, 1), width=4)
# Even and odd where the block strides: the stem makes 9x8 of it.
IMAGES = (6, 34, 31, 2)
EPS = 1e-5
# Compiling is what takes long here: XLA need not try hard.
QUICK: Any = {"xla_backend_optimization_level": 0}


@functools.cache
def _variables():
    return drawn(SMALL, *IMAGES)


def _batch():
    rng = np.random.default_rng(1)
    images = jnp.asarray(rng.uniform(size=IMAGES), jnp.float32)
    return images, jnp.arange(IMAGES[0], dtype=jnp.int32) % 5


def _windows(x, size, stride, fill=0.0):
    """Return the windows that are centred on every stride-th pixel."""
    around = (size // 2, size // 2)
    x = np.pad(x, ((0, 0), around, around, (0, 0)), constant_values=fill)
    found = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return found[:, ::stride, ::stride]


def _resnet64(variables, x, train):
    """Return the logits of the small network, written out in float64."""
    params, stats = (
        {path: np.asarray(leaf, np.float64) for path, leaf in flatten(tree)[0]}
        for tree in (variables["params"], variables["batch_stats"])
    )

    def norm(x, at):
        mean, var = stats[f"{at}/mean"], stats[f"{at}/var"]
        if train:
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = (x - mean) / np.sqrt(var + EPS)
        return x * params[f"{at}/scale"] + params[f"{at}/bias"]

    def conv(x, at, stride=1):
        kernel = params[f"{at}/kernel"]
        return np.einsum("nhwcij,ijcf->nhwf", _windows(x, len(kernel), stride), kernel)

    def cbr(x, at, stride=1):
        return np.maximum(norm(conv(x, f"{at}/conv", stride), f"{at}/bn"), 0)

    x = cbr(np.asarray(x, np.float64), "stem", 2)
    x = _windows(x, 3, 2, -np.inf).max((-1, -2))
    for at, stride, projected in (
        ("stage1_block1", 1, True),
        ("stage1_block2", 1, False),
        ("stage2_block1", 2, True),
    ):
        y = cbr(cbr(x, f"{at}/cbr1"), f"{at}/cbr2", stride)
        y = norm(conv(y, f"{at}/conv3"), f"{at}/bn3")
        if projected:
            x = norm(conv(x, f"{at}/shortcut_conv", stride), f"{at}/shortcut_bn")
        x = np.maximum(x + y, 0)
    return x.mean((1, 2)) @ params["head/kernel"] + params["head/bias"]


def _logits(variables, x, train, model=SMALL):
    apply = functools.partial(model.apply, train=train, mutable=["batch_stats"])
    return jax.jit(apply, compiler_options=QUICK)(variables, x)[0]


@pytest.mark.parametrize("folded", [False, True], ids=["stored", "folded"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
def test_the_forward_pass_is_the_one_of_the_paper(train, folded):
    variables, (x, _) = _variables(), _batch()
    want = _resnet64(variables, x, train)
    got = _logits(variables, x, train, SMALL.clone(folded=folded))
    # Eleven layers; a sum of 9 * 16 products is off by some sqrt(144) roundings.
    bound = 11 * 12 * float(jnp.finfo(jnp.float32).eps) * np.abs(want).max()
    np.testing.assert_allclose(got, want, 0, bound)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_follow_the_kernels(dtype):
    variables, (x, _) = _variables(), _batch()
    half = {**variables, "params": halved(variables["params"], dtype)}
    got = _logits(half, x, train=True)
    assert got.dtype == dtype and got.shape == (6, 5)
    want = _resnet64(variables, x, train=True)
    # Eleven layers, each as far off as one rounding of its output.
    bound = 11 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(got.astype(jnp.float32), want, 0, bound)


@pytest.mark.parametrize(
    ("blocks", "total"),
    [((3, 4, 6, 3), 25_557_032), ((3, 4, 23, 3), 44_549_160)],
    ids=["resnet50", "resnet101"],
)
def test_it_has_the_size_of_torchvisions(blocks, total):
    model: Any = ResNet50(blocks=blocks)
    variables = shapes_of(model, 2, 224, 224, 3)
    leaves = jax.tree.leaves(variables)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    sizes = [leaf.size for leaf in jax.tree.leaves(variables["params"])]
    assert sum(sizes) == total
    kernels = [p for p, leaf in flatten(variables["params"])[0] if leaf.ndim > 1]
    assert len([p for p in kernels if "shortcut" not in p]) == 3 * sum(blocks) + 2
    assert len([p for p in kernels if "shortcut" in p]) == 4
    x = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    assert jax.eval_shape(model.apply, variables, x).shape == (2, 1000)


def test_the_defaults_are_those_of_resnet_50():
    assert ResNet50() == ResNet50(1000, None, (3, 4, 6, 3), 64)


@pytest.mark.parametrize(
    ("image", "sides"),
    [((224, 224), [(56, 56), (28, 28), (14, 14), (7, 7)]),
     ((65, 33), [(17, 9), (9, 5), (5, 3), (3, 2)])],
)  # fmt: skip
def test_activations_are_of_torchs_size_and_stay_half(image, sides):
    model: Any = ResNet50(10)
    x = jax.ShapeDtypeStruct((2, *image, 3), jnp.float32)

    def activations(variables, x):
        half = {**variables, "params": halved(variables["params"], jnp.float16)}
        return model.apply(half, x, capture_intermediates=True)[1]

    found = jax.eval_shape(activations, jax.eval_shape(model.init, KEY, x), x)
    (stem,) = found["intermediates"]["stem"]["__call__"]
    assert stem.shape == (2, *sides[0], 64)
    for stage, depth in enumerate(model.blocks, start=1):
        for block in range(1, depth + 1):
            inside = found["intermediates"][f"stage{stage}_block{block}"]
            y = jax.tree.leaves(inside["__call__"])[0]  # of a pair, but for the last
            assert y.shape == (2, *sides[stage - 1], 128 * 2**stage)
            # The stride comes after the first of the three convolutions.
            (first,) = inside["cbr1"]["__call__"]
            entered = stage - 2 if stage > 1 and block == 1 else stage - 1
            assert first.shape == (2, *sides[entered], 32 * 2**stage)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float16")}


def test_a_pair_of_outputs_changes_no_number():
    block: Any = BottleneckBlock(2)
    x = jax.random.normal(KEY, (2, 3, 3, 8))
    variables = block.init(KEY, x)
    how: dict[str, Any] = {"train": True, "mutable": ["batch_stats"]}
    wanted, stats = block.apply(variables, x, **how)
    pair, others = block.clone(twice=True).apply(variables, (x, x), **how)
    for y in pair:
        np.testing.assert_array_equal(y, wanted)
    jax.tree.map(np.testing.assert_array_equal, stats, others)
    assert len(block.clone(twice=True).apply(variables, x)) == 2


@pytest.mark.parametrize(("strides", "channels"), [(1, 8), (1, 4), (2, 8)])
def test_folded_norms_change_no_parameter_and_no_gradient(strides, channels):
    x = jax.random.normal(KEY, (2, 5, 5, channels))

    def found(block):
        variables = block.init(KEY, x)

        def loss(params, x):
            both = {**variables, "params": params}
            y, stats = block.apply(both, x, train=True, mutable=["batch_stats"])
            return jnp.sum(y * y), stats

        run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        return variables, run(variables["params"], x)

    block: Any = BottleneckBlock(2, strides)
    (variables, wanted), (others, got) = map(found, (block, block.clone(folded=True)))
    jax.tree.map(np.testing.assert_array_equal, variables, others)
    same = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    jax.tree.map(same, got, wanted)


def test_folded_it_keeps_nothing_of_the_size_of_a_product():
    x = jax.random.normal(KEY, (2, 5, 7, 8))

    def kept(block):
        variables = block.init(KEY, x)
        run = functools.partial(
            block.apply, variables, train=True, mutable=["batch_stats"]
        )
        saved = jax.tree.leaves(jax.vjp(lambda x: run(x)[0], x)[1])
        return [a.shape for a in saved].count((2, 5, 7, 8))

    block: Any = BottleneckBlock(2)
    assert kept(block) - kept(block.clone(folded=True)) == 1


def test_folded_a_block_convolves_for_the_next(monkeypatch):
    given, real = [], layers.pointwise_batch_norm

    def spy(*args, after=None, **how):
        given.append(None if after is None else after.shape)
        return real(*args, after=after, **how)

    monkeypatch.setattr(layers, "pointwise_batch_norm", spy)
    model: Any = ResNet50(num_classes=5, blocks=(1, 2, 1), width=2, folded=True)
    x = jnp.ones((2, 32, 32, 3))
    variables = jax.eval_shape(model.init, KEY, x)
    run = functools.partial(model.apply, train=True, mutable=["batch_stats"])
    given.clear()
    jax.eval_shape(run, variables, x)
    # The projected shortcut of the first block, then the four blocks.
    assert given == [None, (8, 4), (16, 4), (16, 8), None]
    given.clear()
    jax.eval_shape(model.apply, variables, x)
    assert not given


def test_folded_a_network_has_the_gradients_of_the_plain_one():
    x = jax.random.normal(KEY, (3, 32, 32, 3))
    model: Any = ResNet50(num_classes=5, blocks=(1, 1), width=2)
    variables = drawn(model, *x.shape)

    def found(model):
        def loss(params):
            both = {**variables, "params": params}
            logits, stats = model.apply(both, x, train=True, mutable=["batch_stats"])
            return jnp.sum(logits * logits), stats

        run = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)
        return run(variables["params"])

    same = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    jax.tree.map(same, found(model.clone(folded=True)), found(model))


def test_a_shortcut_is_projected_if_channels_or_strides_differ():
    for strides, channels, projected in ((1, 8, False), (2, 8, True), (1, 4, True)):
        # One pixel: a stride leaves the size as it is.
        block = BottleneckBlock(2, strides)
        params = shapes_of(block, 2, 1, 1, channels)["params"]
        assert ("shortcut_conv" in params) == projected


def _criterion(logits, labels, seen):
    seen["logits"] = logits.dtype
    return rjax.ops.softmax_cross_entropy(logits, labels)


def _rig(precision, seen):
    """Return a state and a step; `seen` gets the dtypes of the view and of logits."""
    variables = _variables()
    inner = rjax.linen_loss(SMALL, functools.partial(_criterion, seen=seen))

    def loss_fn(params, batch_stats, batch, key):
        seen["view"] = {path: leaf.dtype for path, leaf in flatten(params)[0]}
        return inner(params, batch_stats, batch, key)

    config = rjax.Config(precision=precision, learning_rate=0.05)
    plan = rjax.make_plan(variables["params"], config, variables["batch_stats"])
    state = rjax.init_state(plan, variables["params"], variables["batch_stats"])
    return plan, state, rjax.make_train_step(loss_fn, plan)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_step_multiplies_in_half_precision_only(precision):
    seen: dict[str, Any] = {}
    plan, state, step = _rig(precision, seen)
    program = jax.make_jaxpr(step)(state, _batch())
    compute = plan.config.policy.compute_dtype
    for path, dtype in seen["view"].items():
        assert dtype == (compute if path.endswith("kernel") else jnp.float32), path
    assert seen["logits"] == compute
    products = list(products_of(program.jaxpr))
    # Each of 13 kernels forward, for its gradient and, but the stem, for its input's.
    assert len(products) == 3 * 13 - 1 and set.union(*products) == {compute}
    roles = {slot.path: str(slot.role) for slot in plan.slots}
    assert roles["stem/conv/kernel"] == "first_conv"
    assert roles["stage2_block1/shortcut_conv/kernel"] == "deep_conv"
    assert roles["stage1_block2/bn3/scale"] == "bn_weight"
    assert roles["head/kernel"] == "fc_weight"


def test_it_trains_in_fp16():
    plan, state, step = _rig("fp16", {})
    step = jax.jit(step, donate_argnums=0, compiler_options=QUICK)
    losses = []
    for _ in range(12):
        state, report = step(state, _batch())
        assert bool(report.applied) and np.isfinite(report.grad_norm)
        losses.append(float(report.loss))
    assert losses[-1] < 0.5 * losses[0]
    old = flatten(_variables()["batch_stats"])[0]
    new = dict(flatten(rjax.get_batch_stats(plan, state))[0])
    assert all((np.asarray(leaf) != new[path]).any() for path, leaf in old)


def test_devices_share_every_statistic():
    model: Any = ResNet50(5, axis_name="data", blocks=(2, 1), width=4)
    variables, (x, _) = _variables(), _batch()

    def part(x):
        return model.apply(variables, x, train=True, mutable=["batch_stats"])[1]

    parts = x.reshape(2, 3, *x.shape[1:])
    shared = jax.jit(jax.vmap(part, axis_name="data"), compiler_options=QUICK)
    stats = shared(parts)["batch_stats"]
    for path, leaf in flatten(stats)[0]:
        np.testing.assert_allclose(leaf[0], leaf[1], 1e-6, err_msg=path)


def test_kernels_start_as_torchvisions():
    model: Any = ResNet50(200, blocks=(1,), width=16)
    params = jax.jit(model.init, compiler_options=QUICK)(KEY, _batch()[0])["params"]
    block = params["stage1_block1"]
    for kernel, fan_out in [
        (params["stem"]["conv"]["kernel"], 49 * 16),
        (block["cbr1"]["conv"]["kernel"], 16),
        (block["cbr2"]["conv"]["kernel"], 9 * 16),
        (block["conv3"]["kernel"], 64),
        (block["shortcut_conv"]["kernel"], 64),
    ]:
        # The deviation of n normal numbers is off by some 1 / sqrt(2n).
        bound = 4 / np.sqrt(2 * kernel.size)
        np.testing.assert_allclose(kernel.std() / np.sqrt(2 / fan_out), 1, bound)
    # Not truncated at two deviations, of which 5% lie outside.
    far = jnp.abs(block["cbr2"]["conv"]["kernel"]) > 2 * np.sqrt(2 / 144)
    assert 0.03 < far.mean() < 0.06
    head = params["head"]["kernel"] * 8  # of 64 inputs
    assert 0.99 < head.max() <= 1 and -1 <= head.min() < -0.99
    np.testing.assert_allclose(head.std(), np.sqrt(1 / 3), 0.02)
    assert not params["head"]["bias"].any()


@pytest.mark.parametrize("options", [{"blocks": (1, 0)}, {"blocks": ()}, {"width": 0}])
def test_sizes_below_one(options):
    with pytest.raises(ValueError, match="`width` and `blocks` must be at least 1"):
        ResNet50(3, **options).init(KEY, jnp.ones((2, 32, 32, 1)))
