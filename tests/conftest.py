"""What every test gets: a platform, strict promotion, fixed seeds, few examples."""

import atexit
import glob
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator

# Read by jax when it first looks for devices, so set before anything imports it. On a
# machine with a GPU jax chooses; several workers then share it, so none may reserve it.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# What rjax keeps for its user, tuned tables and compiled programs, is not for tests to
# find or to leave. Workers and all their processes share one folder, and compile what
# they have in common once: most of the time of a test is compilation.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="rjax-tests-")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ |= {
        "XDG_CACHE_HOME": _CACHE,
        "JAX_COMPILATION_CACHE_DIR": os.path.join(_CACHE, "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# A first example compiles: no deadline fits both it and the ones after it.
settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Refuse silent promotion of dtypes and ranks, unless marked otherwise."""
    if request.node.get_closest_marker("standard_promotion"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def full_float32_products() -> Iterator[None]:
    """Compute float32 products in float32: on GPU the default is TF32."""
    with jax.default_matmul_precision("float32"):
        yield


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Collect the programs compiled while a test runs."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 1.5)(0.0)
    assert found, "jax no longer reports compilations by this name"
    found.clear()
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same global random state."""
    random.seed(0)
    np.random.seed(0)


def pytest_configure() -> None:
    """Let Ctrl-C through, which a job in the background starts without."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a test by its bytes' argument, not their contents: those may hold a clock.

    Every worker collects for itself, and all of them must find the same names.
    """
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where jax sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
