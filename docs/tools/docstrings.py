"""Docstrings as the documentation shows them: examples as code, names as names."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^Example:\n(?=(?:.|\n)*?>>>)", re.M)


class Readable(griffe.Extension):
    """Rewrite what Sphinx knows and Markdown does not."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub("Examples:\n", text)
