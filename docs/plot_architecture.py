"""Draw docs/architecture.svg: the packages and flat modules of src/gspax, and which imports which.

One row per layer of the table in docs/architecture.md, the highest on top. An arrow that follows from two others is
left out (the transitive reduction). Needs the standard library only, and the same sources give the same file.

Run: python docs/plot_architecture.py
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gspax"
BOX, ROW, GAP, MARGIN, WIDTH = 34, 78, 40, 20, 880  # pixels
FILL = {"pure": "#d7efe0", "other": "#dfe8f7"}
PURE = {"losses", "advantages"}


def import_graph() -> dict[str, set[str]]:
    """{package or flat module: those that it imports}, imports inside functions included."""
    graph: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if name in ("__init__", "__main__"):
            continue
        found = graph.setdefault(name, set())
        for node in _running(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "gspax":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gspax."):
                found.add(str(node.module).split(".")[1])
            elif isinstance(node, ast.Import):
                found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gspax.")}
    return {name: (found & set(graph)) - {name} for name, found in graph.items()}


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below one, but for what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from _running(child)


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the arrows that follow from two others; it must have no cycle."""

    def below(name: str) -> set[str]:
        return set().union(*({other} | below(other) for other in graph[name]), set())

    return {
        name: {each for each in found if not any(each in below(other) for other in found)}
        for name, found in graph.items()
    }


def layers() -> dict[str, int]:
    """{package or flat module: its layer}, from the table in docs/architecture.md."""
    found: dict[str, int] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d+) \| ([^|]*) \|", line):
            found |= dict.fromkeys(re.findall(r"`(\w+)(?:\.py|/)`", row[2]), int(row[1]))
    return found


def layout(arrows: dict[str, set[str]]) -> dict[str, tuple[float, float, float]]:
    """{name: (left, top, width)}. A box stands below the middle of those that import it, as far as its row has room."""
    layer = layers()
    place: dict[str, tuple[float, float, float]] = {}
    for row, level in enumerate(sorted({layer[name] for name in arrows}, reverse=True)):
        names = sorted(name for name in arrows if layer[name] == level)
        # a row whose modules import one another is drawn as importers first
        names.sort(key=lambda name: (_wanted(name, arrows, place), name))
        widths = [9.2 * len(name) + 24 for name in names]
        lefts = [_wanted(name, arrows, place) - width / 2 for name, width in zip(names, widths, strict=True)]
        for _ in range(200):  # push overlapping boxes apart, half each
            for (i, first), (j, second) in pairwise(enumerate(lefts)):
                overlap = first + widths[i] + GAP - second
                if overlap > 0:
                    lefts[i] -= overlap / 2
                    lefts[j] += overlap / 2
            lefts = [min(max(left, MARGIN), WIDTH - MARGIN - width) for left, width in zip(lefts, widths, strict=True)]
        top = MARGIN + row * ROW
        place |= {name: (round(left, 1), top, width) for name, left, width in zip(names, lefts, widths, strict=True)}
    return place


def _wanted(name: str, arrows: dict[str, set[str]], place: dict[str, tuple[float, float, float]]) -> float:
    above = [place[other] for other in arrows if name in arrows[other] and other in place]
    return sum(left + width / 2 for left, _, width in above) / len(above) if above else WIDTH / 2


def draw() -> str:
    """The picture as the text of an SVG file."""
    arrows = reduced(import_graph())
    place = layout(arrows)
    height = max(top for _, top, _ in place.values()) + BOX + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace">',
        "<title>What imports what in gspax</title>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#66718a"/></marker>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for name in sorted(arrows):
        for other in sorted(arrows[name]):
            parts.append(
                f'<path d="{_curve(place[name], place[other])}" fill="none" stroke="#66718a" marker-end="url(#tip)"/>'
            )
    for name, (left, top, width) in sorted(place.items()):
        fill = FILL["pure" if name in PURE else "other"]
        label = name + ("/" if (SOURCE / name).is_dir() else "")
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{BOX}" rx="6" fill="{fill}" stroke="#66718a"/>'
        )
        middle = f'x="{left + width / 2:.1f}" y="{top + 22}" text-anchor="middle"'
        parts.append(f'<text {middle} font-size="15" fill="#1c2333">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _curve(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    x0, y0 = start[0] + start[2] / 2, start[1] + BOX
    x1, y1 = end[0] + end[2] / 2, end[1]
    if y1 < y0:  # of one row: below both boxes
        return f"M{x0:.1f} {y0} C{x0:.1f} {y0 + 30} {x1:.1f} {y0 + 30} {x1:.1f} {y1 + BOX}"
    bend = (y1 - y0) / 2
    return f"M{x0:.1f} {y0} C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1}"


if __name__ == "__main__":
    path = ROOT / "docs" / "architecture.svg"
    path.write_text(draw(), encoding="utf-8")
    print(path.relative_to(ROOT))
