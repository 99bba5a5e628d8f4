"""The picture of the house, drawn from the imports: the pair on top, the wings below, and who imports whom. Called by
hand, and by the test that compares the picture with the imports:

    python -m tools.house > docs/images/house.svg
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = (
    ("train_fsdp",),
    ("utils",),
    ("plan",),
    ("report",),
    ("state",),
    ("data", "model"),
    ("job",),
    ("flags",),
    ("base",),
)
ABOUT = {
    "train_fsdp": "the recipe: mesh, model, sharding, optimizer, step, loop",
    "utils": "packing, FLOP and MFU math, the clock",
    "plan": "what a run will need and give",
    "report": "what a run shows",
    "state": "checkpoints and exports",
    "data": "from text to windows",
    "model": "from config to step",
    "job": "ranks, signals, folders, the terminal",
    "flags": "the command line",
    "base": "what everything stands on",
}
WIDTH, LEFT, RIGHT, GAP, LINE = 1140, 20, 870, 14, 17  # pixels
INK, QUIET, PAPER, BOX, WRONG = "#1f2328", "#656d76", "#ffffff", "#f6f8fa", "#cf222e"


def room_of(name: str) -> str | None:
    """The row of the picture to which a module belongs: a wing, or a file of the pair."""
    parts = name.split(".")
    if parts[0] == "harness":
        return parts[1] if len(parts) > 1 else None
    return parts[0] if parts[0] in ("train_fsdp", "utils") else None


def files_of(room: str) -> list[pathlib.Path]:
    if room in ("train_fsdp", "utils"):
        return [ROOT / f"{room}.py"]
    return [path for path in sorted((ROOT / "harness" / room).rglob("*.py")) if path.name != "__init__.py"]


def imports_of(path: pathlib.Path) -> set[str]:
    """The rooms that a file imports from, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    rooms = {room_of(name) for name in names}
    return {room for room in rooms if room in ABOUT}


def imported_rooms(room: str) -> set[str]:
    """The other rooms that a room imports from."""
    found = set()
    for path in files_of(room):
        found |= imports_of(path)
    return found - {room}


def text(x: float, y: float, words: str, size: int = 13, color: str = INK, weight: str = "normal") -> str:
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}">{escaped}</text>'


def wrapped(words: list[str], limit: int) -> list[str]:
    """Words in lines of at most `limit` characters."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 3 + len(word) > limit:
            lines.append("")
        lines[-1] += (" · " if lines[-1] else "") + word
    return lines


def draw_box(room: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """A room with its modules; what it is made of, and its height."""
    files = files_of(room)
    modules = []
    if room not in ("train_fsdp", "utils"):
        base = ROOT / "harness" / room
        names = (path.relative_to(base) for path in files)
        # a folder whose files are found by being there, such as readers, is one name
        modules = list(dict.fromkeys(name.stem if len(name.parts) == 1 else f"{name.parts[0]}/" for name in names))
    rows = wrapped(modules, int((width - 24) / 6.6)) if modules else []
    height = 52 + LINE * len(rows)
    title = f"{room}.py" if not modules else room
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{BOX}" stroke="#d0d7de"/>']
    parts.append(text(x + 12, y + 22, title, 15, weight="600"))
    parts.append(text(x + 12, y + 40, ABOUT[room], 12, QUIET))
    parts += [text(x + 12, y + 58 + LINE * row, words, 12) for row, words in enumerate(rows)]
    return parts, height


def picture() -> str:
    parts, middle, y = [], {}, 44
    for row in ROWS:
        width = (RIGHT - LEFT - GAP * (len(row) - 1)) / len(row)
        heights = []
        for column, room in enumerate(row):
            box, height = draw_box(room, LEFT + column * (width + GAP), y, width)
            parts += box
            heights.append(height)
        for column, room in enumerate(row):  # neighbours one below the other, so that their dots stand apart
            middle[room] = y + max(heights) * (column + 1) / (len(row) + 1)
        y += max(heights) + GAP
    order = [room for row in ROWS for room in row]
    lane = {room: RIGHT + 30 + 27 * index for index, room in enumerate(order[:-1])}
    parts.append(text(RIGHT + 24, 28, "imports: from the ring to each dot", 12, QUIET))
    for room in order[:-1]:
        targets = imported_rooms(room)
        x, ends = lane[room], [middle[room], *(middle[other] for other in targets)]
        parts.append(f'<path d="M{x} {min(ends)}V{max(ends)}" stroke="#8c959f" stroke-width="1.5"/>')
        parts.append(f'<circle cx="{x}" cy="{middle[room]}" r="5" fill="{PAPER}" stroke="{INK}" stroke-width="1.5"/>')
        for other in sorted(targets, key=order.index):
            upward = order.index(other) < order.index(room)
            neighbours = any({room, other} <= set(row) for row in ROWS)
            color = WRONG if upward or neighbours else INK
            parts.append(f'<circle cx="{x}" cy="{middle[other]}" r="3.5" fill="{color}"/>')
    parts.insert(0, text(LEFT, 28, "Each row may import what stands below it, never above or beside it.", 13, QUIET))
    style = 'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    size = f'width="{WIDTH}" height="{y + 6}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {y + 6}" {style}>'
    return "\n".join([head, f'<rect {size} fill="{PAPER}"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(picture(), end="")
