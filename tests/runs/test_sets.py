"""`rjax train` on files: what it learns from them, and what it says of bad ones."""

import gzip
import re
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from run_helpers import complaint, read_lines, read_manifest
from set_writers import SIZES, write_cifar10, write_mnist, write_pictures

from rjax.cli import main

pytestmark = pytest.mark.standard_promotion

TRAIN = ["train", "--no-plan", "--out", "run", "--data-dir", "files", "--data"]


def lines_fall(share: float = 0.5) -> None:
    rows = read_lines()
    assert rows[-1]["loss"] < share * rows[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_learnt_and_every_test_image_is_seen_once(
    name: str, suffix: str
) -> None:
    write_mnist(Path("files"), suffix)
    assert main([*TRAIN, name, "--epochs", "10", "--learning-rate", "0.03"]) == 0
    lines_fall()
    manifest = read_manifest()
    assert manifest["data"]["train"] == SIZES["train"]
    # Two images do not fill a fifth batch; they are left out, others in each epoch.
    assert manifest["results"]["steps"] == 10 * (SIZES["train"] // 32)
    for seen in manifest["results"]["test"].values():
        assert seen["count"] == SIZES["test"] == manifest["data"]["test"]
        assert seen["accuracy"] * SIZES["test"] == pytest.approx(
            round(seen["accuracy"] * SIZES["test"])
        )
    assert manifest["results"]["test"]["master"]["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model"),
    [("binary", "cnn --width 8"), ("python", "mlp --learning-rate 0.01")],
)
def test_networks_train_on_cifar_archives(kind: str, model: str) -> None:
    write_cifar10(Path("files"), kind)
    options = f"--model {model} --epochs 8 --batch-size 26 --eval-every 0"
    assert main([*TRAIN, "cifar10", *options.split()]) == 0
    lines_fall(0.75)
    test = read_manifest()["results"]["test"]
    assert {seen["count"] for seen in test.values()} == {SIZES["test"]}


@pytest.mark.slow
def test_a_folder_of_pictures_trains(capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(Path("files"))
    options = (
        "--image-size 20 --batch-size 12 --epochs 6 --early-stop 6 --learning-rate 0.02"
    )
    assert main([*TRAIN, "images", *options.split()]) == 0
    rows = read_lines()
    assert rows[-1]["loss"] < rows[0]["loss"]
    manifest = read_manifest()
    assert (manifest["data"]["train"], manifest["data"]["test"]) == (36, 10)
    # Of 36 pictures 4 are held out, and two batches of twelve are left.
    assert manifest["results"]["steps"] == 6 * 2
    assert {row["count"] for row in read_lines(name="evaluations")} == {4}
    assert manifest["results"]["test"]["ema"]["count"] == 10
    assert "pictures" not in capsys.readouterr().err


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def spoil_magic(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] = 9
    path.write_bytes(data)


def spoil_crc(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)


def spoil_label(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8 + 3] = 10
    path.write_bytes(data)


def swap_magic(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x01" + bytes(4)))


IDX = {
    "missing": ("train-labels-idx1-ubyte", Path.unlink, "train-labels-idx1-ubyte"),
    "truncated": ("train-images-idx3-ubyte", truncate, "bytes"),
    "magic": ("t10k-images-idx3-ubyte", spoil_magic, "0x00000803"),
    "label": ("t10k-labels-idx1-ubyte", spoil_label, "10"),
    "truncated gzip": ("train-images-idx3-ubyte.gz", truncate, "gzip"),
    "checksum": ("t10k-images-idx3-ubyte.gz", spoil_crc, "gzip"),
    "empty": ("train-labels-idx1-ubyte.gz", swap_magic, "train"),
}


@pytest.mark.parametrize("case", IDX)
def test_a_bad_idx_file_is_one_line_and_code_2(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoil, words = IDX[case]
    write_mnist(Path("files"), ".gz" if name.endswith(".gz") else "")
    spoil(Path("files", name))
    assert main([*TRAIN, "mnist"]) == 2
    line = complaint(capsys)
    assert line.startswith("rjax train: --data mnist: ")
    assert name.removesuffix(".gz") in line and words in line
    assert not Path("run").exists()


def test_a_broken_picture_is_named_and_what_was_done_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_pictures(Path("files"))
    bad = next(Path("files/train/class1").iterdir())
    bad.write_bytes(bad.read_bytes()[:60])
    options = "--batch-size 2 --epochs 3 --eval-every 0"
    assert main([*TRAIN, "images", *options.split()]) == 2
    line = complaint(capsys)
    assert str(bad) in line
    found = re.search(r"after (\d+) of 54 steps", line)
    if found:  # else it was the very first batch, which is read before the run begins
        assert len(read_lines()) == int(found[1]) < 18
        assert read_manifest()["status"] == "failed"


def test_pictures_broken_from_the_start_are_named_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_pictures(Path("files"))
    for path in sorted(Path("files/train").rglob("*.png"))[1:]:
        path.write_bytes(b"no picture")
    assert main([*TRAIN, "images"]) == 2
    assert "files/train/class" in complaint(capsys)
    assert not Path("run").exists()


def test_an_empty_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("files").mkdir()
    for name in ("mnist", "cifar10", "cifar100", "images"):
        assert main([*TRAIN, name]) == 2
        assert "files" in complaint(capsys)
    assert not Path("run").exists()
