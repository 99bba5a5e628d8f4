"""Names: advice for unknown flags: those of other trainers, from the tables of docs/MIGRATION.md, and mistyped ones."""

import difflib
import functools
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from harness import base

MIN_SIMILARITY = 0.75  # of names, by difflib's ratio
MIN_SIMILARITY_OF_OTHERS = 0.9  # of other trainers' names, which are many
DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}")  # editors and web pages make the others of two hyphens
PAGE = base.ROOT / "docs" / "MIGRATION.md"


class Answer(NamedTuple):
    """Advice for a flag of another trainer."""

    name: str  # as that trainer writes it
    text: str  # end of an error


def no_such_flag(name: str, known: Collection[str]) -> str:
    """The error for a flag that is not in `known`, with its equivalent or the nearest name."""
    key, answers = without_dashes(name), read_answers()
    if key not in answers:
        key = key.rpartition(".")[2]  # as in --training.local_batch_size
    if key in answers:
        return f"no such flag; {answers[key].text}"
    if nearest := suggest(key, known):
        return f"no such flag{nearest}"
    near = difflib.get_close_matches(key, answers, 1, MIN_SIMILARITY_OF_OTHERS)
    return f"no such flag; for {answers[near[0]].name} {answers[near[0]].text}" if near else "no such flag"


def suggest(name: str, known: Iterable[str]) -> str:
    """The names in `known` nearest to a mistyped one, as the end of an error; empty if none is near."""
    key, names = without_dashes(name), {without_dashes(one): one for one in sorted(known)}
    near = [one for one in names if len(key) > 2 and one.startswith(key)]
    near = near or difflib.get_close_matches(key, names, 1, MIN_SIMILARITY)
    return f"; did you mean {' or '.join(names[one] for one in near)}?" if near else ""


def without_dashes(name: str) -> str:
    """A name for comparisons: `batch-size` for `--Batch_Size`, as common leading dashes would raise similarities."""
    return name.lower().lstrip("".join(DASHES)).replace("_", "-")


@functools.cache
def read_answers() -> dict[str, Answer]:
    """{name of another trainer's flag: advice}, from the page's tables; the first row with a name counts."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""  # a copy may lack the docs
    tables = page.partition("## From ")[2].partition("<!-- end -->")[0]
    found: dict[str, Answer] = {}
    for row in re.findall(r"^\| (`.*) \|$", tables, re.MULTILINE):
        theirs, here, *note = map(as_plain_text, row.split(" | "))
        text = "; ".join([f"use {here}" if here.startswith("--") else here, *note])
        for name in theirs.split(", "):
            found.setdefault(without_dashes(name), Answer(name, text))
    return found


def as_plain_text(markdown: str) -> str:
    """Markdown of a page in docs/ without backticks, with the paths of its links."""
    linked = re.sub(r"\[(.+?)\]\((.*?)#.*?\)", lambda link: f"docs/{link[2] or 'MIGRATION.md'} ({link[1]})", markdown)
    return linked.replace("`", "")
