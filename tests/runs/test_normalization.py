"""`--normalize` and `--erase-area`: what the images become, and what is refused."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tyro")

from run_helpers import complaint
from set_writers import write_mnist

import rjax
from rjax.cli import main
from rjax.data import augment
from rjax.runs.build import build_augmentation
from rjax.runs.errors import UsageError
from rjax.runs.normalization import Normalization
from rjax.runs.options import AugmentOptions, TrainOptions, with_values
from rjax.runs.setup import prepare_job

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagenet"])
def test_it_equals_the_normalization_of_a_chain(name: str) -> None:
    known, change = augment.Normalize.preset(name), Normalization.preset(name)
    channels = len(change.offset)
    images = np.random.default_rng(0).random((2, 4, 3, channels), np.float32)
    found = change(images)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, known(None, jnp.asarray(images)))
    # Black is what augmentation fills with.
    black = change(np.zeros((1, 1, 1, channels), np.float32)).ravel()
    assert black.tolist() == list(change.offset)


def test_a_data_set_is_normalized_on_both_sides() -> None:
    data = rjax.data.load_digits()
    change = Normalization.preset("mnist")
    found = change.dataset(data)
    for side in ("train", "test"):
        (old, labels), (new, same) = getattr(data, side), getattr(found, side)
        np.testing.assert_array_equal(new, change(old))
        assert same is labels
    assert (found.name, found.num_classes) == (data.name, data.num_classes)
    assert found.fingerprint != data.fingerprint


def test_images_read_one_by_one_are_normalized_too() -> None:
    pytest.importorskip("grain")
    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 256, (4, 4, 3), np.uint8), i % 2) for i in range(10)]
    data = rjax.data.from_grain(rows, num_classes=2)
    change = Normalization.preset("imagenet")
    found = change.dataset(data)
    for i in range(len(found.train)):
        image, label = found.train[i]
        np.testing.assert_array_equal(image, change(data.train[i][0]))
        assert label == data.train[i][1] and image.dtype == np.float32


def test_a_fingerprint_that_was_told_stays() -> None:
    pytest.importorskip("grain")
    rows = [(np.zeros((4, 4, 1), np.uint8), i % 2) for i in range(10)]
    data = rjax.data.from_grain(rows, num_classes=2)
    data.train.fingerprint = "known"
    assert Normalization.preset("mnist").dataset(data).train.fingerprint == "known"


def test_other_channels_are_refused() -> None:
    data = rjax.data.load_digits()
    with pytest.raises(
        UsageError, match=r"cifar10 is for images of 3 channels, those "
    ):
        Normalization.preset("cifar10").dataset(data)
    assert main(["train", "--normalize", "imagenet"]) == 2


@pytest.mark.parametrize("black", [(0.0,), (-0.5,), (-1.0, -2.0, -3.0)])
def test_augmentation_fills_with_black(black: tuple[float, ...]) -> None:
    options = AugmentOptions(crop_pad=2, rotate=5.0, erase=0.5, erase_area=(0.1, 0.2))
    fill = black[0] if len(black) == 1 else black
    assert build_augmentation(options, black) == augment.Chain(
        augment.RandomCrop(pad=2, fill=fill),
        augment.RandomAffine(degrees=5.0, fill=fill),
        augment.RandomErasing(probability=0.5, area=(0.1, 0.2), value=fill),
    )


def test_the_area_is_that_of_torchvision_if_not_given() -> None:
    found = build_augmentation(AugmentOptions(erase=0.5))
    assert found == augment.Chain(augment.RandomErasing(0.5, area=(0.02, 0.33)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--erase-area 0.1 0.2", "--erase-area means nothing without --erase"),
        ("--erase 0.5 --erase-area 0.2 0.1", "the lower first, got 0.2 0.1"),
        ("--erase 0.5 --erase-area 0 0.1", "two numbers above 0"),
        ("--erase 0.5 --erase-area 0.1 1.5", "of at most 1"),
    ],
)
def test_an_impossible_area_is_one_line(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words.split()]) == 2
    assert sentence in complaint(capsys)


def test_black_stays_black_in_training() -> None:
    """Images that are all black stay so: whatever is padded, turned in or erased."""
    write_mnist(Path("files"))
    options = with_values(
        TrainOptions(), data="mnist", data_dir="files", normalize="mnist", hidden=(4,),
        crop_pad=2, rotate=20.0, zoom=(0.8, 1.2), erase=1.0, erase_area=(0.2, 0.3),
        batch_size=8, limit_steps=1, whole_epochs=False,
    )  # fmt: skip
    job = prepare_job(options)
    images, labels = job.train
    dark = np.broadcast_to(np.float32(job_black()), images.shape)
    job = dataclasses.replace(job, train=(dark, labels))
    (batch,) = list(job.batches())
    # Up to the rounding of an interpolation.
    np.testing.assert_allclose(batch[0], job_black(), rtol=3e-7)


def job_black() -> np.float32:
    return np.float32(Normalization.preset("mnist").offset[0])
