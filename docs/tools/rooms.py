"""Which package of rjax imports which, as a drawing made from the imports.

    python docs/tools/rooms.py > rooms.svg

Rooms stand in rows: each above all that it imports. Imports inside of
functions count as well, those for types alone do not.
"""

import ast
import pathlib
from collections.abc import Iterator, Mapping

_RJAX = pathlib.Path(__file__).parents[2] / "rjax"
_WIDE, _TALL, _GAP, _STEP = 108, 22, 12, 50
_STYLE = (
    ".room{fill:#56b4e9;fill-opacity:.25;stroke:currentColor;stroke-opacity:.6}"
    ".room-back{fill:var(--md-default-bg-color,Canvas)}"
    ".room-name{font:11.5px sans-serif;fill:currentColor;text-anchor:middle}"
    ".room-edge{stroke:currentColor;stroke-opacity:.22;fill:none}"
    ".room-group:hover .room{fill-opacity:.6}"
    ".room-group:hover .room-edge{stroke:#d55e00;stroke-opacity:1;stroke-width:1.6}"
)


def rooms() -> dict[str, set[str]]:
    """Return every room, a package or a module of rjax, with those it imports."""
    names = {
        path.stem for path in _RJAX.glob("*.py") if not path.stem.startswith("_")
    } | {path.parent.name for path in _RJAX.glob("*/__init__.py")}
    found: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for path in sorted(_RJAX.rglob("*.py")):
        room = path.relative_to(_RJAX).parts[0].removesuffix(".py")
        if room in found:
            found[room] |= (_imported(ast.parse(path.read_text())) & names) - {room}
    return found


def _imported(tree: ast.AST) -> set[str]:
    modules = []
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "rjax":
            modules += [f"rjax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    parts = [module.split(".") for module in modules]
    return {part[1] for part in parts if part[0] == "rjax" and len(part) > 1}


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those below `if TYPE_CHECKING:`, which never run."""
    yield node
    below = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        below = node.orelse
    for child in below:
        yield from _walk(child)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the rooms that import each other, directly or round about."""
    reached = {room: set(others) for room, others in graph.items()}
    for middle in graph:
        for room in graph:
            if middle in reached[room]:
                reached[room] |= reached[middle]
    return [room for room in graph if room in reached[room]]


def rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return rows by the longest chain of imports below them.

    Raises:
        ValueError: if rooms import each other.
    """
    if found := circles(graph):
        raise ValueError(f"rooms import each other: {', '.join(found)}")
    laid: list[list[str]] = []
    left = set(graph)
    while left:
        laid.append([room for room in graph if room in left and not graph[room] & left])
        left -= {*laid[-1]}
    return laid


def svg() -> str:
    """Draw the rooms; hovering over one shows what it imports."""
    graph = rooms()
    laid = rows(graph)[::-1]
    widest = max(map(len, laid))
    at = {
        room: (4 + (j + (widest - len(row)) / 2) * (_WIDE + _GAP), 6 + i * _STEP)
        for i, row in enumerate(laid)
        for j, room in enumerate(sorted(row))
    }
    width, height = widest * (_WIDE + _GAP), len(laid) * _STEP - 16
    body = "".join(_room(room, graph[room], at) for room in at)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="Imports between the {len(at)} rooms of rjax" '
        f'style="width:100%;max-width:{width}px;height:auto;display:block"><style>{_STYLE}</style>{body}</svg>'
    )


def _room(room: str, imports: set[str], at: Mapping[str, tuple[float, float]]) -> str:
    x, y = at[room]
    edges = []
    for other in sorted(imports):
        left, top = at[other]
        begin, end = (x + _WIDE / 2, y + _TALL), (left + _WIDE / 2, top)
        bend = (begin[1] + _STEP / 2, end[1] - _STEP / 2)
        edges.append(
            f'<path class="room-edge" d="M{begin[0]:g} {begin[1]:g}C{begin[0]:g} '
            f'{bend[0]:g} {end[0]:g} {bend[1]:g} {end[0]:g} {end[1]:g}"/>'
        )
    title = f"{room} imports {', '.join(sorted(imports)) or 'no other room'}"
    box = f'x="{x:g}" y="{y:g}" width="{_WIDE}" height="{_TALL}" rx="4"'
    middle = f'x="{x + _WIDE / 2:g}" y="{y + 15:g}"'
    return (
        f'<g class="room-group"><title>{title}</title>{"".join(edges)}'
        f'<rect class="room-back" {box}/><rect class="room" {box}/>'
        f'<text class="room-name" {middle}>{room}</text></g>'
    )


if __name__ == "__main__":
    print(svg())
