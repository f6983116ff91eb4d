"""What a checkpoint says of its plan and configuration, and what has changed since."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rjax.config import Config
from rjax.plain import dumps
from rjax.plan import Plan

_ABSENT = object()


def describe(plan: Plan) -> dict[str, Any]:
    """Return layout and configuration as plain data, as they are read back."""
    return json.loads(
        dumps(
            {
                "config": _config(plan.config),
                "plan": {
                    "fingerprint": plan.fingerprint,
                    "elements": plan.n,
                    "bias_like": plan.bias_like,
                    "precision": plan.config.precision,
                    "gates": dataclasses.asdict(plan.gates),
                    "slots": [
                        {
                            "path": slot.path,
                            "shape": slot.shape,
                            "role": str(slot.role),
                            "offset": slot.offset,
                            "half": slot.half,
                        }
                        for slot in plan.slots
                    ],
                    "frozen": [_leaf(leaf) for leaf in plan.frozen],
                    "batch_stats": [_leaf(leaf) for leaf in plan.batch_stats],
                },
            }
        )
    )


def _leaf(leaf: Any) -> dict[str, Any]:
    return {"path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype}


def _config(config: Config) -> Any:
    # With the rule that `None` stands for.
    return dataclasses.replace(config, scaling=config.scale_rule)


def layout_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in what two layouts differ, none if they are one and the same.

    Args:
        saved: the "plan" of a checkpoint.
        now: that of :func:`describe`.
    """
    if saved["fingerprint"] == now["fingerprint"]:
        return []
    words = []
    for what in ("slots", "frozen", "batch_stats"):
        old, new = ({x["path"]: x for x in side[what]} for side in (saved, now))
        for path in dict.fromkeys([*old, *new]):
            words += _entry(path, old.get(path), new.get(path))
    if saved["precision"] != now["precision"]:
        words.append(f"precision {saved['precision']}, not {now['precision']}")
    for name, is_on in now["gates"].items():
        if (was_on := saved["gates"].get(name)) != is_on:
            words.append(f"{name} is {'in it alone' if was_on else 'not in it'}")
    return words or ["its slots lie elsewhere"]


def _entry(path: str, old: Any, new: Any) -> Iterator[str]:
    if new is None:
        yield f"{path} is in it alone"
    elif old is None:
        yield f"{path} is not in it"
    else:
        for what in old:
            if what != "offset" and old[what] != new.get(what):
                yield f"{path} has {what} {old[what]}, not {new.get(what)}"


def changes(saved: Any, now: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, "old -> new") for every value that two configurations differ in.

    Example:
        >>> list(changes({"clip": None, "ema": {"decay": 0.9}}, {"clip": None,
        ...     "ema": {"decay": 0.99}}))
        [('ema.decay', '0.9 -> 0.99')]
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*saved, *now]):
            inner = f"{path}.{key}".lstrip(".")
            yield from changes(saved.get(key, _ABSENT), now.get(key, _ABSENT), inner)
    elif saved != now:
        yield path, f"{_text(saved)} -> {_text(now)}"


def _text(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
