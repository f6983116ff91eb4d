"""Every snippet of the page on reproducibility runs and prints what stands below."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doc_pages import DOCS, read_page

from rjax.cli import main

PAGE = read_page("reproducibility.md")

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the page shows what a CPU does"
)


def _shape(line: str) -> str:
    """Return a line without its numbers, which depend on the machine."""
    return re.sub(r"\d+(?:\.\d*)?(?:e[-+]\d+)?", "#", line).replace(" ", "")


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the snippets leave, and what they printed as "said"."""
    found: dict[str, Any] = {"__name__": "__main__"}
    said = []
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        for snippet in PAGE.snippets:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                PAGE.run(snippet, found)
            said.append(out.getvalue())
    return found | {"said": said}


def test_all_snippets_have_an_output() -> None:
    assert len(PAGE.outputs) == len(PAGE.snippets) == PAGE.text.count("```text") == 5


@pytest.mark.parametrize("place", range(5))
def test_a_snippet_prints_what_stands_below_it(
    scope: dict[str, Any], place: int
) -> None:
    printed = [_shape(line) for line in scope["said"][place].splitlines()]
    for line in PAGE.outputs[place].splitlines():
        assert _shape(line) in printed


def test_the_comparisons_say_what_the_text_says(scope: dict[str, Any]) -> None:
    found, close, norm = (scope[name] for name in ("found", "close", "norm"))
    assert found.first.step == close.first.step == norm.first.step == 23
    assert found.first.name == close.first.name == norm.first.name == "loss"
    assert close.state.step == 24 and close.state.element is not None
    assert close.gradients.step == 23
    assert norm.state is None and norm.gradients is None
    assert norm.columns[0].ulps == 1 and len(norm.columns) == 1


def test_a_rounding_is_left_out_and_kept(scope: dict[str, Any]) -> None:
    def held(x: Any) -> bool:
        return bool((x.astype(jnp.bfloat16).astype(jnp.float32) == x).all())

    assert held(scope["eager"]) and held(scope["same"])
    assert not held(scope["jitted"])
    np.testing.assert_array_equal(scope["same"], scope["eager"])
    assert float(scope["flushed"][0]) == 0.0
    assert float(scope["cast"](scope["tiny"])[0]) == 137 * 2.0**-24


def test_the_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:tests|rjax|benchmarks)/[\w/.]+)`", PAGE.text)
    assert len(named) >= 5
    for name in named:
        assert (DOCS.parent / name).exists(), name


def test_its_command_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = PAGE.commands
    asked: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "rjax.sweep_command.sweep", lambda *a, **k: asked.append((a, k)) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        main(line.split())
    (settings, out), options = asked[0]
    assert settings["rule"] == ["halving", "static", "dynamic"] and out == "sweep"
    assert options["train"] == ["--data", "digits", "--epochs", "5"]
