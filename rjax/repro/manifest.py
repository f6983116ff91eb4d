"""The manifest of a run: what it ran on, with what, and what came out.

A manifest is written when the run begins and again when it ends, each time whole: a
reader finds either the old or the new text. One that still says `running` belongs to
a run that goes on or was killed.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax

import rjax
from rjax.data.dataset import Dataset
from rjax.data.examples import num_examples
from rjax.files import write_atomically
from rjax.plain import dumps

FORMAT = 1
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# Of the environment and of JAX's configuration: what can change the bits of a run.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TF_XLA_FLAGS")
_JAX_CONFIG = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64",
    "jax_numpy_dtype_promotion", "jax_threefry_partitionable",
)  # fmt: skip


class Manifest:
    """The file `manifest.json` of one run.

    Args:
        folder: the run's folder.
        **facts: what is known at the start, as plain data.
    """

    def __init__(self, folder: Path, **facts: Any) -> None:
        self.path = folder / "manifest.json"
        self.content = {
            "format": FORMAT,
            "status": "running",
            "started": _now(),
            "ended": None,
            **describe_machine(),
            **facts,
            "results": None,
        }
        self.write()

    @classmethod
    def resumed(cls, folder: Path, step: int, **facts: Any) -> Self:
        """Go on with the manifest of a run that is taken up again at a step.

        Args:
            folder: the run's folder.
            step: how many steps it has seen.
            **facts: what is known now; of the command and of changes a list is kept.

        Raises:
            OSError: if it cannot be read or written.
            ValueError: if it is damaged.
        """
        manifest = cls.__new__(cls)
        manifest.path = folder / "manifest.json"
        content = json.loads(manifest.path.read_text())
        again = {"step": step, "at": _now()}
        again |= {name: facts.pop(name) for name in ("command", "changes")}
        content |= {"status": "running", "ended": None, "results": None}
        content |= {**describe_machine(), **facts}
        content["resumed"] = [*content.get("resumed", ()), again]
        manifest.content = {
            name: value
            for name, value in content.items()
            if name not in ("signal", "error")
        }
        manifest.write()
        return manifest

    def finish(self, status: str, results: Mapping[str, Any], **facts: Any) -> None:
        """Write the end of the run: its status and what came out."""
        self.content |= {"status": status, "ended": _now(), **facts}
        self.content["results"] = results
        self.write()

    def write(self) -> None:
        """Replace the file by the present content in one go."""
        write_atomically(self.path, dumps(self.content, indent=2) + "\n")


def describe_machine() -> dict[str, Any]:
    """Return versions, devices, environment and source revision, as plain data."""
    devices = jax.devices()
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
            "rjax": rjax.__version__,
        },
        "device": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "driver": _driver(),
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(("JAX_", "XLA_"))
        },
        "jax_config": {name: getattr(jax.config, name) for name in _JAX_CONFIG},
        "source": describe_source(Path(rjax.__file__).parent),
    }


def _driver() -> str | None:
    """Return the first line of what the NVIDIA driver says of itself, if there is one.

    That line names its version.
    """
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return None


def describe_source(package: Path) -> dict[str, Any] | None:
    """Return revision and state of the checkout that `package` lies in.

    Args:
        package: folder with an `__init__.py`.

    Returns:
        `{"revision": str, "dirty": bool}`, or `None` if git does not track the
        package (it was installed, perhaps below some other project's checkout).
    """
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    revision = _git(package, "rev-parse", "HEAD")
    if tracked is None or revision is None:
        return None
    return {"revision": revision, "dirty": _git(package, "status", "--porcelain") != ""}


def describe_data(dataset: Dataset) -> dict[str, Any]:
    """Return name, sizes and fingerprint of a data set."""
    return {
        "name": dataset.name,
        "train": num_examples(dataset.train),
        "test": num_examples(dataset.test),
        "fingerprint": dataset.fingerprint,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
