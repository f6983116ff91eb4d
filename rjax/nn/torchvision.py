"""Weights of torchvision's models for the modules of this package."""

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rjax.nn.resnet50 import ResNet50
from rjax.nn.vgg import POOLED, STAGES, VGG16BN
from rjax.trees import flatten

# What torch calls the parameters and statistics of a convolution, norm or dense layer.
_FIELDS = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
# Where each axis of ours is in torch: of a convolution, a dense kernel, a vector.
_AXES = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
_UNREADABLE = (
    *(ValueError, TypeError, RuntimeError),  # what NumPy and torch raise
    *(EOFError, zipfile.BadZipFile, zlib.error),  # of files that were cut short
)
_NO_NPZ = (
    "`arrays` must be a mapping or the path of an .npz file, got {} ({}); "
    "write one by "
    "`np.savez(path, **{{k: v.numpy() for k, v in model.state_dict().items()}})`."
)


def from_torchvision(
    model: nn.Module, arrays: Mapping[str, Any] | str | os.PathLike[str]
) -> dict[str, Any]:
    """Return the variables of a module with the weights of a torchvision model.

    `model.apply(variables, x)` then equals, for images x with channels last, what
    torchvision's model computes in evaluation. Kernels change from OIHW to HWIO, or
    from [outputs, inputs] to [inputs, outputs]; [1] and [2] are below::

        VGG16BN                             vgg16_bn
        stage{s}_cbr{i}/conv/kernel         features.{k}.weight
        stage{s}_cbr{i}/bn/scale            features.{k+1}.weight
        stage{s}_cbr{i}/bn/bias             features.{k+1}.bias
        stage{s}_cbr{i}/bn/mean         [1] features.{k+1}.running_mean
                                              - features.{k}.bias
        stage{s}_cbr{i}/bn/var              features.{k+1}.running_var
        hidden1/kernel                  [2] classifier.0.weight
        hidden2/kernel, head/kernel         classifier.3.weight, classifier.6.weight
        hidden1/bias and so on              classifier.0.bias and so on

        ResNet50                            resnet50
        stem/conv, stem/bn                  conv1, bn1
        stage{s}_block{i}/cbr{1,2}/conv     layer{s}.{i-1}.conv{1,2}
        stage{s}_block{i}/cbr{1,2}/bn       layer{s}.{i-1}.bn{1,2}
        stage{s}_block{i}/conv3, bn3        layer{s}.{i-1}.conv3, bn3
        stage{s}_block1/shortcut_conv       layer{s}.0.downsample.0
        stage{s}_block1/shortcut_bn         layer{s}.0.downsample.1
        head                                fc

    [1] k counts torchvision's layers, poolings too: 0, 3, 7, 10, 14, ..., 40. Its
    convolutions have biases, ours have none. A norm subtracts them again with the mean,
    so they are taken from the running mean: up to rounding evaluation stays the same,
    and training, by means of the batch, too.

    [2] The inputs change from the order of channels, rows, columns to that of rows,
    columns, channels.

    `num_batches_tracked` is ignored. Images may have any number of channels, that of
    the first kernel; otherwise shapes must be those of `model`.

    Args:
      model: a `VGG16BN` or `ResNet50`, of any size.
      arrays: floating, by torchvision's names: what `numpy.asarray` takes, such as a
        `state_dict()` on the host, or the path of an `.npz` file. Nothing is unpickled.

    Returns:
      `{"params": ..., "batch_stats": ...}`, float32, in the structure that `model.init`
      gives, sharing no memory with `arrays`.

    Raises:
      ValueError: `model` is another module, the file is no `.npz`, or an array is
        missing, unknown, unreadable, not floating or of another shape.
      OSError: the file cannot be opened.

    Example:
      >>> arrays = {"conv1.weight": np.ones((64, 3, 7, 7))}
      >>> from_torchvision(ResNet50(num_classes=10), arrays)
      Traceback (most recent call last):
      ValueError: `arrays` lacks 'bn1.bias', expected in shape (64,), and 265 more; ...
    """
    if not isinstance(model, VGG16BN | ResNet50):
        raise ValueError(
            f"`model` must be a VGG16BN or a ResNet50, got {type(model).__name__}; "
            "torchvision has no weights for another."
        )
    if isinstance(arrays, Mapping):
        return _convert(model, arrays)
    if not isinstance(arrays, str | os.PathLike):
        raise ValueError(_NO_NPZ.format(type(arrays).__name__, "neither of them"))
    with _opened(Path(arrays)) as found:
        return _convert(model, found)


