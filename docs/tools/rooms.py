"""Which package of rjax imports which, as a drawing made from the imports.

    python docs/tools/rooms.py > rooms.svg

Rooms stand in rows: each above all that it imports. Imports inside of
functions count as well, those for types alone do not.
"""

import ast
import pathlib

_RJAX = pathlib.Path(__file__).parents[2] / "rjax"
_WIDE, _TALL, _GAP, _STEP = 108, 22, 12, 50
_STYLE = (
    ".room{fill:#56b4e9;fill-opacity:.25;stroke:currentColor;stroke-opacity:.6}"
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "rjax":
            modules += [f"rjax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    parts = [module.split(".") for module in modules]
    return {part[1] for part in parts if part[0] == "rjax" and len(part) > 1}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the rooms that import each other, directly or round about."""
    reached = {room: set(others) for room, others in graph.items()}
    for middle in graph:
        for room in graph:
            if middle in reached[room]:
                reached[room] |= reached[middle]
    return [room for room in graph if room in reached[room]]


def rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return rooms by the longest chain of imports below them."""
    depth: dict[str, int] = {}
    left = dict(graph)
    circle = set(circles(graph))
    while left:
        ready = [room for room in left if not (graph[room] & left.keys()) - {room}]
        # Of a circle, the room that waits for the fewest goes first.
        ready = ready or [
            min(circle & left.keys(), key=lambda r: len(graph[r] & left.keys()))
        ]
        for room in ready:
            below = [depth[other] + 1 for other in graph[room] if other in depth]
            depth[room] = max(below, default=0)
        left = {room: left[room] for room in left if room not in depth}
    found: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for room, place in depth.items():
        found[place].append(room)
    return found


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


def _room(room: str, imports: set[str], at: dict[str, tuple[float, float]]) -> str:
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
        f'<rect class="room" {box}/><text class="room-name" {middle}>{room}</text></g>'
    )


if __name__ == "__main__":
    print(svg())
