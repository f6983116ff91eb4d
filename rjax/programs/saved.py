"""A compiled step as a file: StableHLO under a stamp, whole or refused.

Layout: a line that says what it is, eight bytes with the length of a JSON header, the
header, the program as `jax.export` serializes it, and the SHA-256 of all of that.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

import rjax
from rjax.config import Config
from rjax.files import write_atomically
from rjax.plain import dumps, plain
from rjax.plan import Plan
from rjax.programs import static
from rjax.programs.signature import Leaf, Signature

FORMAT = 1
_MAGIC = b"rjax captured program\n"
_DAMAGED = "{} is damaged or cut short; capture the step and save it again."
_HASH = hashlib.sha256().digest_size
_STAMP = ("versions", "platform", "device", "plan", "config")
# Where a schedule is looked at: a function says nothing of itself, its values do.
_COUNTS = (0, 1, 2, 5, 10, 100, 1000, 10_000, 100_000)


def make_stamp(plan: Plan | None) -> dict[str, Any]:
    """Return what a saved program must agree with, as plain data."""
    device = jax.devices()[0]
    return {
        "versions": {m.__name__: m.__version__ for m in (jax, jaxlib, rjax)},
        "platform": device.platform,
        "device": device.device_kind,
        "plan": plan.fingerprint if plan else None,
        "config": describe_config(plan.config) if plan else None,
    }


def describe_config(config: Config) -> dict[str, Any]:
    """Return what of a configuration is compiled into a step, as plain data.

    A learning rate that is a number and the first loss scale are not: they lie in the
    state. A schedule is described by some of its values.
    """
    found = plain(dataclasses.replace(config, scaling=config.scale_rule))
    found["learning_rate"] = None
    if config.schedule is not None:
        rates = jax.jit(jax.vmap(config.schedule))(jnp.array(_COUNTS, jnp.int32))
        found["learning_rate"] = rates.tolist()
    if isinstance(found["scaling"], dict):  # a rule of the user's may be no dataclass
        for start in ("initial", "scale"):
            found["scaling"].pop(start, None)
    return found


def write(
    path: Path,
    name: str,
    signature: Signature,
    stamp: Mapping[str, Any],
    exported: jax.export.Exported,
) -> Path:
    """Write a program to a file; see `Captured.save`."""
    try:
        program = bytes(exported.serialize())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{name}` returns what cannot be kept ({_first(error)}); return arrays in "
            "dicts, lists and tuples, or register the type with jax.export."
        ) from error
    header = dumps(
        {"format": FORMAT, "name": name, **stamp, **dataclasses.asdict(signature)}
    ).encode()
    content = b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, program])
    write_atomically(path, content + hashlib.sha256(content).digest())
    return path


def read(
    path: Path, plan: Plan | None
) -> tuple[str, Signature, dict[str, Any], jax.export.Exported]:
    """Read and check a program; see `load_captured`."""
    header, program = _parts(path)
    try:
        if header["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {header['format']}, this version of rjax reads "
                f"{FORMAT}; capture the step and save it again."
            )
        # A file of before there were any has no mesh.
        stamp = {key: header[key] for key in _STAMP} | {"mesh": header.get("mesh")}
        state, batch = (
            tuple(Leaf(x["name"], tuple(x["shape"]), x["dtype"]) for x in header[side])
            for side in ("state", "batch")
        )
        name = str(header["name"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(_DAMAGED.format(path)) from None
    _check_stamp(path, stamp, plan)
    try:
        exported = jax.export.deserialize(bytearray(program))
    except Exception:  # whatever its reader makes of other bytes
        raise ValueError(_DAMAGED.format(path)) from None
    static.check(exported.mlir_module(), str(path))
    if len(exported.in_avals) != len(state) + len(batch):
        raise ValueError(_DAMAGED.format(path))
    return name, Signature(state, batch), stamp, exported


def _parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and program of a file whose bytes are those that were written."""
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(f"{path} is no captured program; save one with `.save`.")
    content, digest = content[:-_HASH], content[-_HASH:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError(_DAMAGED.format(path))
    start = len(_MAGIC) + 8
    stop = start + int.from_bytes(content[len(_MAGIC) : start], "little")
    try:
        return json.loads(content[start:stop]), content[stop:]
    except ValueError:
        raise ValueError(_DAMAGED.format(path)) from None


def _check_stamp(path: Path, stamp: Mapping[str, Any], plan: Plan | None) -> None:
    """Refuse a program from elsewhere, naming the first difference."""
    here = json.loads(dumps(make_stamp(plan)))
    for key in ("versions", "platform", "device"):
        if stamp[key] != here[key]:
            raise ValueError(
                f"{path} was saved for {key} {_said(stamp[key])}, this is "
                f"{_said(here[key])}; capture the step and save it again."
            )
    if plan is None:
        return
    if stamp["plan"] is None:
        raise ValueError(
            f"{path} was saved without a plan, so that it cannot be compared; pass "
            "`plan=` to rjax.capture, or none here."
        )
    if stamp["plan"] != here["plan"]:
        raise ValueError(
            f"{path} was saved for the plan {stamp['plan'][:12]}, `plan` is "
            f"{here['plan'][:12]}; capture the step with this plan."
        )
    for key, value in here["config"].items():
        if (old := stamp["config"].get(key)) != value:
            raise ValueError(
                f"{path} was saved with {key} {_said(old)}, `plan` has {_said(value)}; "
                "capture the step with this plan."
            )


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