def _convert(model: VGG16BN | ResNet50, arrays: Mapping[str, Any]) -> dict[str, Any]:
    modules = _vgg16_bn() if isinstance(model, VGG16BN) else _resnet50(model.blocks)
    leaves, treedef = flatten(_shapes(model, arrays, modules))
    sources = {path: _source(modules, path) for path, _ in leaves}
    wanted = {sources[path]: _torch_shape(leaf.shape) for path, leaf in leaves}
    shifts = {}
    if isinstance(model, VGG16BN):
        for path in (path for path in sources if path.endswith("bn/mean")):
            shifts[path] = _source(modules, path.replace("bn/mean", "conv/bias"))
            wanted[shifts[path]] = wanted[sources[path]]
    _check_names(arrays, wanted)

    def taken(path: str, shape: tuple[int, ...]) -> jax.Array:
        value = _checked(arrays, sources[path], wanted)
        if path in shifts:
            value = value - _checked(arrays, shifts[path], wanted)
        if isinstance(model, VGG16BN) and path == "params/hidden1/kernel":
            value = value.reshape(shape[1], -1, POOLED, POOLED)
        # A copy, also where jax could keep the memory of a NumPy array.
        return jnp.array(value.transpose(_AXES[value.ndim]).reshape(shape))

    return treedef.unflatten([taken(path, leaf.shape) for path, leaf in leaves])


def _vgg16_bn() -> dict[str, str]:
    """Return torchvision's name of every layer that has parameters, by ours."""
    found, k = {}, 0
    for stage, (depth, _) in enumerate(STAGES, start=1):
        for i in range(1, depth + 1):
            found[f"stage{stage}_cbr{i}/conv"] = f"features.{k}"
            found[f"stage{stage}_cbr{i}/bn"] = f"features.{k + 1}"
            k += 3  # with the ReLU
        k += 1  # the pooling
    classifier = {"hidden1": 0, "hidden2": 3, "head": 6}
    return found | {ours: f"classifier.{k}" for ours, k in classifier.items()}


def _resnet50(blocks: Any) -> dict[str, str]:
    """Return torchvision's name of every layer that has parameters, by ours."""
    found = {"stem/conv": "conv1", "stem/bn": "bn1", "head": "fc"}
    block = {"conv3": "conv3", "bn3": "bn3"}
    block |= {"shortcut_conv": "downsample.0", "shortcut_bn": "downsample.1"}
    for j in (1, 2):
        block |= {f"cbr{j}/conv": f"conv{j}", f"cbr{j}/bn": f"bn{j}"}
    for stage, depth in enumerate(blocks, start=1):
        for i in range(depth):
            for ours, theirs in block.items():
                name = f"stage{stage}_block{i + 1}/{ours}"
                found[name] = f"layer{stage}.{i}.{theirs}"
    return found


def _source(modules: dict[str, str], path: str) -> str:
    """Return torchvision's name of the leaf at a path such as `params/head/bias`."""
    module, field = path.split("/", 1)[1].rsplit("/", 1)
    return f"{modules[module]}.{_FIELDS[field]}"


def _shapes(
    model: VGG16BN | ResNet50, arrays: Mapping[str, Any], modules: dict[str, str]
) -> Any:
    """Return the shapes of the variables, for as many channels as the arrays have."""
    first, channels = f"{next(iter(modules.values()))}.weight", 3
    if first in arrays:
        shape = _read(arrays, first).shape
        channels = shape[1] if len(shape) == 4 and shape[1] else channels
    image = jax.ShapeDtypeStruct((1, 32, 32, channels), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), image)


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in np.argsort(_AXES[len(shape)]))


def _check_names(arrays: Mapping[str, Any], wanted: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(key for key in wanted if key not in arrays)
    ignored = ".num_batches_tracked"
    extra = [k for k in arrays if k not in wanted and not str(k).endswith(ignored)]
    has = f"it has {_some(extra)} instead" if extra else "give the whole `state_dict()`"
    if missing:
        shape = wanted[missing[0]]
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise ValueError(
            f"`arrays` lacks {missing[0]!r}, expected in shape {shape}{more}; {has}."
        )
    if extra:
        raise ValueError(
            f"`arrays` must have the names of torchvision's model only, got "
            f"{_some(extra)} too; leave them out, or use the model that has them."
        )


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if names[1:] else "")


def _checked(
    arrays: Mapping[str, Any], key: str, wanted: dict[str, tuple[int, ...]]
) -> np.ndarray:
    """Return an array in float32, or raise a `ValueError` unless it is as wanted."""
    value = _read(arrays, key)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"`arrays[{key!r}]` must be floating, got {value.dtype} of shape "
            f"{value.shape}, expected {wanted[key]}; store it as float32."
        )
    if value.shape != wanted[key]:
        raise ValueError(
            f"`arrays[{key!r}]` must have shape {wanted[key]}, got {value.shape}; give "
            "`model` the sizes that the weights have."
        )
    return value.astype(np.float32, copy=False)


def _read(arrays: Mapping[str, Any], key: str) -> np.ndarray:
    try:
        return np.asarray(arrays[key])
    except _UNREADABLE as error:
        raise ValueError(
            f"`arrays[{key!r}]` must be an array of numbers, but reading it ends in: "
            f"{error}"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, Any]]:
    # Opened here: NumPy leaves a file open that it cannot read.
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as members:
                names = members.namelist()
            # What torch saves is a zip file too, of pickles.
            if not all(name.endswith(".npy") for name in names):
                raise zipfile.BadZipFile("File is not of arrays only")
            file.seek(0)
            found = np.load(file, allow_pickle=False)
        except _UNREADABLE as error:
            raise ValueError(_NO_NPZ.format(path, error)) from error
        with found:
            yield found
