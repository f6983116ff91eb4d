"""Every Python snippet of the README runs as it stands."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number, capsys):
    scope: dict = {"__name__": "__main__"}
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), scope)
    printed = capsys.readouterr().out
    if "load_digits" in SNIPPETS[number]:
        accuracies = dict(re.findall(r"^(master|ema) ([\d.]+)$", printed, re.M))
        assert all(float(value) >= 0.97 for value in accuracies.values()), printed
        assert set(accuracies) == {"master", "ema"}
    if "scan(body" in SNIPPETS[number]:
        assert float(scope["reports"].loss[-1]) < 1e-2 * float(
            scope["reports"].loss[0]
        )  # fmt: skip
    if "diagnose" in SNIPPETS[number]:
        assert "'w'" in printed and "4096" not in printed


def test_first_example_is_about_thirty_lines():
    lines = [line for line in SNIPPETS[0].splitlines() if line.strip()]
    assert len(lines) <= 34


def test_where_they_differ_names_the_parameter():
    import jax.numpy as jnp

    import rjax

    scope: dict = {}
    exec(SNIPPETS[-1], scope)
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(3)}
    plan = rjax.make_plan(params, rjax.Config())
    state = rjax.init_state(plan, params)
    slot = next(s for s in plan.slots if s.path == "b")
    ulp = jnp.nextafter(jnp.float32(1), jnp.float32(2))
    other = state.replace(master=state.master.at[slot.offset + 2].set(ulp))
    assert scope["where_they_differ"](plan, state, other) == ["b"]
    assert scope["where_they_differ"](plan, state, state) == []
