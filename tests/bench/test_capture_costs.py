"""The benchmarks of capture and of XLA's flags run, and measure what they say."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from helpers import benchmark
from jax.experimental.compilation_cache import compilation_cache

import rjax

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]

capture, flags, on_jax = map(benchmark, ("capture", "xla_flags", "throughput.on_jax"))
for part in ("record_cost", "throughput.peers_flax"):
    benchmark(part)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let rjax train what compiles fast, and leave JAX's cache where it was."""
    monkeypatch.setattr(on_jax, "make_model", lambda s: rjax.nn.CNN(s.classes, 2))
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_capture_is_measured_cold_warm_and_reloaded(small, tmp_path):
    def measure(who: str, kind: str, folder: str = "") -> tuple[Any, Any]:
        task = capture.Task(who, kind, "resnet20", 2, 8, 10, folder)
        return task, capture.measure(task)

    task, cold = measure("rjax", "cold")
    assert set(cold["seconds"]) == set(capture.PARTS)
    assert all(cold["seconds"][part] > 0 for part in ("init", "trace", "compile"))
    assert len(cold["dispatch_us"]) == capture.CALLS
    assert min(cold["dispatch_us"]) > 0
    stages = {name: kernels for name, kernels, _ in cold["stages"]}
    assert stages["forward_backward"] > 0 and "update" in cold["text"]
    assert "dispatch_us" in cold and len(capture.line(task, cold).split()) == 9

    measure("rjax", "fill", str(tmp_path))
    assert (tmp_path / "step.rjax").is_file() and list((tmp_path / "xla").iterdir())
    for who in ("rjax", "rjax-reloaded"):
        task, warm = measure(who, "warm", str(tmp_path))
        assert "dispatch_us" not in warm and warm["seconds"]["compile"] > 0
        assert len(capture.line(task, warm).split()) == 8


def test_a_model_is_measured_under_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flags, "SCANNED", 3)
    found = flags.measure("mlp", 4, 28, 1, 2)
    assert len(found["seconds"]) == 2 and min(found["seconds"]) > 0
    assert found["compile"] > 0 and found["peak"] > 10_000_000
    assert len(found["bits"]) == 12


def test_every_set_of_flags_is_one_that_xla_may_know():
    for text in flags.SETS.values():
        assert all(flag.startswith("--xla_gpu_") for flag in text.split())
