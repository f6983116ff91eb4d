"""Hooks of the build of the documentation.

A page that says `public: MODULE` on a line of its own gets every public name of that
module, so none can be forgotten; a name that does not describe itself ends the build.
"""

import pathlib
import re
import sys
from typing import Any

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import public_names  # noqa: E402
import rooms  # noqa: E402

_LISTED = re.compile(r"^public: (\S+)$", re.M)
_ROOT = pathlib.Path(__file__).parents[2]


def on_pre_build(config: Any) -> None:
    """Refuse to build on a public name without its description."""
    del config
    lacking = [
        f"{name} lacks {words}"
        for name, member in public_names.everything().items()
        for words in public_names.problems(name, member)
    ]
    if lacking:
        raise PluginError("docstrings: " + "; ".join(lacking))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """List names where a page asks for them, include results, draw the rooms."""
    listed = _LISTED.search(markdown)
    if listed:
        names = public_names.public_names(listed[1])
        markdown = _LISTED.sub("\n\n".join(f"::: {name}" for name in names), markdown)
    if page.file.src_uri == "api/stages.md":
        about = "::: rjax.stages\n    options:\n      members: []\n\n"
        markdown = markdown.replace(
            "::: rjax.stages.InFlight", f"{about}::: rjax.stages.InFlight"
        )
    if page.file.src_uri == "performance.md":
        text = (_ROOT / "benchmarks" / "RESULTS.md").read_text()
        text = re.sub(r"^#", "##", text, flags=re.M)
        # Its pictures and scripts lie in the repository, not in the pages.
        text = re.sub(r"!?\[([^]]*)\]\((?!http)[^)]+\)", r"\1", text)
        markdown = markdown.replace("<!-- results -->", text)
    changes = (_ROOT / "CHANGELOG.md").read_text().partition("\n")[2]
    markdown = markdown.replace("<!-- changelog -->", changes)
    return markdown.replace("<!-- rooms -->", rooms.svg())
