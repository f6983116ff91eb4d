"""The pages in docs/, and what of them runs: snippets, their outputs, commands."""

import dataclasses
import pathlib
import re
from typing import Any

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@dataclasses.dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        name: of the file.
        text: as it is written.
    """

    name: str
    text: str

    @property
    def snippets(self) -> list[str]:
        """All Python, in order."""
        return re.findall(r"```python\n(.*?)```", self.text, re.S)

    @property
    def titled(self) -> dict[str, str]:
        """The first snippet below each second heading that has one."""
        section = r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```"
        return dict(re.findall(section, self.text, re.M | re.S))

    @property
    def outputs(self) -> list[str]:
        """What stands right below snippets as their output, in order."""
        return re.findall(r"```python\n[^`]*?```\n\n```text\n(.*?)```", self.text, re.S)

    @property
    def commands(self) -> list[str]:
        """What follows `rjax` in lines for a shell, without comments and pipes."""
        blocks = re.findall(r"```sh\n(.*?)```", self.text, re.S)
        return re.findall(r"^rjax ([^\n#|]*)", "".join(blocks), re.M)

    def run(self, snippet: str, scope: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run a snippet, after those that left `scope`, and return what it leaves."""
        scope = {"__name__": "__main__"} if scope is None else scope
        exec(compile(snippet, f"snippet of {self.name}", "exec"), scope)
        return scope


def read_page(name: str) -> Page:
    """Return a page, or skip where there are none: in a built package."""
    if not DOCS.exists():
        pytest.skip("a built package has no docs", allow_module_level=True)
    return Page(name, (DOCS / name).read_text())


def all_pages() -> dict[str, Page]:
    """Return the pages by name, or skip where there are none."""
    read_page("index.md")
    return {path.name: read_page(path.name) for path in sorted(DOCS.glob("*.md"))}
