"""What a sweep varies: axes, and the words of `rjax train` that their values stand for.

An axis is an option of `rjax train` by its name, with two that have shorter ones:
`rule` is `scaling`, and `python` is no option but the interpreter that runs it, which
brings versions of JAX of its own.
"""

import dataclasses
import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence

from rjax.runs.options import TrainOptions, flag, flat

PYTHON = "python"
_SHORT = {"rule": "scaling"}
# What the sweep itself decides for every run.
_OURS = {"out": "`out`", "seed": "`seeds`", "resume": "nothing", "plan": "nothing"}
_YES, _NO = ("yes", "true", "on"), ("no", "false", "off")
_FLAG = re.compile(r"--?[a-z]")
_NO_NAME = re.compile(r"[^\w.+-]+")  # what a folder is not called


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value on each axis.

    Attributes:
        values: by the name of the axis.
    """

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """As a person reads it: "fp16, halving"; the name of what is no word itself."""
        said = [
            value if re.search("[a-z]", value) and value not in (*_YES, *_NO)
            else f"{name} {value}"
            for name, value in self.values
        ]  # fmt: skip
        return ", ".join(said) or "as given"

    @property
    def folder(self) -> str:
        """Name of a folder for it."""
        parts = (f"{name}={_NO_NAME.sub('_', value)}" for name, value in self.values)
        return ",".join(parts) or "as-given"

    @property
    def words(self) -> list[str]:
        """What it adds to the words of `rjax train`."""
        return [
            word
            for name, value in self.values
            if name != PYTHON
            for word in _words(_SHORT.get(name, name), value)
        ]

    @property
    def python(self) -> str | None:
        """The interpreter that runs it, `None` for the one that runs the sweep."""
        return dict(self.values).get(PYTHON)


def choices(settings: Mapping[str, Sequence[object]]) -> list[Choice]:
    """Return every combination of values, the last axis changing first.

    Args:
        settings: values by axis.

    Raises:
        ValueError: for an axis that there is not, or values that cannot be.

    Example:
        >>> found = choices({"precision": ["fp32", "fp16"], "devices": [1, 2]})
        >>> [choice.name for choice in found][:3]
        ['fp32, devices 1', 'fp32, devices 2', 'fp16, devices 1']
        >>> found[0].words
        ['--precision', 'fp32', '--devices', '1']
    """
    axes = {
        name.replace("-", "_"): _values(name, values)
        for name, values in settings.items()
    }
    for name in axes:
        _check(name)
    pairs = [[(name, value) for value in values] for name, values in axes.items()]
    return [Choice(found) for found in itertools.product(*pairs)]


def parse(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return values by axis, of texts such as "precision=fp32,fp16".

    Raises:
        ValueError: for a text that is built otherwise, or an axis named twice.

    Example:
        >>> parse(["rule=halving,static", "deterministic"])
        {'rule': ['halving', 'static'], 'deterministic': ['no', 'yes']}
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name in found:
            raise ValueError(f"`{name}` is given twice: name all its values at once.")
        found[name] = values.split(",") if equals else [_NO[0], _YES[0]]
        if not equals and not isinstance(_defaults().get(name), bool):
            raise ValueError(
                f"{text!r} is no setting: write an axis and its values, such as "
                "precision=fp32,fp16."
            )
    return found


def check_words(words: Sequence[str]) -> None:
    """Raise a `ValueError` for words of `rjax train` that the sweep decides."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if _FLAG.match(word) and name in ("out", "seed", "resume"):
            raise ValueError(
                f"{word!r} is decided by the sweep: leave it out and use {_OURS[name]}."
            )


def environment(settings: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the environment of all runs; on a CPU, as many devices as any asks for."""
    texts = map(str, settings.get("devices", ()))
    counts = [int(text) for text in texts if text.isdecimal()]
    found = dict(os.environ)
    if counts and "host_platform_device_count" not in found.get("XLA_FLAGS", ""):
        found.setdefault("JAX_NUM_CPU_DEVICES", str(max(counts)))
    return found


def _values(name: str, values: Sequence[object]) -> list[str]:
    if isinstance(values, str) or not values:
        raise ValueError(
            f"`{name}` must have a list of values, got {values!r}: give at least one."
        )
    texts = [
        (_YES[0] if x else _NO[0]) if isinstance(x, bool) else str(x) for x in values
    ]
    if len({*texts}) < len(texts) or "" in texts:
        raise ValueError(f"`{name}` must have different values, got {texts}.")
    for text in texts if name == PYTHON else ():
        if shutil.which(text) is None:
            raise ValueError(
                f"`{PYTHON}` {text!r} is no program: give the path of an interpreter."
            )
    return texts


def _check(name: str) -> None:
    option = _SHORT.get(name, name)
    if name == PYTHON:
        return
    if option in _OURS:
        raise ValueError(f"`{name}` cannot be varied: the sweep decides it.")
    if option not in _defaults():
        known = ", ".join(sorted({*_SHORT, PYTHON, "precision", "devices"}))
        raise ValueError(
            f"`{name}` is no axis: take {known} or any option of `rjax train` by its "
            "name."
        )


def _defaults() -> dict[str, object]:
    return flat(TrainOptions())


def _words(option: str, value: str) -> list[str]:
    if not isinstance(_defaults()[option], bool):
        return [flag(option), *value.split(" ")]
    if value not in (*_YES, *_NO):
        raise ValueError(f"`{option}` must be yes or no, got {value!r}.")
    return [flag(option if value in _YES else f"no_{option}")]
