import gzip
import struct

import numpy as np
import pytest

from rjax.data import load_fashion_mnist, load_mnist

NAMES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "t10k-images": "t10k-images-idx3-ubyte",
    "t10k-labels": "t10k-labels-idx1-ubyte",
}


def idx(array):
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def make(seed=0, train=20, test=7, shape=(28, 28)):
    rng = np.random.default_rng(seed)
    content = {}
    for side, n in (("train", train), ("t10k", test)):
        content[f"{side}-images"] = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        content[f"{side}-labels"] = rng.integers(0, 10, n, dtype=np.uint8)
        if content[f"{side}-images"].size:
            content[f"{side}-images"].flat[:2] = 0, 255
    return content


def write(folder, content, suffix="", names=NAMES):
    for key, array in content.items():
        data = array if isinstance(array, bytes) else idx(array)
        data = gzip.compress(data) if suffix == ".gz" else data
        (folder / f"{names[key]}{suffix}").write_bytes(data)
    return folder


def assert_holds(dataset, content):
    for (images, labels), side in ((dataset.train, "train"), (dataset.test, "t10k")):
        want = content[f"{side}-images"]
        assert images.dtype == np.float32 and labels.dtype == np.int32
        assert images.shape == (*want.shape, 1)
        np.testing.assert_array_equal(images[..., 0] * 255, want)
        np.testing.assert_array_equal(labels, content[f"{side}-labels"])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_values_are_those_of_the_files(tmp_path, suffix):
    content = make()
    dataset = load_mnist(write(tmp_path, content, suffix))
    assert dataset.name == "mnist" and dataset.num_classes == 10
    assert_holds(dataset, content)
    assert dataset.train[0].max() == 1.0 and dataset.train[0].min() == 0.0


def test_pixels_are_divided_by_255_exactly(tmp_path):
    content = make() | {"train-images": np.arange(256).reshape(1, 16, 16)}
    content |= {"train-labels": np.array([3]), "t10k-images": np.zeros((7, 16, 16))}
    images, _ = load_mnist(write(tmp_path, content)).train
    np.testing.assert_array_equal(
        images.ravel(), np.arange(256, dtype=np.float32) / np.float32(255)
    )


def test_a_path_as_text_and_other_sizes_of_images(tmp_path):
    content = make(shape=(3, 5))
    assert_holds(load_mnist(str(write(tmp_path, content))), content)


def test_plain_files_go_before_compressed_ones(tmp_path):
    write(tmp_path, make(seed=1), ".gz")
    content = make()
    assert_holds(load_mnist(write(tmp_path, content)), content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_spelling_with_a_dot(tmp_path, suffix):
    names = {key: name.replace("-idx", ".idx") for key, name in NAMES.items()}
    content = make()
    assert_holds(load_mnist(write(tmp_path, content, suffix, names)), content)


def test_fashion_has_names_of_classes(tmp_path):
    dataset = load_fashion_mnist(write(tmp_path, make()))
    assert dataset.name == "fashion-mnist"
    assert dataset.class_names is not None and len(dataset.class_names) == 10
    assert dataset.class_names[0] == "T-shirt/top"
    assert dataset.class_names[-1] == "Ankle boot"


def test_missing_folder(tmp_path, refuses):
    with refuses(f"{tmp_path}/no does not exist; give the folder"):
        load_mnist(tmp_path / "no")


def test_a_file_instead_of_a_folder(tmp_path, refuses):
    write(tmp_path, make())
    with refuses("idx3-ubyte is no folder; give the folder"):
        load_mnist(tmp_path / NAMES["train-images"])


def test_a_missing_file_is_told_by_all_its_names(tmp_path, refuses):
    write(tmp_path, make())
    (tmp_path / NAMES["t10k-labels"]).unlink()
    names = "t10k-labels-idx1-ubyte, t10k-labels.idx1-ubyte, t10k-labels-idx1-ubyte.gz"
    with refuses(rf"{tmp_path} has none of {names}, t10k-labels.idx1-ubyte.gz; down"):
        load_mnist(tmp_path)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("train-images", lambda b: b[:-1], r"truncated, .* 15696 bytes and it has 156"),
        ("t10k-images", lambda b: b + b"x", r"too long, .* 5504 bytes and it has 5505"),
        (
            "train-labels",
            lambda b: b[:7],
            r"truncated, its header has 8 bytes and .* 7",
        ),
        ("train-images", lambda b: b"", "truncated, its header has 16 bytes"),
        ("t10k-labels", lambda b: b[:-1], "truncated, its header announces 15 bytes"),
        (
            "train-images",
            lambda b: b"\0\0\x0d" + b[3:],
            "0x00000d03 instead of 0x0000080",
        ),
        ("train-labels", lambda b: b"\0\0\x08\x03" + b[4:], "0x00000803 .* 0x00000801"),
        ("train-images", lambda b: b[:3] + b"\1" + b[4:], "0x00000801 .* 0x00000803"),
        ("train-images", lambda b: b"\1" + b[1:], "is 0x01000803 instead of"),
        (
            "train-images",
            lambda b: b[:4] + b"\xff" * 12,
            "truncated, its header announ",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_idx_files(tmp_path, refuses, suffix, key, change, message):
    content = make()
    write(tmp_path, content | {key: change(idx(content[key]))}, suffix)
    with refuses(f"{tmp_path}/{NAMES[key]}{suffix} is .*{message}"):
        load_mnist(tmp_path)


def test_images_and_labels_in_each_others_place(tmp_path, refuses):
    content = make()
    swapped = content | {
        "train-images": content["train-labels"],
        "train-labels": content["train-images"],
    }
    with refuses("no IDX file of unsigned bytes in 3 dimensions.*change places"):
        load_mnist(write(tmp_path, swapped))


def test_counts_differ(tmp_path, refuses):
    content = make()
    content["train-labels"] = content["train-labels"][:-1]
    with refuses(
        r"train-labels-idx1-ubyte has 19 labels for the 20 images of .*train-i"
    ):
        load_mnist(write(tmp_path, content))


def test_label_out_of_range(tmp_path, refuses):
    content = make()
    content["t10k-labels"][5:] = 10
    with refuses(r"labels of .*t10k-l.* must lie in \[0, 10\), got 10 at index 5;"):
        load_mnist(write(tmp_path, content))


def test_the_largest_label_is_in_range(tmp_path):
    content = make()
    content["t10k-labels"][:] = 9
    assert set(load_mnist(write(tmp_path, content)).test[1]) == {9}


def test_empty_set(tmp_path, refuses):
    with refuses(r"t10k-images-idx3-ubyte is empty, .* shape \(0, 28, 28\);"):
        load_mnist(write(tmp_path, make(test=0)))


def test_sizes_differ_between_train_and_test(tmp_path, refuses):
    content = make()
    content["t10k-images"] = content["t10k-images"][:, :20]
    with refuses(rf"{tmp_path} has images of \(28, 28\) to train and of \(20, 28\)"):
        load_mnist(write(tmp_path, content))
