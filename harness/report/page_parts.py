"""Page parts: what a page consists of, as plain data, and the file in which assets/page.html shows them. Called by
`page` and `plan_page`, which choose the parts. Independent of how a part looks: the template has all markup and style.

A page is one JSON object: a title, a summary, sections of parts, a footer. Every string in it is text, never markup.
"""

import json
import pathlib
import re
from collections.abc import Iterable
from importlib.util import find_spec

from harness.base.errors import UserError
from harness.flags.settings import ASSETS
from harness.job import replace_file


def section(heading: str, *parts: dict, switches: bool = False) -> dict:
    """Parts below a heading. With `switches` the reader chooses the axes of its charts beside the heading."""
    return {"heading": heading, "parts": list(parts), "switches": switches}


def text(words: str) -> dict:
    return {"kind": "text", "text": words}


def note(words: str) -> dict:
    """Text in a muted color."""
    return {"kind": "note", "text": words}


def command(line: str) -> dict:
    return {"kind": "command", "text": line}


def tiles(figures: dict[str, str]) -> dict:
    """Large figures by their names; one that is empty is left out."""
    shown = [{"name": name, "value": value} for name, value in figures.items() if value]
    return {"kind": "tiles", "tiles": shown}


def charts(drawn: list[dict]) -> dict:
    return {"kind": "charts", "charts": drawn}


def table(rows: Iterable[Iterable[str]], head: Iterable[str] = (), look: str = "") -> dict:
    """A table, of which the first cell of a row is its name.

    Args:
        look: `flags`, cells in a fixed-width font; `runs`, a row for each run in the color of its lines; or empty.
    """
    return {"kind": "table", "head": list(head), "rows": [list(row) for row in rows], "look": look}


def folded(summary: str, *parts: dict) -> dict:
    """Parts that show when the reader opens the line `summary`."""
    return {"kind": "folded", "summary": summary, "parts": list(parts)}


def write_page(path: pathlib.Path, title: str, summary: str, sections: list[dict], footer: str = "") -> pathlib.Path:
    """Writes the page atomically and returns its path.

    Raises:
        UserError: plotly is not installed.
        OSError: `path` cannot be written; nothing is left of it.
    """
    page = {"title": title, "summary": summary, "sections": sections, "footer": footer}
    # without "<" no text can end the script element that holds it, nor open a comment there
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")
    values = {"data": data, "plotly": plotly_js()}
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    # in one pass: a placeholder in the data stays text
    replace_file(path, re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template))
    return path


def plotly_js() -> str:
    """The source of plotly.js, read from its Python package, which is not imported."""
    package = find_spec("plotly")
    if package is None:
        raise UserError("needs the package plotly (pip install plotly)")
    path = pathlib.Path(package.submodule_search_locations[0], "package_data", "plotly.min.js")
    return path.read_text(encoding="utf-8")
