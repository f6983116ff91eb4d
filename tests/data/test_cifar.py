import gzip
import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest

from rjax.data import load_cifar10, load_cifar100

TEN = [f"name{i}" for i in range(10)]
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]


def make10(seed=0, counts=(3, 4, 5, 3, 2, 6)):
    """Return `(images NHWC, labels)` of each file, the last the one to test."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n))
        for n in counts
    ]


def make100(seed=0, counts=(9, 4)):
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8),
            {"fine": rng.integers(20, 100, n), "coarse": rng.integers(0, 20, n)},
        )
        for n in counts
    ]


def rows(images):
    """Return the planes, red first, as the files have them."""
    return np.stack([images[..., c].reshape(len(images), -1) for c in range(3)], 1)


def binary(images, *labels):
    columns = [np.asarray(label, np.uint8)[:, None] for label in labels]
    return np.hstack([*columns, rows(images).reshape(len(images), -1)]).tobytes()


def pickled(images, **labels):
    listed = {f"{key}".encode(): value.tolist() for key, value in labels.items()}
    data = {b"data": rows(images).reshape(len(images), -1), b"filenames": [b"a.png"]}
    return pickle.dumps(data | listed, protocol=2)


def files10(parts, version, meta=True):
    if version == "bin":
        names = [f"{name}.bin" for name in (*TRAIN, "test_batch")]
        files = {name: binary(*part) for name, part in zip(names, parts, strict=True)}
        content = "\n".join([*TEN, "", ""]).encode()
        return files | ({"batches.meta.txt": content} if meta else {})
    names = [*TRAIN, "test_batch"]
    files = {n: pickled(x, labels=y) for n, (x, y) in zip(names, parts, strict=True)}
    content = {b"label_names": [name.encode() for name in TEN], b"num_vis": 3072}
    return files | ({"batches.meta": pickle.dumps(content, 2)} if meta else {})


def files100(parts, version, meta=True):
    fine = [f"fine{i}" for i in range(100)]
    coarse = [f"coarse{i}" for i in range(20)]
    if version == "bin":
        files = {
            name: binary(x, y["coarse"], y["fine"])
            for name, (x, y) in zip(("train.bin", "test.bin"), parts, strict=True)
        }
        names = {
            "fine_label_names.txt": "\n".join(fine).encode() + b"\n",
            "coarse_label_names.txt": "\n".join(coarse).encode() + b"\n",
        }
        return files | (names if meta else {})
    files = {
        name: pickled(x, fine_labels=y["fine"], coarse_labels=y["coarse"])
        for name, (x, y) in zip(("train", "test"), parts, strict=True)
    }
    names = {"fine_label_names": fine, "coarse_label_names": coarse}
    return files | ({"meta": pickle.dumps(names, 4)} if meta else {})


def tar(files, folder):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def put(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def place(root, files, form, archive, folder):
    """Write files in one of the forms in which they may be there."""
    if form == "files":
        return put(root, files)
    if form == "folder":
        put(root / folder, files)
    elif form == "tar":
        put(root, {f"{archive}.tar": tar(files, folder)})
    else:
        put(root, {f"{archive}.tar.gz": gzip.compress(tar(files, folder), 1)})
    return root


PLACES10 = {
    "bin": ("cifar-10-binary", "cifar-10-batches-bin"),
    "py": ("cifar-10-python", "cifar-10-batches-py"),
}
PLACES100 = {
    "bin": ("cifar-100-binary", "cifar-100-binary"),
    "py": ("cifar-100-python", "cifar-100-python"),
}
FORMS = ["files", "folder", "tar", "tar.gz"]


def assert_equal(examples, images, labels):
    assert examples[0].dtype == np.float32 and examples[1].dtype == np.int32
    np.testing.assert_array_equal(examples[0], images.astype(np.float32) / 255)
    np.testing.assert_array_equal(examples[1], labels)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", ["bin", "py"])
def test_cifar10(tmp_path, version, form):
    parts = make10()
    files = files10(parts, version)
    dataset = load_cifar10(place(tmp_path, files, form, *PLACES10[version]))
    images, labels = (np.concatenate(side) for side in zip(*parts[:-1], strict=True))
    assert_equal(dataset.train, images, labels)
    assert_equal(dataset.test, *parts[-1])
    assert dataset.name == "cifar10" and dataset.num_classes == 10
    assert dataset.class_names == tuple(TEN)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", ["bin", "py"])
@pytest.mark.parametrize("kind", ["fine", "coarse"])
def test_cifar100(tmp_path, version, form, kind):
    parts = make100()
    root = place(tmp_path, files100(parts, version), form, *PLACES100[version])
    dataset = load_cifar100(root, labels=kind)
    sides = dataset.train, dataset.test
    for side, (images, labels) in zip(sides, parts, strict=True):
        assert_equal(side, images, labels[kind])
    assert dataset.num_classes == (100 if kind == "fine" else 20)
    assert dataset.class_names is not None
    assert dataset.class_names[-1] == ("fine99" if kind == "fine" else "coarse19")


@pytest.mark.parametrize("version", ["bin", "py"])
def test_names_where_the_files_have_none(tmp_path, version):
    ten = put(tmp_path / "ten", files10(make10(), version, meta=False))
    names = load_cifar10(ten).class_names
    assert names is not None and names[0] == "airplane" and names[9] == "truck"
    hundred = put(tmp_path / "hundred", files100(make100(), version, meta=False))
    assert load_cifar100(hundred).class_names is None


def test_the_same_data_in_every_form_has_the_same_fingerprint(tmp_path):
    prints = set()
    for version in ("bin", "py"):
        for form in FORMS:
            root = tmp_path / f"{version}-{form}"
            root.mkdir()
            files = files10(make10(), version)
            place(root, files, form, *PLACES10[version])
            prints.add(load_cifar10(root).fingerprint)
    assert len(prints) == 1


def test_of_several_forms_the_first_is_read(tmp_path):
    for seed, version, form in (
        (2, "py", "tar"),
        (1, "py", "folder"),
        (0, "bin", "tar"),
    ):
        place(tmp_path, files10(make10(seed), version), form, *PLACES10[version])
    assert_equal(load_cifar10(tmp_path).test, *make10(1)[-1])
    put(tmp_path, files10(make10(3), "bin"))
    assert_equal(load_cifar10(tmp_path).test, *make10(3)[-1])


def test_a_lonely_meta_file_is_no_data_set(tmp_path):
    place(tmp_path, files10(make10(), "py"), "tar.gz", *PLACES10["py"])
    (tmp_path / "batches.meta").write_bytes(b"")
    assert_equal(load_cifar10(tmp_path).test, *make10()[-1])


def test_members_written_with_a_leading_dot(tmp_path):
    files = files10(make10(), "bin")
    put(tmp_path, {"cifar-10-binary.tar": tar(files, "./cifar-10-batches-bin")})
    assert_equal(load_cifar10(tmp_path).test, *make10()[-1])


def test_nothing_there(tmp_path, refuses):
    names = "cifar-10-binary.tar.gz, .*cifar-10-batches-py/, data_batch_1.bin, data_bat"
    with refuses(f"^{tmp_path} has none of {names}"):
        load_cifar10(tmp_path)
    with refuses(f"^{tmp_path}/no does not exist"):
        load_cifar100(tmp_path / "no")


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_file(tmp_path, refuses, form):
    files = files10(make10(), "bin")
    del files["data_batch_4.bin"]
    place(tmp_path, files, form, *PLACES10["bin"])
    with refuses(f"^{tmp_path}.* has no file data_batch_4.bin; download or unpack"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: b[:-1],
            r"truncated or .* its 12291 bytes are no multiple of the 3073",
        ),
        (lambda b: b + b"x", "truncated or .* no multiple"),
        (lambda b: b"", "is empty"),
        (lambda b: b"\x0a" + b[1:], r"must lie in \[0, 10\), got 10 at index 0"),
        (lambda b: b[:3073] + b"\xff" + b[3074:], "got 255 at index 1"),
    ],
)
def test_damaged_binary_files(tmp_path, refuses, change, message):
    files = files10(make10(), "bin")
    files["data_batch_2.bin"] = change(files["data_batch_2.bin"])
    put(tmp_path, files)
    with refuses(f"{tmp_path}/data_batch_2.bin.*{message}"):
        load_cifar10(tmp_path)


def dump(**entries):
    return pickle.dumps({key.encode(): value for key, value in entries.items()}, 2)


GOOD = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no pickle of arrays, or is damaged"),
        (pickle.dumps([1, 2]), "has no entry data"),
        (dump(labels=[1, 2]), "has no entry data"),
        (dump(data=GOOD), "has no entry labels"),
        (dump(data=GOOD, labels=[1]), "has 1 labels for 2 images"),
        (dump(data=GOOD, labels=[1, "2"]), "a list of integers as its labels"),
        (dump(data=GOOD, labels=[1, 2.0]), "a list of integers as its labels"),
        (dump(data=GOOD, labels=GOOD[:, 0]), "a list of integers as its labels"),
        (dump(data=GOOD, labels=[1, 10]), r"in \[0, 10\), got 10 at index 1"),
        (dump(data=GOOD, labels=[-1, 1]), "got -1 at index 0"),
        (dump(data=GOOD, labels=[1, 10**30]), "got 1000000000000000000000000000000 at"),
        (dump(data=GOOD[:, 1:], labels=[1, 2]), r"got uint8 \(2, 3071\)"),
        (dump(data=GOOD.astype("i4"), labels=[1, 2]), r"got int32 \(2, 3072\)"),
        (dump(data=[[0] * 3072] * 2, labels=[1, 2]), "got list"),
        (pickle.dumps({"data": GOOD[:0], "labels": []}), "is empty"),
        (
            dump(data=GOOD, labels=[1, 2], x=print),
            r"builtin.*print.*refuses to run code",
        ),
    ],
)
def test_damaged_pickles(tmp_path, refuses, content, message):
    put(tmp_path, files10(make10(), "py") | {"data_batch_3": content})
    with refuses(f"{tmp_path}/data_batch_3.*{message}"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("version", ["bin", "py"])
@pytest.mark.parametrize("kind", ["fine", "coarse"])
def test_range_of_the_hundred_and_the_twenty(tmp_path, refuses, version, kind):
    classes = {"fine": 100, "coarse": 20}[kind]
    parts = make100()
    parts[1][1][kind][2] = classes - 1
    put(tmp_path, files100(parts, version))
    assert classes - 1 in load_cifar100(tmp_path, labels=kind).test[1]
    parts[1][1][kind][2] = classes
    put(tmp_path, files100(parts, version))
    with refuses(rf"/test.* must lie in \[0, {classes}\), got {classes} at index 2"):
        load_cifar100(tmp_path, labels=kind)


def test_labels_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match='`labels` must be "fine" or "coarse", got'):
        load_cifar100(tmp_path, labels="medium")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("version", "name", "content", "message"),
    [
        ("bin", "batches.meta.txt", b"a\nb\n", "has 2 names for the 10 classes"),
        ("bin", "batches.meta.txt", b"\xff\n" * 10, "no names of classes that can be"),
        ("py", "batches.meta", dump(x=1), "has no entry label_names"),
        ("py", "batches.meta", dump(label_names=3), "no names of classes that can be"),
        ("py", "batches.meta", dump(label_names=[b"a"]), "has 1 names for the 10 cla"),
    ],
)
def test_damaged_names(tmp_path, refuses, version, name, content, message):
    put(tmp_path, files10(make10(), version) | {name: content})
    with refuses(f"{tmp_path}/{name} .*{message}"):
        load_cifar10(tmp_path)


def test_damaged_archives(tmp_path, refuses):
    whole = tar(files10(make10(), "bin"), "cifar-10-batches-bin")
    packed = gzip.compress(whole, 1)
    path = tmp_path / "cifar-10-binary.tar.gz"
    for content, message in [
        (packed[: len(packed) // 2], "is truncated"),
        (packed[:-8] + b"\0" * 8, "is damaged"),
        (whole, "is no gzip file"),
        (gzip.compress(b"text" * 500), "is truncated or no tar archive"),
        (gzip.compress(whole[:5000]), "is truncated or no tar archive"),
        (gzip.compress(b""), "is truncated or no tar archive"),
        (gzip.compress(tar({"x": b""}, "other")), "has no folder cifar-10-batches-bin"),
    ]:
        path.write_bytes(content)
        with refuses(f"^{path} {message}"):
            load_cifar10(tmp_path)


def test_links_in_an_archive_lead_nowhere(tmp_path, refuses):
    (tmp_path / "secret").write_bytes(b"secret")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in (*TRAIN, "test_batch"):
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
                info.type, info.linkname = kind, str(tmp_path / "secret")
                archive.addfile(info)
    put(tmp_path, {"cifar-10-binary.tar": stream.getvalue()})
    with refuses("has no folder cifar-10-batches-bin inside"):
        load_cifar10(tmp_path)


def test_checksums(tmp_path, refuses):
    place(tmp_path, files10(make10(), "bin"), "tar.gz", *PLACES10["bin"])
    archive = tmp_path / "cifar-10-binary.tar.gz"
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{right}  {archive.name}\n")
    load_cifar10(tmp_path)
    # Still a valid archive of other data: nothing but the checksum can tell.
    place(tmp_path, files10(make10(1), "bin"), "tar.gz", *PLACES10["bin"])
    with refuses(f"^{archive} does not have the sha256"):
        load_cifar10(tmp_path)


def test_checksums_of_unpacked_files(tmp_path, refuses):
    place(tmp_path, files10(make10(), "py"), "folder", *PLACES10["py"])
    name = "cifar-10-batches-py/test_batch"
    (tmp_path / "SHA256SUMS").write_text(f"{'a' * 64}  {name}\n")
    with refuses(f"^{tmp_path}/{name} does not have the sha256"):
        load_cifar10(tmp_path)
