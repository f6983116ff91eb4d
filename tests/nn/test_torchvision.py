import functools
import io
import itertools
import pickle
import re
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rjax.nn import CNN, VGG16BN, ResNet50, from_torchvision

KEY = jax.random.key(0)
VGG: Any = VGG16BN(5, width=2, hidden=16)
# With and without a projection, with and without a stride.
RESNET: Any = ResNet50(5, blocks=(2, 2), width=4)
MODELS = {"vgg": VGG, "resnet": RESNET}
# Two rows and three columns are left of these for the classifier of VGG.
IMAGES = (3, 64, 96, 3)
EPS = float(jnp.finfo(jnp.float32).eps)


def _norm(name, n):
    found = {f"{name}.{field}": (n,) for field in ("weight", "bias", "running_mean")}
    return {**found, f"{name}.running_var": (n,), f"{name}.num_batches_tracked": ()}


def _vgg_shapes(width, hidden, classes):
    """Return torchvision's names and shapes, layer by layer as it builds them."""
    shapes, inputs, k = {}, 3, 0
    for widening in (1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M"):
        if isinstance(widening, str):
            k += 1
            continue
        n = widening * width
        at = f"features.{k}"
        shapes |= {f"{at}.weight": (n, inputs, 3, 3), f"{at}.bias": (n,)}
        shapes |= _norm(f"features.{k + 1}", n)
        inputs, k = n, k + 3
    widths = (inputs * 49, hidden, hidden, classes)
    for layer, (a, b) in zip((0, 3, 6), itertools.pairwise(widths), strict=True):
        at = f"classifier.{layer}"
        shapes |= {f"{at}.weight": (b, a), f"{at}.bias": (b,)}
    return shapes


def _resnet_shapes(width, blocks, classes):
    shapes = {"conv1.weight": (width, 3, 7, 7), **_norm("bn1", width)}
    inputs = width
    for stage, depth in enumerate(blocks):
        n = width * 2**stage
        for i in range(depth):
            at = f"layer{stage + 1}.{i}"
            shapes |= {f"{at}.conv1.weight": (n, inputs, 1, 1), **_norm(f"{at}.bn1", n)}
            shapes |= {f"{at}.conv2.weight": (n, n, 3, 3), **_norm(f"{at}.bn2", n)}
            shapes |= {f"{at}.conv3.weight": (4 * n, n, 1, 1)}
            shapes |= _norm(f"{at}.bn3", 4 * n)
            if i == 0:
                shapes |= {f"{at}.downsample.0.weight": (4 * n, inputs, 1, 1)}
                shapes |= _norm(f"{at}.downsample.1", 4 * n)
            inputs = 4 * n
    return shapes | {"fc.weight": (classes, inputs), "fc.bias": (classes,)}


SHAPES = {"vgg": _vgg_shapes(2, 16, 5), "resnet": _resnet_shapes(4, (2, 2), 5)}


@functools.cache
def _arrays(which):
    rng = np.random.default_rng(0)

    def draw(name, shape):
        if name.endswith("num_batches_tracked"):
            return np.array(7)
        if len(shape) > 1:
            deviation = np.sqrt(2 / np.prod(shape[1:]))
            return (deviation * rng.normal(size=shape)).astype(np.float32)
        if name.endswith(("running_var", "weight")):
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    return {name: draw(name, shape) for name, shape in SHAPES[which].items()}


def _save(path, arrays):
    np.savez(path, **arrays)


def _images():
    return np.random.default_rng(1).uniform(size=IMAGES).astype(np.float32)


class _Torch:
    """Layers as torch computes them, channels first, for the arrays of a model."""

    def __init__(self, arrays):
        self.arrays = {name: jnp.asarray(array) for name, array in arrays.items()}

    def vector(self, name):
        return self.arrays[name].reshape(1, -1, 1, 1)

    def conv(self, x, name, stride=1):
        weight = self.arrays[f"{name}.weight"]
        pads = [(side // 2, side // 2) for side in weight.shape[2:]]
        names = ("NCHW", "OIHW", "NCHW")
        y = lax.conv_general_dilated(
            x, weight, (stride, stride), pads, dimension_numbers=names
        )
        return y + self.vector(f"{name}.bias") if f"{name}.bias" in self.arrays else y

    def norm(self, x, name):
        x = x - self.vector(f"{name}.running_mean")
        x = x / jnp.sqrt(self.vector(f"{name}.running_var") + 1e-5)
        return x * self.vector(f"{name}.weight") + self.vector(f"{name}.bias")

    def linear(self, x, name):
        bias = self.arrays[f"{name}.bias"].reshape(1, -1)
        return x @ self.arrays[f"{name}.weight"].T + bias


def _max_pool(x, size, stride, pad):
    around = [(0, 0), (0, 0), (pad, pad), (pad, pad)]
    steps = (1, 1, stride, stride)
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size, size), steps, around)


def _adaptive_mean(x):
    """Average 2x3 to 7x7: a row of the result is one of x, or the mean of both."""
    assert x.shape[2:] == (2, 3)
    rows = jnp.array([(2, 0)] * 3 + [(1, 1)] + [(0, 2)] * 3) / 2
    thirds = [(2, 0, 0)] * 2 + [(1, 1, 0), (0, 2, 0), (0, 1, 1)] + [(0, 0, 2)] * 2
    columns = jnp.array(thirds) / 2
    return jnp.einsum("ih,nchw,jw->ncij", rows, x, columns)


def _vgg(arrays, x):
    layers, k = _Torch(arrays), 0
    for depth in (2, 2, 3, 3, 3):
        for _ in range(depth):
            x = layers.conv(x, f"features.{k}")
            x = jax.nn.relu(layers.norm(x, f"features.{k + 1}"))
            k += 3
        x = _max_pool(x, 2, 2, 0)
        k += 1
    x = _adaptive_mean(x).reshape(len(x), -1)
    x = jax.nn.relu(layers.linear(x, "classifier.0"))
    x = jax.nn.relu(layers.linear(x, "classifier.3"))
    return layers.linear(x, "classifier.6")


def _resnet(arrays, x):
    layers = _Torch(arrays)
    x = jax.nn.relu(layers.norm(layers.conv(x, "conv1", 2), "bn1"))
    x = _max_pool(x, 3, 2, 1)
    for at, stride in (("1.0", 1), ("1.1", 1), ("2.0", 2), ("2.1", 1)):
        at = f"layer{at}"
        y = jax.nn.relu(layers.norm(layers.conv(x, f"{at}.conv1"), f"{at}.bn1"))
        y = layers.norm(layers.conv(y, f"{at}.conv2", stride), f"{at}.bn2")
        y = layers.norm(layers.conv(jax.nn.relu(y), f"{at}.conv3"), f"{at}.bn3")
        if f"{at}.downsample.0.weight" in arrays:
            x = layers.conv(x, f"{at}.downsample.0", stride)
            x = layers.norm(x, f"{at}.downsample.1")
        x = jax.nn.relu(x + y)
    return layers.linear(x.mean((2, 3)), "fc")


REFERENCES = {"vgg": _vgg, "resnet": _resnet}


@functools.cache
def _logits(which):
    """Return what our module computes in evaluation with torchvision's weights."""
    model = MODELS[which]
    variables = from_torchvision(model, _arrays(which))
    return np.asarray(jax.jit(model.apply)(variables, _images()))


def _close(got, want):
    # Sixteen layers at most; a sum of 49 * 16 products is off by some sqrt(784)
    # roundings, in both.
    np.testing.assert_allclose(got, want, 0, 2 * 16 * 28 * EPS * np.abs(want).max())


@pytest.mark.parametrize("which", ["vgg", "resnet"])
def test_it_computes_what_the_layers_of_torch_do(which):
    x = _images().transpose(0, 3, 1, 2)
    want = jax.jit(REFERENCES[which])(_arrays(which), x)
    assert want.std() > 0.1
    _close(_logits(which), want)


def _torch_vgg(torch):
    nn = torch.nn
    layers, inputs = [], 3
    for widening in (1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M"):
        if isinstance(widening, str):
            layers.append(nn.MaxPool2d(2, 2))
            continue
        n = 2 * widening
        layers += [nn.Conv2d(inputs, n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU()]
        inputs = n

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(*layers)
            self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
            self.classifier = nn.Sequential(
                *(nn.Linear(16 * 49, 16), nn.ReLU(), nn.Dropout()),
                *(nn.Linear(16, 16), nn.ReLU(), nn.Dropout()),
                nn.Linear(16, 5),
            )

        def forward(self, x):
            return self.classifier(self.avgpool(self.features(x)).flatten(1))

    return Model()


def _torch_resnet(torch):
    nn = torch.nn

    class Bottleneck(nn.Module):
        def __init__(self, inputs, n, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, n, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(n)
            self.conv2 = nn.Conv2d(n, n, 3, stride, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(n)
            self.conv3 = nn.Conv2d(n, 4 * n, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(4 * n)
            self.downsample = None
            if stride != 1 or inputs != 4 * n:
                project = nn.Conv2d(inputs, 4 * n, 1, stride, bias=False)
                self.downsample = nn.Sequential(project, nn.BatchNorm2d(4 * n))

        def forward(self, x):
            y = self.bn1(self.conv1(x)).relu()
            y = self.bn3(self.conv3(self.bn2(self.conv2(y)).relu()))
            return (y + (x if self.downsample is None else self.downsample(x))).relu()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
            self.bn1 = nn.BatchNorm2d(4)
            self.maxpool = nn.MaxPool2d(3, 2, 1)
            self.layer1 = nn.Sequential(Bottleneck(4, 4, 1), Bottleneck(16, 4, 1))
            self.layer2 = nn.Sequential(Bottleneck(16, 8, 2), Bottleneck(32, 8, 1))
            self.fc = nn.Linear(32, 5)

        def forward(self, x):
            x = self.maxpool(self.bn1(self.conv1(x)).relu())
            return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))

    return Model()


@pytest.mark.parametrize("which", ["vgg", "resnet"])
def test_it_computes_what_torch_does(which):
    torch = pytest.importorskip("torch")
    build = {"vgg": _torch_vgg, "resnet": _torch_resnet}[which]
    theirs = build(torch)
    arrays = {name: torch.tensor(array) for name, array in _arrays(which).items()}
    theirs.load_state_dict(arrays)  # strict: every name and shape is torch's
    with torch.inference_mode():
        want = theirs.eval()(torch.tensor(_images().transpose(0, 3, 1, 2))).numpy()
    _close(_logits(which), want)
    # And straight from the module, not by way of NumPy.
    ours = from_torchvision(MODELS[which], theirs.state_dict())
    for got, same in zip(
        jax.tree.leaves(ours),
        jax.tree.leaves(from_torchvision(MODELS[which], _arrays(which))),
        strict=True,
    ):
        np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize("which", ["vgg", "resnet"])
def test_the_structure_is_that_of_init(which):
    model = MODELS[which]
    got = from_torchvision(model, _arrays(which))
    want = jax.eval_shape(model.init, KEY, jnp.ones(IMAGES))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(ours, jax.Array)
        assert (ours.shape, ours.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize(
    ("model", "shapes", "total"),
    [
        (VGG16BN(), _vgg_shapes(64, 4096, 1000), 138_365_992),
        (ResNet50(), _resnet_shapes(64, (3, 4, 6, 3), 1000), 25_557_032),
    ],
    ids=["vgg", "resnet"],
)
def test_every_name_of_the_full_model_is_known(model, shapes, total):
    learned = [shapes[k] for k in shapes if k.endswith(("weight", "bias"))]
    assert sum(np.prod(shape, dtype=int) for shape in learned) == total
    # Names are checked before arrays are converted: nothing large is made.
    arrays = {k: np.broadcast_to(np.float32(0), s) for k, s in shapes.items()}
    first, shape = next(iter(shapes.items()))
    del arrays[first]
    message = f"`arrays` lacks {first!r}, expected in shape {shape}; give"
    with pytest.raises(ValueError, match=re.escape(message)):
        from_torchvision(model, arrays)


def test_single_values_are_where_they_belong():
    arrays = _arrays("vgg")
    params = from_torchvision(VGG, arrays)["params"]
    stats = from_torchvision(VGG, arrays)["batch_stats"]
    kernel = params["stage3_cbr2"]["conv"]["kernel"]
    assert kernel[2, 1, 5, 3] == arrays["features.17.weight"][3, 5, 2, 1]
    # Of channel 6, row 2 and column 4.
    hidden = params["hidden1"]["kernel"].reshape(7, 7, 16, 16)
    assert hidden[2, 4, 6, 9] == arrays["classifier.0.weight"][9, 6 * 49 + 2 * 7 + 4]
    assert params["head"]["kernel"][9, 3] == arrays["classifier.6.weight"][3, 9]
    want = arrays["features.41.running_mean"] - arrays["features.40.bias"]
    np.testing.assert_array_equal(stats["stage5_cbr3"]["bn"]["mean"], want)


def test_a_bias_and_a_mean_that_it_shifts_cancel():
    arrays = _arrays("vgg")
    shifted = {**arrays, "features.0.bias": arrays["features.0.bias"] + 1}
    shifted["features.1.running_mean"] = arrays["features.1.running_mean"] + 1
    got, want = (jax.tree.leaves(from_torchvision(VGG, a)) for a in (shifted, arrays))
    for ours, same in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, same, 0, 4 * EPS)


def test_files_are_read_like_mappings(tmp_path):
    arrays = _arrays("resnet")
    _save(tmp_path / "resnet.npz", arrays)
    want = from_torchvision(RESNET, arrays)
    for path in (tmp_path / "resnet.npz", str(tmp_path / "resnet.npz")):
        got = from_torchvision(RESNET, path)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), got, want)
        assert all(jax.tree.leaves(same))


def test_nothing_is_shared_and_everything_becomes_float32():
    arrays = {k: v.copy() for k, v in _arrays("resnet").items()}
    arrays["fc.weight"] = arrays["fc.weight"].astype(np.float64)
    arrays["fc.bias"] = arrays["fc.bias"].astype(np.float16)
    variables = from_torchvision(RESNET, arrays)
    before = jax.tree.map(np.array, variables)
    assert {leaf.dtype for leaf in jax.tree.leaves(before)} == {np.dtype("float32")}
    for array in arrays.values():
        array.fill(3)
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(variables), strict=True
    ):
        np.testing.assert_array_equal(old, new)


def test_images_may_have_other_channels():
    arrays = {**_arrays("resnet"), "conv1.weight": np.ones((4, 1, 7, 7))}
    params = from_torchvision(RESNET, arrays)["params"]
    assert params["stem"]["conv"]["kernel"].shape == (7, 7, 1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.bias": None}, "lacks 'fc.bias', expected in shape (5,); give the whole"),
        (
            {"fc.bias": None, "fc.weight": None, "head.bias": np.ones(5)},
            "lacks 'fc.bias', expected in shape (5,), and 1 more; it has 'head.bias'",
        ),
        ({"conv1.bias": np.ones(4)}, "names of torchvision's model only, got 'conv1.b"),
        (
            {"fc.weight": np.ones((32, 5))},
            "`arrays['fc.weight']` must have shape (5, 32), got (32, 5); give",
        ),
        (
            {"conv1.weight": np.ones((4, 7, 7))},
            "`arrays['conv1.weight']` must have shape (4, 3, 7, 7), got (4, 7, 7);",
        ),
        (
            {"layer2.1.bn3.running_var": np.ones(16)},
            "`arrays['layer2.1.bn3.running_var']` must have shape (32,), got (16,);",
        ),
        (
            {"fc.bias": np.ones(5, np.int32)},
            "`arrays['fc.bias']` must be floating, got int32 of shape (5,), expected",
        ),
        (
            {"fc.bias": np.array([{}], dtype=object)},
            "`arrays['fc.bias']` must be floating, got object of shape (1,), expected",
        ),
        ({"fc.bias": [[1.0], [1.0, 2.0]]}, "`arrays['fc.bias']` must be an array of"),
    ],
)
def test_arrays_that_do_not_fit(change, message):
    arrays = {**_arrays("resnet"), **change}
    arrays = {key: array for key, array in arrays.items() if array is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        from_torchvision(RESNET, arrays)


class _Trap:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def test_object_arrays_in_a_file_stay_closed(tmp_path):
    path = tmp_path / "objects.npz"
    trap = np.array([_Trap()], dtype=object)
    _save(path, {**_arrays("resnet"), "fc.bias": trap})
    with pytest.raises(ValueError, match=r"`arrays\['fc.bias'\]` must be an array of"):
        from_torchvision(RESNET, path)


def _zip_of_pickles():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        members.writestr("archive/data.pkl", pickle.dumps(_Trap()))
    return buffer.getvalue()


def _one_array():
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"weights", pickle.dumps(_Trap()), _zip_of_pickles(), _one_array()],
    ids=["nothing", "text", "pickle", "zip", "array"],
)
def test_files_that_are_no_npz(tmp_path, content):
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="`arrays` must be .* got .*weights.npz"):
        from_torchvision(RESNET, path)


def test_files_that_were_damaged(tmp_path):
    path = tmp_path / "weights.npz"
    _save(path, _arrays("resnet"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="`arrays` must be .* got .*weights.npz"):
        from_torchvision(RESNET, path)
    at = whole.index(_arrays("resnet")["fc.weight"].tobytes())
    path.write_bytes(whole[:at] + b"\0\0\0\0" + whole[at + 4 :])
    with pytest.raises(ValueError, match=r"`arrays\['fc.weight'\]`.*CRC"):
        from_torchvision(RESNET, path)
    with pytest.raises(FileNotFoundError):
        from_torchvision(RESNET, tmp_path / "elsewhere.npz")


def test_what_is_neither_a_mapping_nor_a_path():
    with pytest.raises(ValueError, match="`arrays` must be a mapping .* got list"):
        from_torchvision(RESNET, [np.ones(3)])  # pyright: ignore[reportArgumentType]


def test_other_modules():
    with pytest.raises(ValueError, match="`model` must be a VGG16BN .* got CNN"):
        from_torchvision(CNN(10), _arrays("resnet"))
