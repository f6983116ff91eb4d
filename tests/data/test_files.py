import gzip
import hashlib
import zlib

import pytest

from rjax.data.files import Folder, gunzip

TEXT = b"some text, " * 200


def sums(*lines):
    return "".join(f"{line}\n" for line in lines)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("a", "b", "below/c"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_what_sha256sum_writes_is_understood(folder):
    listed = sums(
        f"{sha256(b'a')}  a",
        f"{sha256(b'b').upper()} *./b",
        "",
        f"{sha256(b'below/c')}  below/c",
        f"{'0' * 64}  not-there",
    )
    (folder / "SHA256SUMS").write_text(listed)
    files = Folder(folder)
    for name in ("a", "b", "below/c"):
        assert files.read(folder / name) == name.encode()


@pytest.mark.parametrize("prefix", ["  ", " *", "  ./"])
@pytest.mark.parametrize("name", ["a", "b", "below/c"])
def test_a_file_that_differs_is_refused(folder, refuses, name, prefix):
    (folder / "SHA256SUMS").write_text(sums(f"{sha256(b'other')}{prefix}{name}"))
    files = Folder(folder)
    with refuses(f"{folder / name} does not have the sha256 that {folder}/SHA256SUMS"):
        files.read(folder / name)
    for other in {"a", "b", "below/c"} - {name}:
        assert files.read(folder / other) == other.encode()


def test_a_list_in_a_folder_below_counts_as_well(folder, refuses):
    (folder / "below" / "SHA256SUMS").write_text(sums(f"{'1' * 64}  c"))
    with refuses(f"{folder}/below/c does not have the sha256"):
        Folder(folder).read(folder / "below" / "c")


def test_a_list_above_the_folder_does_not(folder):
    (folder / "SHA256SUMS").write_text(sums(f"{'1' * 64}  below/c"))
    below = folder / "below"
    assert Folder(below).read(below / "c") == b"below/c"


def test_a_relative_folder(folder, refuses, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "SHA256SUMS").write_text(sums(f"{'1' * 64}  a"))
    files = Folder(".")
    with refuses("^a does not have the sha256"):
        files.read(files.find(["a"]))


@pytest.mark.parametrize(
    "line", ["abc  a", f"{'1' * 63}  a", f"SHA256 (a) = {'1' * 64}"]
)
def test_a_list_of_another_form(folder, refuses, line):
    (folder / "SHA256SUMS").write_text(sums(f"{sha256(b'a')}  a", line))
    with refuses(f"{folder}/SHA256SUMS is not as `sha256sum` writes it in line 2;"):
        Folder(folder)


def test_a_file_that_is_gone(folder, refuses):
    files = Folder(folder)
    with refuses(f"{folder}/gone cannot be read, No such file or directory; check"):
        files.read(folder / "gone")


def test_gunzip(tmp_path):
    assert gunzip(gzip.compress(TEXT), tmp_path) == TEXT
    assert (
        gunzip(gzip.compress(TEXT) + gzip.compress(b"more"), tmp_path) == TEXT + b"more"
    )


# No clock in it: a parameter must be the same in every process that collects it.
WHOLE = gzip.compress(TEXT, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT, "is no gzip file, it begins with 0x736f instead of 0x1f8b"),
        (b"", "is no gzip file, it begins with nothing"),
        (WHOLE[:-4], "is truncated"),
        (WHOLE[:-9], "is truncated"),
        (WHOLE[:5], "is truncated"),
        (WHOLE[:-8] + b"\0" * 4 + WHOLE[-4:], "is damaged, .* CRC is wrong"),
        (WHOLE[:-4] + b"\1" * 4, "is damaged"),
        (WHOLE[:12] + b"\xff" * 9 + WHOLE[21:], "is damaged"),
        (WHOLE + b"rubbish", "is damaged"),
        (b"\x1f\x8b\x07" + WHOLE[3:], "is damaged"),
    ],
)
def test_gzip_files_that_are_none(tmp_path, refuses, content, message):
    with refuses(f"{tmp_path}/x.gz {message}.*; download it again"):
        gunzip(content, tmp_path / "x.gz")


def test_one_flipped_bit_is_noticed(tmp_path, refuses):
    # Stored, not deflated: only the CRC can tell.
    packer = zlib.compressobj(0, zlib.DEFLATED, 31)
    stored = bytearray(packer.compress(TEXT) + packer.flush())
    assert gunzip(bytes(stored), tmp_path) == TEXT
    stored[100] ^= 1
    with refuses("is damaged"):
        gunzip(bytes(stored), tmp_path / "x.gz")
