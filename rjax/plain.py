"""Any value as plain data, for files that people and programs read: strict JSON."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def plain(value: Any) -> Any:
    """Return `value` as what JSON knows; a non-finite number becomes `None`.

    Dataclasses turn into mappings with their type's name, callables into their
    qualified name.

    Example:
        >>> plain({"scale": np.float32(2), "norm": float("nan"), "axes": (0, 1)})
        {'scale': 2.0, 'norm': None, 'axes': [0, 1]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **plain(fields)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    # Without the address, which is another in every process.
    return getattr(value, "__qualname__", re.sub(r" at 0x[0-9a-f]+", "", str(value)))


def dumps(value: Any, indent: int | None = None) -> str:
    """Return `value` as strict JSON."""
    try:  # the short way, for what is plain already
        return json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(value), indent=indent, allow_nan=False)
