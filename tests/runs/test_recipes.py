"""Recipes and augmentation: what they stand for, and who wins."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro")

from run_helpers import complaint, read_lines, read_manifest
from set_writers import write_mnist

from rjax.cli import main
from rjax.data import augment
from rjax.runs.build import build_augmentation
from rjax.runs.options import AugmentOptions, TrainOptions, flat, with_values
from rjax.runs.recipes import RECIPES, defaults, describe, without_idle
from rjax.runs.setup import prepare_job

pytestmark = pytest.mark.standard_promotion

MNIST_MLP = RECIPES["mnist-mlp"]


def test_the_recipe_of_mnist() -> None:
    values, plain = flat(MNIST_MLP), flat(TrainOptions())
    assert {name: x for name, x in values.items() if x != plain[name]} == {
        "recipe": "mnist-mlp", "data": "mnist", "hidden": (1024, 512, 256),
        "optimizer": "adamw", "ema_decay": 0.0, "crop_pad": 2, "rotate": 20.0,
        "zoom": (0.8, 1.2), "erase": 0.5, "erase_area": (0.005, 0.02),
        "normalize": "mnist", "learning_rate": 1e-3, "warmup_epochs": 5.0,
        "final_learning_rate": 1e-6, "epochs": 100, "batch_size": 200,
        "label_smoothing": 0.1, "whole_epochs": True,
    }  # fmt: skip
    said = (values["precision"], values["weight_decay"], values["schedule"])
    assert said == ("fp16", 1e-4, "cosine")
    assert build_augmentation(MNIST_MLP.augment) == augment.Chain(
        augment.RandomCrop(pad=2),
        augment.RandomAffine(degrees=20.0, scale=(0.8, 1.2)),
        augment.RandomErasing(probability=0.5, area=(0.005, 0.02)),
    )


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, None),
        ({"crop_pad": 0, "rotate": 0.0, "erase": 0.0}, None),
        (
            {"flip": True, "erase": 0.1},
            (augment.RandomHorizontalFlip(), augment.RandomErasing(0.1)),
        ),
        ({"rotate": 5.0}, (augment.RandomAffine(degrees=5.0),)),
        ({"zoom": (0.9, 1.0)}, (augment.RandomAffine(scale=(0.9, 1.0)),)),
    ],
)
def test_options_make_an_augmentation(options: dict, steps: tuple | None) -> None:
    found = build_augmentation(AugmentOptions(**options))
    assert found == (None if steps is None else augment.Chain(*steps))


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("--epochs 3", None),
        ("--recipe mnist-mlp --epochs 3", "mnist-mlp"),
        ("--epochs 3 --recipe=mnist-mlp", "mnist-mlp"),
        ("--recipe other", None),
        ("--recipe", None),
    ],
)
def test_a_recipe_is_found_among_the_words(words: str, recipe: str | None) -> None:
    assert defaults(words.split()).recipe.recipe == recipe


def test_what_a_given_option_makes_meaningless_goes() -> None:
    given = with_values(MNIST_MLP, schedule="constant", model="cnn")
    left = flat(without_idle(given))
    assert left["final_learning_rate"] is None and left["hidden"] is None
    assert left["warmup_epochs"] == 5.0 and left["epochs"] == 100
    # What was given oneself stays, and is refused where it means nothing.
    other = with_values(given, final_learning_rate=1e-5, hidden=(3,))
    assert without_idle(other) == other
    plain = with_values(TrainOptions(), schedule="constant", final_learning_rate=1e-6)
    assert without_idle(plain) == plain


def test_the_command_line_wins_over_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("rjax.cli.train", lambda options, _: seen.append(options) or 0)
    words = "--epochs 7 --recipe mnist-mlp --schedule constant --zoom 0.9 1.1"
    assert main(["train", *words.split()]) == 0
    changed = {"epochs": 7, "schedule": "constant", "zoom": (0.9, 1.1)}
    assert flat(seen[0]) == {
        **flat(MNIST_MLP), **changed, "final_learning_rate": None
    }  # fmt: skip


def test_it_is_told_what_differs() -> None:
    given = with_values(
        MNIST_MLP, hidden=(8, 4), whole_epochs=False, flip=True, seed=3, out="x",
        data_dir="d", record_every=5,
    )  # fmt: skip
    assert describe(given) == (
        "recipe mnist-mlp with --hidden 8 4 instead of 1024 512 256, --flip, "
        "--no-whole-epochs"
    )
    assert describe(MNIST_MLP) == "recipe mnist-mlp"


def test_the_help_shows_what_a_recipe_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "mnist-mlp", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "default: 100" in text and "default: 1024 512 256" in text


def test_a_recipe_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--recipe", "vgg"], ["--recipe"]):
        assert main(["train", *words]) == 2
        assert "--recipe" in complaint(capsys)
    assert main(["train", "--recipe", "mnist-mlp"]) == 2
    assert "--data mnist needs --data-dir" in complaint(capsys)


@pytest.mark.slow
def test_a_recipe_trains_with_what_is_given_beside_it() -> None:
    """The recipe as it is but for sizes: real augmentation, whole epochs, a record."""
    write_mnist(Path("files"))
    words = (
        "train --recipe mnist-mlp --data-dir files --no-plan --out run --epochs 20 "
        "--batch-size 26 --hidden 32 --learning-rate 0.01"
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(words.split()) == 0
    assert said.getvalue().startswith(
        "recipe mnist-mlp with --hidden 32 instead of 1024 512 256, --learning-rate "
        "0.01 instead of 0.001, --epochs 20 instead of 100, --batch-size 26 instead"
    )
    options = read_manifest()["options"]
    given = {"data_dir": "files", "out": "run", "plan": False, "record_every": 5}
    changed = {"hidden": [32], "learning_rate": 0.01, "epochs": 20, "batch_size": 26}
    wanted = {**flat(MNIST_MLP), **given, **changed, "zoom": [0.8, 1.2]}
    wanted["erase_area"] = [0.005, 0.02]
    assert options == wanted
    rows = read_lines()
    assert len(rows) == 20 * 5 and len(read_lines(name="evaluations")) == 20
    # A warm-up of five epochs, then down to the end.
    rates = [row["learning_rate"] for row in rows]
    assert np.argmax(rates) == 25 and rates[25] == pytest.approx(0.01)
    assert rates[-1] < 2e-5 and rows[-1]["loss"] < rows[0]["loss"]
    assert list(read_manifest()["results"]["test"]) == ["master", "compute"]


def test_steps_from_the_host_are_augmented_too() -> None:
    """As a function of seed and step; without an augmentation they are as they were."""
    options = with_values(TrainOptions(), flip=True, hidden=(4,), limit_steps=3, seed=2)
    job = prepare_job(options)
    batches = [(np.asarray(x), np.asarray(y)) for x, y in job.batches()]
    again = [np.asarray(x) for x, _ in job.batches()]
    plain = list(prepare_job(with_values(options, flip=False)).batches())
    assert len(batches) == len(plain) == 3
    flips = []
    for (images, labels), (before, same), once_more in zip(
        batches, plain, again, strict=True
    ):
        np.testing.assert_array_equal(labels, same)
        np.testing.assert_array_equal(images, once_more)
        flipped = (images != before).any(axis=(1, 2, 3))
        mirrored = before[:, :, ::-1]
        np.testing.assert_array_equal(images[flipped], mirrored[flipped])
        flips.append(flipped.tolist())
    assert 0 < np.mean(flips) < 1 and flips[0] != flips[1] != flips[2]
