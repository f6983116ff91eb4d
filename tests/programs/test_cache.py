"""The compilation cache: the next process finds it, also when switched on late."""

import jax
import pytest
from helpers import fresh_process

import rjax
from rjax.programs import cache

KNOWN = "jax_compilation_cache_dir"
ON = {"JAX_ENABLE_COMPILATION_CACHE": "true"}

STEP = """
import sys, time
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1)(1.0)  # JAX has decided by now that there is no cache
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if "cache_hits" in event else None
)
import rjax
from helpers import BOTH, both, config, digest, make_rig

rig = make_rig(BOTH, config())
state = rig.state()
hits.clear()
step = rjax.capture(rig.eager, state, both(1.0), cache={cache!r})
found = len(hits)
state, report = step(state, both(1.0))
print(found, digest(state))
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", ["folder", "default"])
def test_the_second_process_finds_the_step(given, tmp_path):
    folder = tmp_path / "kept"
    where = {"XDG_CACHE_HOME": str(tmp_path / "home"), **ON, KNOWN.upper(): ""}
    script = STEP.format(cache=str(folder) if given == "folder" else True)
    first, second = (fresh_process(script, **where).split() for _ in range(2))
    assert (first[0], second[0]) == ("0", "1") and first[1] == second[1]
    kept = folder if given == "folder" else tmp_path / "home" / "rjax" / "xla"
    assert any("jit_train_step" in path.name for path in kept.iterdir())


def test_another_folder_is_taken_from_then_on(tmp_path):
    script = (
        "import jax, rjax\n"
        f"for name in ('one', 'two'):\n"
        f"    rjax.enable_compilation_cache({str(tmp_path)!r} + '/' + name)\n"
        "    jax.jit(lambda x: x + len(name))(1.0)"
    )
    fresh_process(script, **ON)
    for name in ("one", "two"):
        assert [path for path in (tmp_path / name).iterdir() if "jit" in path.name]


def test_a_folder_that_jax_knows_already_is_kept(tmp_path):
    script = (
        "import rjax, jax; print(rjax.enable_compilation_cache()); "
        "print(jax.config.jax_compilation_cache_dir)"
    )
    folder = str(tmp_path / "mine")
    said = fresh_process(script, **{KNOWN.upper(): folder}).split()
    assert said == [folder, folder] and (tmp_path / "mine").is_dir()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    before = getattr(jax.config, KNOWN)
    with pytest.raises(ValueError, match="cannot hold a compilation cache .*; give a"):
        rjax.enable_compilation_cache(tmp_path / "file" / "below")
    assert getattr(jax.config, KNOWN) == before


def test_the_default_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "rjax" / "xla"
