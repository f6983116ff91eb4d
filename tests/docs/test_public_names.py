"""Every public name says what it takes, returns and raises, with a running example."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "docs" / "tools" / "public_names.py"
if not PATH.exists():
    pytest.skip("a built package has no docs", allow_module_level=True)
_spec = importlib.util.spec_from_file_location("public_names", PATH)
assert _spec and _spec.loader
public_names = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(public_names)
NAMES = public_names.everything()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_describes_itself(name):
    assert list(public_names.problems(name, NAMES[name])) == []


def test_the_list_is_whole():
    assert len(NAMES) > 120
    assert {"rjax.make_plan", "rjax.ops.cast", "rjax.stages.update"} < set(NAMES)


def _bare(value):
    """Do something."""
    return value


def _whole(value):
    """Return it.

    Args:
        value: any.

    Returns:
        The value.

    Raises:
        ValueError: never.

    Example:
        >>> 1
        1
    """
    return value


def test_what_is_missing_is_named():
    found = list(public_names.problems("bare", _bare))
    wanted = ["an example that runs", "its arguments", "what it returns", "its errors"]
    assert found == wanted
    assert list(public_names.problems("whole", _whole)) == []
    undocumented = type("Bare", (), {})
    assert list(public_names.problems("x", undocumented)) == ["a docstring"]
