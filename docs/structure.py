"""Draws the structure of the code from its own imports: `python docs/structure.py` writes docs/structure.svg.

A room is a package or a module directly below `src/hybrid3d`. Each is drawn above everything that it imports. An arrow
that follows from two others is left out.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hybrid3d"
PICTURE = Path(__file__).with_suffix(".svg")

ENGINES = {"megatron": "train", "vllm": "rollout"}
WIDTH, HEIGHT, GAP, RISE = 132, 40, 14, 44

Graph = Mapping[str, frozenset[str]]
"""By room, the rooms that it imports."""


def imported(source: str, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in the file at `path`, which is relative to the package.

    Imports inside functions and under TYPE_CHECKING count, and so does importlib.import_module("a.literal.name").
    """
    package = ["hybrid3d", *path.parent.parts]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + ([node.module] if node.module else [])
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def room_of(path: PurePosixPath) -> str:
    """Return the room of the file at `path`, which is relative to the package."""
    return path.parts[0].removesuffix(".py")


@cache
def rooms() -> Graph:
    """Return all rooms but the package's own `__init__`, with what they import of each other."""
    files = {file: PurePosixPath(file.relative_to(PACKAGE).as_posix()) for file in sorted(PACKAGE.rglob("*.py"))}
    names = {room_of(path) for path in files.values()} - {"__init__"}
    found: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for file, path in files.items():
        for _, name in imported(file.read_text(encoding="utf-8"), path):
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top == "hybrid3d" and room_of(path) in names and target in names - {room_of(path)}:
                found[room_of(path)].add(target)
    return {name: frozenset(targets) for name, targets in found.items()}


@cache
def modules() -> Graph:
    """Return all modules, as dotted names below the package, with what they import of each other."""
    paths = {file: file.relative_to(PACKAGE).with_suffix("") for file in sorted(PACKAGE.rglob("*.py"))}
    names = {file: ".".join(path.parts).removesuffix(".__init__") for file, path in paths.items()}
    known, found = set(names.values()), {}
    for file, module in names.items():
        targets = set()
        for _, name in imported(file.read_text(encoding="utf-8"), PurePosixPath(file.relative_to(PACKAGE).as_posix())):
            target = name.removeprefix("hybrid3d.")
            while name.startswith("hybrid3d.") and target and target not in known:
                target = target.rpartition(".")[0]
            targets |= {target} & known - {module}
        if file.name != "__init__.py":  # a package's face only re-exports
            found[module] = frozenset(target for target in targets if not (PACKAGE / target.replace(".", "/")).is_dir())
    return found


def reachable(graph: Graph, room: str) -> frozenset[str]:
    """Return what a room imports, directly or not."""
    found: set[str] = set()
    left = [*graph[room]]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += graph[one]
    return frozenset(found)


def floors(graph: Graph) -> dict[str, int]:
    """Return each room's floor, 0 at the bottom: one above the highest room that it imports.

    Raises:
        ValueError: rooms import each other in a circle.
    """

    @cache
    def floor(room: str) -> int:
        if room in reachable(graph, room):
            raise ValueError(f"{room} imports itself, by {', '.join(sorted(reachable(graph, room)))}")
        return max((floor(target) + 1 for target in graph[room]), default=0)

    return {room: floor(room) for room in graph}


def direct(graph: Graph) -> Graph:
    """Return the graph without the arrows that follow from two others."""
    return {
        room: frozenset(t for t in targets if not any(t in reachable(graph, other) for other in targets - {t}))
        for room, targets in graph.items()
    }


def picture(graph: Graph) -> str:
    """Return the structure as SVG: a row for each floor, an arrow for each direct import."""
    levels, rows = floors(graph), defaultdict(list)
    for room, level in sorted(levels.items()):
        rows[level].append(room)
    width = max(len(row) for row in rows.values()) * (WIDTH + GAP) + GAP
    height = len(rows) * (HEIGHT + RISE)
    places = {}
    for level, row in rows.items():
        left = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        for i, room in enumerate(row):
            places[room] = left + i * (WIDTH + GAP), RISE / 2 + (max(rows) - level) * (HEIGHT + RISE)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for room, targets in direct(graph).items():
        for target in sorted(targets):
            (x1, y1), (x2, y2) = places[room], places[target]
            start, end = (x1 + WIDTH / 2, y1 + HEIGHT), (x2 + WIDTH / 2, y2)
            bend = f"C {start[0]:.0f} {start[1] + RISE:.0f} {end[0]:.0f} {end[1] - RISE:.0f}"
            arrow = f"M {start[0]:.0f} {start[1]:.0f} {bend} {end[0]:.0f} {end[1]:.0f}"
            lines.append(f'<path d="{arrow}" fill="none" stroke="#9aa5b1"/>')
    engine_of = {room: engine for engine, room in ENGINES.items()}
    for room, (x, y) in places.items():
        fill = "#fde8c8" if room in engine_of else "#e3ecf7" if (PACKAGE / room).is_dir() else "#f4f4f4"
        box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#52606d"/>'
        label = f"{room} ({engine_of[room]})" if room in engine_of else room
        text = f'<text x="{x + WIDTH / 2:.0f}" y="{y + HEIGHT / 2 + 5:.0f}" text-anchor="middle" font-size="14">'
        lines.append(f"{box}{text}{escape(label)}</text>")
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    PICTURE.write_text(picture(rooms()), encoding="utf-8")


if __name__ == "__main__":
    main()
