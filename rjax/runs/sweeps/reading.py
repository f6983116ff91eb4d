"""What one run of a sweep left, read from its folder."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rjax.repro.errors import RecordError
from rjax.repro.opened import open_record
from rjax.repro.tracks import Tracker
from rjax.runs.jsonl import whole_lines
from rjax.runs.sweeps.axes import Choice


@dataclasses.dataclass(frozen=True)
class Seen:
    """One run, as its folder tells of it.

    Attributes:
        choice: its setting.
        seed: its seed.
        folder: where it lies.
        error: why it has no results; empty if it has.
        loss: of the masters, on the test set, at the end.
        accuracy: the same, as a share.
        steps: how many were taken.
        skipped: how many of them were skipped.
        scale: loss scale of the last step.
        images_per_second: of the last epoch.
        masters: digests of the masters by number of steps.
        course: (step, loss) of the evaluations on the way.
        scales: (step, loss scale) where it changed, with the first.
        versions: of Python and the packages.
        device: what it ran on.
    """

    choice: Choice
    seed: int
    folder: str
    error: str
    loss: float = float("nan")
    accuracy: float = float("nan")
    steps: int = 0
    skipped: int = 0
    scale: float = float("nan")
    images_per_second: float = float("nan")
    masters: Mapping[int, str] = dataclasses.field(default_factory=dict)
    course: tuple[tuple[int, float], ...] = ()
    scales: tuple[tuple[int, float], ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    device: str = ""

    @property
    def line(self) -> str:
        """What came out, in a line."""
        if self.error:
            return self.error
        accuracy = f"accuracy {100 * self.accuracy:.2f} %"
        return f"loss {self.loss:.4f}, {accuracy}, {self.skipped} skipped"

    @property
    def bits(self) -> str:
        """The last digest of the masters, and after how many steps; else empty."""
        last = max(self.masters, default=None)
        return "" if last is None else f"{self.masters[last]}@{last}"


def manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a run, `None` without one that can be read."""
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read(choice: Choice, seed: int, folder: Path, error: str = "") -> Seen:
    """Return what a run left.

    Args:
        choice: its setting.
        seed: its seed.
        folder: where it lies.
        error: why it failed, if it did.
    """
    found = manifest(folder)
    if error or found is None or found.get("status") != "finished":
        return Seen(choice, seed, str(folder), error or "failed: it left no results")
    try:
        return _read(choice, seed, folder, found)
    except (KeyError, TypeError, ValueError) as problem:
        text = f"failed: its manifest lacks what is compared ({problem!r})"
        return Seen(choice, seed, str(folder), text)


def _read(choice: Choice, seed: int, folder: Path, found: dict[str, Any]) -> Seen:
    results = found["results"]
    test, last = results["test"]["master"], results["train"]
    scales, masters = _recorded(folder)
    return Seen(
        choice,
        seed,
        str(folder),
        "",
        loss=_number(test["loss"]),
        accuracy=_number(test["accuracy"]),
        steps=int(results["steps"]),
        skipped=int(last["skipped"]),
        scale=_number(last["scale"]),
        images_per_second=_number(last["images_per_second"]),
        masters=masters,
        course=_course(folder),
        scales=scales,
        versions=dict(found["versions"]),
        device=f"{found['device']['count']} x {found['device']['kind']}",
    )


def _number(value: Any) -> float:
    # JSON has no word for what is not finite.
    return float("nan") if value is None else float(value)


def _course(folder: Path) -> tuple[tuple[int, float], ...]:
    """Return (step, loss) of the evaluations within the run."""
    rows = [row for row, _ in whole_lines(folder / "evaluations.jsonl")]
    return tuple((int(row["step"]), _number(row["loss"])) for row in rows)


def _recorded(
    folder: Path,
) -> tuple[tuple[tuple[int, float], ...], dict[int, str]]:
    """Return the changes of the loss scale, and digests of the masters, by the record.

    Without one there is nothing of either.
    """
    try:
        record = open_record(folder)
        tracker = Tracker(record)
        for _ in tracker.rows():
            pass
        places = [i for i, x in enumerate(record.layout.tensors) if x.field == "master"]
        names = "\n".join(record.layout.tensors[i].name for i in places)
        masters = {
            int(step): _hash(names, words[places])
            for chunk in record.digests.chunks()
            for step, words in zip(chunk["step"], chunk["words"], strict=True)
        }
        return tracker.track().scales, masters
    except RecordError:
        return (), {}


def _hash(names: str, words: np.ndarray) -> str:
    data = names.encode() + np.ascontiguousarray(words).tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
