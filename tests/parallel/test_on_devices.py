"""All that needs several devices, in one process of its own that has eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Eight devices, and programs that are compiled in half the time.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


@pytest.mark.slow
def test_on_eight_devices():
    files = sorted(map(str, (HERE / "devices").glob("*.py")))
    assert len(files) > 2
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTEST_ADDOPTS": ""}
    env["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--no-header", *files],
        cwd=HERE.parents[1],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
