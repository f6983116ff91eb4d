import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.networks import KEY, drawn, halved, shapes_of

import rjax
from rjax.nn import ResNet
from rjax.trees import flatten

SMALL: Any = ResNet(5, blocks=1, width=4)
# Even and odd, so that a stride meets both; both stages that halve are entered.
IMAGES = (6, 8, 7, 2)
EPS = 1e-5


@functools.cache
def _variables():
    return drawn(SMALL, *IMAGES)


def _batch():
    rng = np.random.default_rng(1)
    images = jnp.asarray(rng.uniform(size=IMAGES), jnp.float32)
    return images, jnp.arange(IMAGES[0], dtype=jnp.int32) % 5


def _conv64(x, kernel, stride):
    """Convolve in float64, padded so that a window is centred on its pixel."""
    edge = kernel.shape[0] // 2
    x = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], (1, 2))
    return np.einsum("nhwcij,ijcf->nhwf", windows[:, ::stride, ::stride], kernel)


def _resnet64(variables, x, train):
    """Return the logits of a network of one block a stage, written out in float64."""
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
        return _conv64(x, params[f"{at}/kernel"], stride)

    def relu(x):
        return np.maximum(x, 0)

    x = np.asarray(x, np.float64)
    x = relu(norm(conv(x, "stem/conv"), "stem/bn"))
    for stage, stride in ((1, 1), (2, 2), (3, 2)):
        at = f"stage{stage}_block1"
        y = relu(norm(conv(x, f"{at}/cbr1/conv", stride), f"{at}/cbr1/bn"))
        y = norm(conv(y, f"{at}/conv2"), f"{at}/bn2")
        if stage > 1:
            x = norm(conv(x, f"{at}/shortcut_conv", stride), f"{at}/shortcut_bn")
        x = relu(x + y)
    return x.mean((1, 2)) @ params["head/kernel"] + params["head/bias"]


def _logits(variables, x, train):
    apply = functools.partial(SMALL.apply, train=train, mutable=["batch_stats"])
    return jax.jit(apply)(variables, x)[0]


@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
def test_the_forward_pass_is_the_one_of_the_paper(train):
    variables, (x, _) = _variables(), _batch()
    want = _resnet64(variables, x, train)
    got = _logits(variables, x, train)
    # Eight layers; a sum of 9 * 16 products is off by some sqrt(144) roundings.
    bound = 8 * 12 * float(jnp.finfo(jnp.float32).eps) * np.abs(want).max()
    np.testing.assert_allclose(got, want, 0, bound)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_logits_follow_the_kernels(dtype):
    variables, (x, _) = _variables(), _batch()
    half = {**variables, "params": halved(variables["params"], dtype)}
    got = _logits(half, x, train=True)
    assert got.dtype == dtype and got.shape == (6, 5)
    want = _resnet64(variables, x, train=True)
    # Eight layers, each as far off as one rounding of its output.
    bound = 8 * float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(got.astype(jnp.float32), want, 0, bound)


def _count(channels, classes, blocks, width):
    """Count the parameters: kernels, a scale and a bias per norm, the head."""
    total = 9 * channels * width + 2 * width
    inputs = width
    for stage in range(3):
        outputs = width * 2**stage
        for _ in range(blocks):
            total += 9 * inputs * outputs + 9 * outputs**2 + 4 * outputs
            total += (inputs * outputs + 2 * outputs) * (inputs != outputs)
            inputs = outputs
    return total + inputs * classes + classes


@pytest.mark.parametrize(
    ("image", "classes", "blocks", "width"),
    [
        ((32, 32, 3), 10, 3, 16),
        ((28, 28, 1), 10, 1, 8),
        ((8, 8, 1), 7, 2, 4),
        ((5, 9, 16), 3, 1, 16),
    ],
)
def test_shapes_and_parameter_count(image, classes, blocks, width):
    model: Any = ResNet(classes, blocks, width)
    variables = shapes_of(model, 2, *image)
    leaves = jax.tree.leaves(variables)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    sizes = [leaf.size for leaf in jax.tree.leaves(variables["params"])]
    assert sum(sizes) == _count(image[-1], classes, blocks, width)
    x = jax.ShapeDtypeStruct((2, *image), jnp.float32)
    assert jax.eval_shape(model.apply, variables, x).shape == (2, classes)


