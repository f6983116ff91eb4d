"""Where two manifests differ, the likeliest cause of different bits first."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What comes first explains more. A name ends a path or begins it; `jax` is what
# programs are made by, so it stands before the other versions.
_ORDER = (
    "status", "seed", "data", "config", "options", "plan", "source", "versions.jax",
    "versions.jaxlib", "versions", "device", "environment",
)  # fmt: skip
# Outcomes and clocks, and options that say where to write and what to say.
_IGNORED = (
    "format", "started", "ended", "results", "command", "signal", "error", "resumed"
)  # fmt: skip
_NO_MATTER = (
    "out", "data_dir", "log_every", "plan", "tensorboard", "record_every",
    "snapshot_every", "record_grads", "checkpoint_every", "keep_checkpoints", "weights",
    "resume",
)  # fmt: skip
_ABSENT = object()  # stands for a value that is not there
_LONGEST = 100


@dataclasses.dataclass(frozen=True)
class Cause:
    """One entry that two manifests do not agree on.

    Attributes:
        name: its path, such as "config.optimizer.momentum".
        a: its value in the first manifest as JSON, or "absent".
        b: the same in the second.
    """

    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.a)} in A, {_short(self.b)} in B"


@dataclasses.dataclass(frozen=True)
class Causes:
    """What two manifests say about why their runs may differ.

    Attributes:
        found: where they differ, the likeliest cause first.
        notes: what else is to be known, such as that one is missing.
    """

    found: tuple[Cause, ...]
    notes: tuple[str, ...]


def causes(a: Path, b: Path, plans: tuple[str, str]) -> Causes:
    """Compare the manifests of two runs.

    Args:
        a: folder of the first run; it need not have a manifest.
        b: folder of the second run.
        plans: fingerprints of their plans by their records, for runs without one.
    """
    (left, first), (right, second) = _read("A", a), _read("B", b)
    if left is None or right is None:
        left, right = ({"plan": {"fingerprint": plan}} for plan in plans)
    found = sorted(_differences("", left, right), key=_rank)
    if any(cause.name == "seed" for cause in found):
        found = [cause for cause in found if cause.name != "options.seed"]
    return Causes(tuple(found), (*first, *second))


def _read(name: str, folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a manifest, if there is one, and what to say about it."""
    path = folder / "manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, [f"{name} has no manifest: what it ran with is not known."]
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return None, [f"{path} cannot be read: what {name} ran with is not known."]
    if content.get("status") == "running":
        why = "it was killed or has not ended, and is compared as far as it went"
        return content, [f"The manifest of {name} says it is still running: {why}."]
    return content, []


def _differences(path: str, a: Any, b: Any) -> Iterator[Cause]:
    """Yield where two values differ, as deep inside as can be said."""
    if isinstance(a, dict) and isinstance(b, dict):
        ignored = {"": _IGNORED, "options": _NO_MATTER}.get(path, ())
        for key in dict.fromkeys([*a, *b]):
            if key not in ignored:
                inner = f"{path}.{key}".lstrip(".")
                values = (x.get(key, _ABSENT) for x in (a, b))
                yield from _differences(inner, *values)
    elif (left := _json(a)) != (right := _json(b)):
        yield Cause(path, left, right)


def _json(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, sort_keys=True)


def _rank(cause: Cause) -> tuple[int, int]:
    """Return the place of a cause; equal places stay in the manifests' order."""
    if cause.name.rsplit(".", 1)[-1] == "seed":
        return _ORDER.index("seed"), 0
    known = [
        place
        for place, name in enumerate(_ORDER)
        if cause.name == name or cause.name.startswith(f"{name}.")
    ]
    # Of a data set, its fingerprint says most.
    return min(known, default=len(_ORDER)), not cause.name.endswith(".fingerprint")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
