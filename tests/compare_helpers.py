"""Records written row by row, without a run, to be spoilt in chosen places."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from rjax.repro import Tensor
from rjax.repro import format as on_disk

COLUMNS = (
    ("loss", "float32"), ("scale", "float32"), ("applied", "bool"),
    ("grad_norm", "float32"), ("skipped", "int32"), ("metrics/hits", "int32"),
)  # fmt: skip
TENSORS = (
    Tensor("master", "fc/kernel", (2, 3), "float32", "W_FC_WEIGHT"),
    Tensor("compute", "fc/kernel", (2, 3), "float16", "A_FC_WEIGHT"),
    Tensor("mu", "fc/kernel", (2, 3), "float32", "M_FC_WEIGHT"),
    Tensor("step", "", (), "int32", "S_SCALAR_INT32"),
    Tensor("key", "", (), "key<fry>", ""),
)
_SIZES = {"float32": 6, "float16": 6, "int32": 1, "key<fry>": 2}


@dataclasses.dataclass
class Run:
    """A run of which every word can be changed before it is written.

    Attributes:
        layout: of the record.
        steps: number of each row.
        words: by row and column.
        digest_steps: after how many steps each row of digests was taken.
        digests: by row, tensor and lane.
        snapshots: arrays by tensor's name, by number of steps.
        manifest: `None` for none.
    """

    layout: on_disk.Layout
    steps: np.ndarray
    words: np.ndarray
    digest_steps: np.ndarray
    digests: np.ndarray
    snapshots: dict[int, dict[str, np.ndarray]]
    manifest: dict[str, Any] | None

    def column(self, name: str) -> np.ndarray:
        """Return the words of a column, to be written to."""
        return self.words[:, [name for name, _ in self.layout.columns].index(name)]

    def floats(self, name: str) -> np.ndarray:
        """Return the numbers of a float32 column, to be written to."""
        return self.column(name).view(np.float32)

    def keep(self, steps: int) -> None:
        """Forget all after a number of steps."""
        self.steps, self.words = self.steps[:steps], self.words[:steps]
        rows = self.digest_steps <= steps
        self.digest_steps, self.digests = self.digest_steps[rows], self.digests[rows]

    def write(self, folder: Path) -> Path:
        """Write the run's folder and return it."""
        inner = folder / on_disk.FOLDER
        inner.mkdir(parents=True)
        layout = self.layout
        on_disk.write_layout(inner, layout)
        for name, row, steps, words in (
            (on_disk.STEPS, layout.step_row, self.steps, self.words),
            (on_disk.DIGESTS, layout.digest_row, self.digest_steps, self.digests),
        ):
            (inner / name).write_bytes(on_disk.pack(row, steps.tolist(), words))
        for step, arrays in self.snapshots.items():
            path = on_disk.snapshot_path(inner, step)
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        if self.manifest is not None:
            (folder / "manifest.json").write_text(json.dumps(self.manifest))
        return folder


def some_run(steps: int = 20, every: int = 1, snapshots: tuple[int, ...] = ()) -> Run:
    """Return a run of random words, the same at every call."""
    rng = np.random.default_rng(0)
    layout = on_disk.Layout(COLUMNS, TENSORS, every, "f00d")
    words = np.zeros((steps, len(COLUMNS)), np.uint32)
    digest_steps = np.arange(0, steps + 1, every or steps + 1)[: None if every else 0]
    shape = (len(digest_steps), len(TENSORS), 2)
    digests = rng.integers(0, 1 << 32, shape, np.uint32)
    manifest = {"status": "finished", "seed": 0, "config": {"ema": None, "clip": 1.0}}
    arrays = {
        step: {tensor.name: _array(rng, tensor) for tensor in TENSORS}
        for step in snapshots
    }
    run = Run(layout, np.arange(steps), words, digest_steps, digests, arrays, manifest)
    run.floats("loss")[:] = 1 / np.arange(1, steps + 1)
    run.floats("grad_norm")[:] = 2.0
    run.floats("scale")[:] = 8192.0
    run.column("applied")[:] = 1
    return run


def _array(rng: np.random.Generator, tensor: Tensor) -> np.ndarray:
    dtype = {"key<fry>": "uint32"}.get(tensor.dtype, tensor.dtype)
    return (8 * rng.random(_SIZES[tensor.dtype])).astype(dtype)
