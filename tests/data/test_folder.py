import hashlib
import io
import os
import sys
import warnings

import numpy as np
import pytest

from rjax.data import (
    DataError,
    batch_at,
    evaluation_batches,
    from_arrays,
    load_image_folder,
    num_examples,
    train_batches,
)

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("grain")

RNG = np.random.default_rng(0)


def draw(n=1, size=(5, 4), channels=3):
    shape = (n, *size, channels) if channels > 1 else (n, *size)
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def fill(folder, classes=("cat", "dog"), n=6, **options):
    """Write `n` pictures per class; return pixels and labels in the order expected."""
    images = draw(n * len(classes), **options)
    labels = np.repeat(np.arange(len(classes)), n)
    for i, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        save(folder / classes[label] / f"{i:03}.png", pixels)
    return images, labels


def all_of(examples):
    (batch, mask), *rest = evaluation_batches(examples, num_examples(examples))
    assert not rest and mask.all()
    return batch


def assert_holds(examples, images, labels):
    got, got_labels = all_of(examples)
    assert got.dtype == np.float32 and got_labels.dtype == np.int32
    np.testing.assert_array_equal(got, images.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(got_labels, labels)


@pytest.mark.parametrize("test_name", ["test", "val", "validation", "valid"])
def test_two_folders(tmp_path, test_name):
    train, test = fill(tmp_path / "train"), fill(tmp_path / test_name, n=2)
    dataset = load_image_folder(tmp_path)
    assert_holds(dataset.train, *train)
    assert_holds(dataset.test, *test)
    assert dataset.class_names == ("cat", "dog") and dataset.num_classes == 2
    assert dataset.name == tmp_path.name


def test_the_test_folder_goes_before_the_validation_folder(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "val", n=3)
    test = fill(tmp_path / "test", n=2)
    assert_holds(load_image_folder(tmp_path).test, *test)


def test_a_class_with_nothing_to_test_on(tmp_path):
    fill(tmp_path / "train", ("a", "b", "c"))
    images, labels = fill(tmp_path / "test", ("b",), n=2)
    assert_holds(load_image_folder(tmp_path).test, images, labels + 1)


@pytest.mark.parametrize("below", ["", "train"])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_folder_equals_the_arrays_of_its_pixels(tmp_path, below, seed):
    images, labels = fill(tmp_path / below, n=9)
    folder = load_image_folder(tmp_path, test_fraction=0.3, seed=seed)
    arrays = from_arrays((images, labels), test_fraction=0.3, seed=seed)
    assert_holds(folder.test, arrays.test[0] * 255, arrays.test[1])
    read = list(train_batches(folder.train, 4, seed, stop=9))
    want = list(train_batches(arrays.train, 4, seed, stop=9))
    for got, wanted in zip(read, want, strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    for one, other in zip(batch_at(folder.train, 4, seed, 7), want[7], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, ("car", "plane", "train"))
    assert load_image_folder(tmp_path).class_names == ("car", "plane", "train")


def test_what_counts_as_a_picture(tmp_path):
    pixels = draw(9)
    names = ["b.PNG", "a.png", "sub/deep/c.bmp", "A.Tiff", "z.ppm", "10.png", "9.png"]
    for name, picture in zip(names, pixels, strict=False):
        save(tmp_path / "x" / name, picture)
    save(tmp_path / "y" / "1.png", pixels[8])
    for name in ("x/.hidden.png", "x/.folder/1.png", ".class/1.png", "stray.png"):
        save(tmp_path / name, pixels[7])
    (tmp_path / "x" / "notes.txt").write_text("no picture")
    (tmp_path / "x" / "png").write_text("no picture")
    dataset = load_image_folder(tmp_path, test_fraction=0.2)
    assert dataset.class_names == ("x", "y")
    sides = [all_of(side) for side in (dataset.train, dataset.test)]
    found = np.concatenate([images for images, _ in sides])
    assert len(found) == 8
    # The order before the split is that of the paths.
    order = sorted(range(7), key=lambda i: names[i])
    want = from_arrays((pixels[[*order, 8]], [0] * 7 + [1]), test_fraction=0.2)
    assert_holds(dataset.train, want.train[0] * 255, want.train[1])


@pytest.mark.parametrize("extension", "png jpg jpeg bmp gif webp ppm tif tiff".split())
def test_formats(tmp_path, extension):
    pixels = np.full((8, 8, 3), (200, 30, 90), np.uint8)
    for i in range(2):
        save(tmp_path / "a" / f"{i}.{extension}", pixels)
    image, _ = load_image_folder(tmp_path, test_fraction=0.5).train[0]
    np.testing.assert_allclose(image * 255, pixels, atol=4)


def test_gray(tmp_path):
    images, labels = fill(tmp_path / "train", channels=1)
    fill(tmp_path / "test", channels=1)
    assert_holds(
        load_image_folder(tmp_path, channels=1).train, images[..., None], labels
    )
    rgb = np.repeat(images[..., None], 3, axis=-1)
    assert_holds(load_image_folder(tmp_path).train, rgb, labels)


def one_picture(tmp_path, picture, **options):
    for side in ("train", "test"):
        path = tmp_path / side / "a" / "1.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    image, _ = load_image_folder(tmp_path, **options).train[0]
    return np.round(image * 255).astype(np.uint8)


def test_color_to_gray_is_pillows(tmp_path):
    picture = Image.fromarray(draw()[0])
    got = one_picture(tmp_path, picture, channels=1)
    np.testing.assert_array_equal(got[..., 0], np.asarray(picture.convert("L")))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_modes(tmp_path, mode):
    picture = Image.fromarray(draw()[0]).convert(mode)
    want = np.asarray(picture.convert("RGB"))
    np.testing.assert_array_equal(one_picture(tmp_path, picture), want)


def test_a_palette_with_transparency(tmp_path):
    picture = Image.fromarray(draw()[0]).convert("P")
    want = np.asarray(picture.convert("RGB"))
    picture.info["transparency"] = bytes(range(200))
    np.testing.assert_array_equal(one_picture(tmp_path, picture), want)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_more_than_8_bits(tmp_path, refuses, dtype):
    for i in range(2):
        save(tmp_path / "a" / f"{i}.tiff", np.full((4, 4), 40000, dtype))
    dataset = load_image_folder(tmp_path, test_fraction=0.5)
    with refuses(rf"^{tmp_path}/a/\d\.tiff has pixels of more than 8 bits"):
        all_of(dataset.train)


def test_exif_orientation(tmp_path):
    pixels = draw(size=(6, 3))[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    for side in ("train", "test"):
        save(tmp_path / side / "a" / "1.png", pixels, exif=exif)
    image, _ = load_image_folder(tmp_path).train[0]
    assert image.shape == (3, 6, 3)
    np.testing.assert_array_equal(np.round(image * 255), np.rot90(pixels, -1))


@pytest.mark.parametrize(
    ("size", "asked", "covering"),
    [
        ((20, 10), 5, (10, 5)),
        ((10, 20), 5, (5, 10)),
        ((10, 20), (5, 5), (5, 10)),
        ((10, 20), (8, 4), (8, 16)),
        ((10, 20), (4, 16), (8, 16)),
        ((7, 5), 12, (17, 12)),
        ((33, 1), 2, (66, 2)),
    ],
)
def test_resize_and_crop(tmp_path, size, asked, covering):
    picture = Image.fromarray(draw(size=size)[0])
    got = one_picture(tmp_path, picture, image_size=asked)
    height, width = asked if isinstance(asked, tuple) else (asked, asked)
    whole = picture.resize(covering[::-1], Image.Resampling.BILINEAR)
    top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
    want = np.asarray(whole)[top : top + height, left : left + width]
    np.testing.assert_array_equal(got, want)


def test_the_size_asked_for_changes_nothing(tmp_path):
    pixels = draw(size=(6, 4))[0]
    got = one_picture(tmp_path, Image.fromarray(pixels), image_size=(6, 4))
    np.testing.assert_array_equal(got, pixels)


def test_pictures_of_several_sizes(tmp_path, refuses):
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    save(tmp_path / "train" / "dog" / "zzz.png", draw(size=(7, 4))[0])
    dataset = load_image_folder(tmp_path)
    with refuses(
        rf"^{tmp_path}/train/dog/zzz.png is 7x4 .* the first picture is 5x4; give an im"
    ):
        list(train_batches(dataset.train, 13, stop=1))
    resized = load_image_folder(tmp_path, image_size=4)
    assert all_of(resized.train)[0].shape == (13, 4, 4, 3)


def test_test_pictures_of_another_size(tmp_path, refuses):
    fill(tmp_path / "train")
    fill(tmp_path / "test", size=(4, 5))
    with refuses(rf"^{tmp_path}/test/cat/000.png is 4x5 .* is 5x4"):
        all_of(load_image_folder(tmp_path).test)


def jpeg(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "jpeg")
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"no picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, jpeg(draw()[0])[:-40]],
    ids=["empty", "text", "png", "jpeg"],
)
@pytest.mark.parametrize("through", [train_batches, evaluation_batches])
def test_a_broken_picture_is_named_by_the_loop(tmp_path, refuses, content, through):
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    broken = tmp_path / "train" / "dog" / "008.png"
    broken.write_bytes(content)
    dataset = load_image_folder(tmp_path)
    with refuses(rf"^{broken} cannot be decoded as a picture; replace or remove it\.$"):
        for _ in through(dataset.train, 2):
            pass
    with pytest.raises(DataError) as caught:
        batch_at(dataset.train, 12, 0, 0)
    assert caught.value.__cause__ is not None


def test_a_broken_first_picture_is_named_at_once(tmp_path, refuses):
    fill(tmp_path)
    (tmp_path / "cat" / "000.png").write_bytes(b"broken")
    with refuses(rf"^{tmp_path}/.*/\d+.png cannot be decoded"):
        all_of(load_image_folder(tmp_path).train)
        all_of(load_image_folder(tmp_path).test)


def test_a_warning_of_a_decoder_names_the_picture_too(tmp_path, refuses, monkeypatch):
    images = fill(tmp_path)[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", images[0][..., 0].size - 1)
    with warnings.catch_warnings(), refuses(rf"^{tmp_path}/.*png cannot be decoded"):
        warnings.simplefilter("error")
        load_image_folder(tmp_path)


def test_a_picture_that_is_gone(tmp_path, refuses):
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    dataset = load_image_folder(tmp_path)
    gone = tmp_path / "train" / "cat" / "003.png"
    gone.unlink()
    with refuses(rf"^{gone} cannot be read, No such file or directory"):
        all_of(dataset.train)


def test_a_link_to_nothing(tmp_path, refuses):
    fill(tmp_path)
    os.symlink("nowhere", tmp_path / "cat" / "link.png")
    with refuses(rf"^{tmp_path}/cat/link.png cannot be read"):
        load_image_folder(tmp_path)


def test_checksums(tmp_path, refuses):
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    path = tmp_path / "train" / "dog" / "007.png"
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "SHA256SUMS").write_text(f"{right}  train/dog/007.png\n")
    all_of(load_image_folder(tmp_path).train)
    save(path, draw()[0])
    with refuses(rf"^{path} does not have the sha256 that {tmp_path}/SHA256SUMS"):
        all_of(load_image_folder(tmp_path).train)


def test_layouts_that_are_none(tmp_path, refuses):
    with refuses(f"^{tmp_path}/no does not exist"):
        load_image_folder(tmp_path / "no")
    with refuses(f"^{tmp_path} has no folders, of which each would be a class"):
        load_image_folder(tmp_path)
    (tmp_path / "test" / "a").mkdir(parents=True)
    with refuses(f"^{tmp_path} has a folder test and no folder train"):
        load_image_folder(tmp_path)
    (tmp_path / "train").mkdir()
    with refuses(f"^{tmp_path}/train has no folders"):
        load_image_folder(tmp_path)
    (tmp_path / "train" / "a").mkdir()
    with refuses(f"^{tmp_path}/train has no pictures in its folders; .*.png, .jpg"):
        load_image_folder(tmp_path)
    save(tmp_path / "train" / "a" / "1.png", draw()[0])
    with refuses(f"^{tmp_path}/test has no pictures in its folders"):
        load_image_folder(tmp_path)
    save(tmp_path / "test" / "b" / "1.png", draw()[0])
    with refuses(f"^{tmp_path}/test/b is a class that has no folder to train on; .* a"):
        load_image_folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 4}, "`channels` must be 1 or 3, got 4"),
        ({"image_size": 0}, "`image_size` must be a positive int or a pair"),
        ({"image_size": (3, -1)}, r"`image_size` must .* got \(3, -1\)"),
        ({"image_size": (3, 3, 3)}, "`image_size` must be"),
        ({"image_size": 2.5}, "`image_size` must be .* got 2.5"),
        ({"test_fraction": 1.0}, "`test_fraction` must be in"),
        ({"test_fraction": 0.01}, "`test_fraction` must leave examples on both sides"),
        ({"seed": -1}, "`seed` must be in"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    fill(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_image_folder(tmp_path, **options)


def test_fingerprint(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    prints = [load_image_folder(tmp_path).fingerprint for _ in range(2)]
    prints.append(load_image_folder(tmp_path, channels=1).fingerprint)
    prints.append(load_image_folder(tmp_path, image_size=(5, 4)).fingerprint)
    prints.append(load_image_folder(tmp_path, image_size=4).fingerprint)
    os.rename(tmp_path / "train/dog/007.png", tmp_path / "train/dog/7.png")
    prints.append(load_image_folder(tmp_path).fingerprint)
    with open(tmp_path / "test/dog/007.png", "ab") as file:
        file.write(b"x")
    prints.append(load_image_folder(tmp_path).fingerprint)
    os.rename(tmp_path / "train/dog/7.png", tmp_path / "train/cat/7.png")
    prints.append(load_image_folder(tmp_path).fingerprint)
    assert prints[0] == prints[1] and len(set(prints)) == len(prints) - 1


def test_fingerprint_does_not_depend_on_where_the_folder_is(tmp_path):
    fill(tmp_path / "one")
    first = load_image_folder(tmp_path / "one").fingerprint
    assert load_image_folder(tmp_path / "one", seed=1).fingerprint != first
    os.rename(tmp_path / "one", tmp_path / "two")
    assert load_image_folder(tmp_path / "two").fingerprint == first


@pytest.mark.parametrize(("module", "name"), [("PIL", "Pillow"), ("grain", "grain")])
def test_missing_packages_name_the_extra(tmp_path, monkeypatch, module, name):
    fill(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {name}, .*rjax\[data\]"):
        load_image_folder(tmp_path)


def test_fingerprint_has_the_labels(tmp_path):
    fill(tmp_path / "train")
    fill(tmp_path / "test")
    first = load_image_folder(tmp_path).test.fingerprint
    fill(tmp_path / "train", ("ant",))  # every other class moves up
    assert load_image_folder(tmp_path).test.fingerprint != first


@pytest.mark.parametrize("name", ["", "cat", "cat/deep"])
def test_a_folder_that_may_not_be_read(tmp_path, refuses, monkeypatch, name):
    fill(tmp_path)
    save(tmp_path / "cat" / "deep" / "1.png", draw()[0])
    scan = os.scandir

    def scandir(path):
        if os.fspath(path) == os.path.join(tmp_path, name).rstrip("/"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with refuses(rf"^{tmp_path}.* cannot be read, Permission denied; check"):
        load_image_folder(tmp_path)
