"""How a record lies on disk.

A record is a folder of its own in a run's folder::

    record/layout.json     what the columns and tensors are; written first, never again
    record/steps.bin       a row a step: number, one 32-bit word a column, CRC
    record/digests.bin     a row every k steps: number, two words a tensor, CRC
    record/gradients.bin   the same of the gradients of step k, where they are digested
    record/snapshots/      NNNNNNNNNN.npz, whole states, where they were asked for

Rows have one length, are little-endian and only ever appended, so a run that was killed
leaves whole rows and at most a part of one, which a reader leaves out. Words hold raw
bits: NaN of other bits, or -0 for 0, is another word.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rjax.digests import Tensor
from rjax.files import write_atomically
from rjax.plain import dumps
from rjax.repro.errors import RecordError

FORMAT = 1
FOLDER, LAYOUT, STEPS, DIGESTS = "record", "layout.json", "steps.bin", "digests.bin"
GRADIENTS, SNAPSHOTS = "gradients.bin", "snapshots"
# Bytes that a reader holds at a time.
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the rows of a record hold.

    Attributes:
        columns: (name, dtype) of each word of a step, such as ("loss", "float32").
        tensors: of the state, in the order of their digests.
        every: steps from one row of digests to the next, 0 if there are none.
        plan: fingerprint of the plan.
        gradients: in the order of their digests; none if they are not recorded.
    """

    columns: tuple[tuple[str, str], ...]
    tensors: tuple[Tensor, ...]
    every: int
    plan: str
    gradients: tuple[Tensor, ...] = ()

    @property
    def step_row(self) -> np.dtype:
        """Of `steps.bin`."""
        return _row((len(self.columns),))

    @property
    def digest_row(self) -> np.dtype:
        """Of `digests.bin`."""
        return _row((len(self.tensors), 2))

    @property
    def gradient_row(self) -> np.dtype:
        """Of `gradients.bin`."""
        return _row((len(self.gradients), 2))


def _row(shape: tuple[int, ...]) -> np.dtype:
    return np.dtype([("step", "<u4"), ("words", "<u4", shape), ("crc", "<u4")])


def pack(row: np.dtype, steps: Sequence[int], words: np.ndarray) -> bytes:
    """Return rows as bytes, each with the CRC of what stands before it.

    Args:
        row: of `Layout`.
        steps: number of each row.
        words: uint32[rows, ...].
    """
    rows = np.zeros(len(steps), row)
    rows["step"], rows["words"] = steps, words
    rows["crc"] = [zlib.crc32(data) for data in _bodies(rows)]
    return rows.tobytes()


def _bodies(rows: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of each row before its CRC."""
    size = rows.dtype.itemsize
    data = memoryview(rows.tobytes())
    for at in range(0, len(data), size):
        yield data[at : at + size - 4]


def write_layout(folder: Path, layout: Layout) -> None:
    """Write `layout.json` into the folder of a record."""
    content = {"format": FORMAT, **vars(layout)}
    # `dataclasses.asdict` copies all it finds, which took most of the time here.
    for name in ("tensors", "gradients"):
        content[name] = [vars(tensor) for tensor in content[name]]
    write_atomically(folder / LAYOUT, dumps(content, indent=1) + "\n")


def read_layout(folder: Path) -> Layout:
    """Read `layout.json` of a record.

    Raises:
        RecordError: if there is none that this version can read.
    """
    path = folder / LAYOUT
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise RecordError(
                f"{path} has format {found['format']!r}, this version of rjax reads "
                f"{FORMAT}; compare it with the version that wrote it."
            )
        columns = tuple((str(name), str(dtype)) for name, dtype in found["columns"])
        # Records of before there were gradients lack the entry.
        tensors, gradients = (
            tuple(Tensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in x)
            for x in (found["tensors"], found.get("gradients", ()))
        )
        every, plan = int(found["every"]), str(found["plan"])
        return Layout(columns, tensors, every, plan, gradients)
    except OSError as error:
        raise RecordError(
            f"{folder.parent} has no record of a run ({path.name}: {error.strerror}); "
            "record one with `rjax train` or rjax.repro.record."
        ) from None
    except RecordError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RecordError(
            f"{path} is damaged or was not written by rjax; record the run again."
        ) from None


class Rows:
    """The rows of one file, read in chunks of bounded size.

    Args:
        path: of the file.
        row: dtype of a row.

    Attributes:
        count: number of whole rows.
        cut_off: whether a part of a row follows them, as a killed run leaves it.

    Raises:
        RecordError: if there is no such file.
    """

    def __init__(self, path: Path, row: np.dtype) -> None:
        self.path, self.row = path, row
        try:
            size = path.stat().st_size
        except OSError as error:
            raise RecordError(
                f"{path} cannot be read ({error.strerror}); record the run again."
            ) from None
        self.count, rest = divmod(size, row.itemsize)
        self.cut_off = rest > 0
        if self.count and not self._whole(self._read(self.count - 1, 1))[0]:
            # The last row may have been on its way to the disk.
            self.count, self.cut_off = self.count - 1, True

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the rows, many at a time, in order.

        Raises:
            RecordError: at a row whose CRC is wrong.
        """
        many = max(1, _CHUNK // self.row.itemsize)
        for start in range(0, self.count, many):
            yield self.read(start, min(many, self.count - start))

    def read(self, start: int, count: int) -> np.ndarray:
        """Return some rows.

        Raises:
            RecordError: at a row whose CRC is wrong.
        """
        rows = self._read(start, count)
        whole = self._whole(rows)
        if not all(whole):
            raise RecordError(
                f"{self.path} is damaged at row {start + whole.index(False)} of "
                f"{self.count} (its CRC is wrong); record the run again."
            )
        return rows

    def _read(self, start: int, count: int) -> np.ndarray:
        try:
            offset = start * self.row.itemsize
            return np.fromfile(self.path, self.row, count, offset=offset)
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read ({error}).") from None

    def _whole(self, rows: np.ndarray) -> list[bool]:
        pairs = zip(_bodies(rows), rows["crc"].tolist(), strict=True)
        return [zlib.crc32(body) == crc for body, crc in pairs]


def snapshot_path(folder: Path, step: int) -> Path:
    """Return where the state after that many steps lies, or would lie."""
    return folder / SNAPSHOTS / f"{step:010d}.npz"


def words_of(values: Any) -> np.ndarray:
    """Return uint32[rows]: the raw bits of a column of at most 32 bits a value."""
    values = np.asarray(values)
    if values.dtype == np.bool_:
        return values.astype(np.uint32)
    raw = values.view(f"u{values.dtype.itemsize}")
    return raw.astype(np.uint32)
