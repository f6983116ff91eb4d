"""Small sets in the published formats, easy enough to be learnt in a few steps."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np

SIZES = {"train": 130, "test": 45}


def easy_images(
    count: int, shape: tuple[int, ...], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 images and labels: a bar, or the amount of red, says which."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    images = rng.integers(0, 64, (count, *shape), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        if image.ndim == 3:
            image[..., 0] += np.uint8(18 * label)
        else:
            image[2 * label : 2 * label + 4] += 150
    return images, labels.astype(np.uint8)


def write_mnist(folder: Path, suffix: str = "") -> None:
    """Write the four IDX files, gzipped if `suffix` says so."""
    folder.mkdir(exist_ok=True)
    for name, side in (("train", "train"), ("t10k", "test")):
        images, labels = easy_images(SIZES[side], (28, 28), len(name))
        for kind, array in (("images", images), ("labels", labels)):
            header = struct.pack(
                f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape
            )
            data = header + array.tobytes()
            data = gzip.compress(data) if suffix == ".gz" else data
            path = folder / f"{name}-{kind}-idx{array.ndim}-ubyte{suffix}"
            path.write_bytes(data)


def write_cifar10(folder: Path, kind: str) -> None:
    """Write the archive of `kind` "binary" or "python"."""
    folder.mkdir(exist_ok=True)
    inside = {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"}[kind]
    names = [(f"data_batch_{n}", SIZES["train"] // 5, n) for n in range(1, 6)]
    names.append(("test_batch", SIZES["test"], 6))
    with tarfile.open(folder / f"cifar-10-{kind}.tar.gz", "w:gz") as archive:
        for name, count, seed in names:
            images, labels = easy_images(count, (32, 32, 3), seed)
            planes = images.transpose(0, 3, 1, 2).reshape(count, 3072)
            if kind == "binary":
                data = np.concatenate([labels[:, None], planes], axis=1).tobytes()
                name += ".bin"
            else:
                content = {b"data": planes, b"labels": labels.tolist()}
                data = pickle.dumps(content, protocol=2)
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def write_pictures(folder: Path) -> None:
    """Write `train/<class>/*.png` and `test/<class>/*.png` for three classes."""
    from PIL import Image

    for side, count in (("train", 36), ("test", 10)):
        images, labels = easy_images(count, (24, 28, 3), count)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / side / f"class{label // 4}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