def test_resnet_20_has_the_size_of_the_paper():
    """0.27 million with free shortcuts; projections add two 1x1 kernels, two norms."""
    shapes = shapes_of(ResNet(10), 2, 32, 32, 3)["params"]
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert total == 272_474 == 269_722 + (16 * 32 + 64) + (32 * 64 + 128)
    kernels = [path for path, leaf in flatten(shapes)[0] if leaf.ndim > 1]
    assert len([path for path in kernels if "shortcut" not in path]) == 20


@pytest.mark.parametrize("blocks", [1, 2])
def test_stages_halve_the_image_once_and_stay_in_half_precision(blocks):
    model: Any = ResNet(3, blocks, width=2)
    x = jnp.ones((2, 13, 8, 1))

    def activations(variables):
        half = {**variables, "params": halved(variables["params"], jnp.float16)}
        return model.apply(half, x, capture_intermediates=True)[1]

    found = jax.eval_shape(activations, jax.eval_shape(model.init, KEY, x))
    for stage, shape in enumerate([(13, 8, 2), (7, 4, 4), (4, 2, 8)], start=1):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            (y,) = found["intermediates"][name]["__call__"]
            assert y.shape == (2, *shape) and y.dtype == jnp.float16


def _criterion(logits, labels, seen):
    seen["logits"] = logits.dtype
    return rjax.ops.softmax_cross_entropy(logits, labels)


def _rig(precision, seen):
    """Return plan and step; `seen` gets the dtypes of the view and of the logits."""
    variables = _variables()
    inner = rjax.linen_loss(SMALL, functools.partial(_criterion, seen=seen))

    def loss_fn(params, batch_stats, batch, key):
        seen["view"] = {path: leaf.dtype for path, leaf in flatten(params)[0]}
        return inner(params, batch_stats, batch, key)

    config = rjax.Config(precision=precision, learning_rate=0.05)
    plan = rjax.make_plan(variables["params"], config, variables["batch_stats"])
    return plan, rjax.make_train_step(loss_fn, plan)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_kernels_are_half_and_norms_float32_in_the_view(precision):
    seen: dict[str, Any] = {}
    plan, step = _rig(precision, seen)
    variables = _variables()
    state = rjax.init_state(plan, variables["params"], variables["batch_stats"])
    jax.eval_shape(step, state, _batch())
    compute = plan.config.policy.compute_dtype
    for path, dtype in seen["view"].items():
        assert dtype == (compute if path.endswith("kernel") else jnp.float32), path
    assert seen["logits"] == compute
    roles = {slot.path: str(slot.role) for slot in plan.slots}
    assert roles["stem/conv/kernel"] == "first_conv"
    assert roles["stage3_block1/shortcut_conv/kernel"] == "deep_conv"
    assert roles["stage3_block1/shortcut_bn/bias"] == "bn_bias"
    assert roles["stage3_block1/bn2/scale"] == "bn_weight"
    assert roles["head/kernel"] == "fc_weight"


def test_it_trains_in_fp16():
    plan, step = _rig("fp16", {})
    variables = _variables()
    state = rjax.init_state(plan, variables["params"], variables["batch_stats"])
    # Compiling is what takes long here: XLA need not try hard.
    options: Any = {"xla_backend_optimization_level": 1}
    step = jax.jit(step, donate_argnums=0, compiler_options=options)
    losses = []
    for _ in range(12):
        state, report = step(state, _batch())
        assert bool(report.applied)
        losses.append(float(report.loss))
    assert losses[-1] < 0.5 * losses[0]
    old = flatten(variables["batch_stats"])[0]
    new = dict(flatten(rjax.get_batch_stats(plan, state))[0])
    assert all((np.asarray(leaf) != new[path]).any() for path, leaf in old)


def test_devices_share_every_statistic():
    model: Any = ResNet(5, blocks=1, width=4, axis_name="data")
    variables, (x, _) = _variables(), _batch()

    def part(x):
        return model.apply(variables, x, train=True, mutable=["batch_stats"])[1]

    parts = x.reshape(2, 3, *x.shape[1:])
    stats = jax.jit(jax.vmap(part, axis_name="data"))(parts)["batch_stats"]
    for path, leaf in flatten(stats)[0]:
        np.testing.assert_allclose(leaf[0], leaf[1], 1e-6, err_msg=path)


@pytest.mark.parametrize("options", [{"blocks": 0}, {"width": 0}])
def test_sizes_below_one(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got {value}"):
        ResNet(3, **options).init(KEY, jnp.ones((2, 8, 8, 1)))
