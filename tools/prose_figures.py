"""The figures in the documents and where each comes from. Called by hand, by the release check, and by a test:

    python -m tools.prose_figures              # a line for each figure: place, figure, source, age
    python -m tools.prose_figures --without    # only those without a source

It reads README.md, CONTRIBUTING.md and docs/*.md, but for headings, fenced blocks, code, and pages that a program
makes from the code. A figure is

- a number with one of UNITS, and a decimal number that is no version;
- each number of a table's cell that has no words; the first row and the first column are names.

Its source is looked for in its row, list item or paragraph first, then in its section:

- a link to benchmarks/results/FILE.json, if that file has the number, rounded as the prose rounds it;
- a test, by its name or its file;
- a citation: arXiv, an issue, a page of the web;
- a label: predicted, planned, assumed, or a command with --plan.

What these rules miss stands in a comment, which readers do not see. Above some lines it holds up to the next empty one,
and comes first. Right under a heading it holds for that section and those below it, where lines have no source of their
own:

    <!-- figures: definition -->      a limit, a default, a size, a formula: nothing was measured
    <!-- figures: arithmetic -->      follows from the numbers beside it
    <!-- figures: predicted -->
    <!-- figures: test_name -->       or a test's file
    <!-- figures: benchmarks/results/FILE.json -->
    <!-- figures: computed from benchmarks/results/FILE.json -->    a ratio or a median of what it has
    <!-- figures: published in TITLE, YEAR -->

Independent of what a figure means.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator

from harness.base import console

ROOT = pathlib.Path(__file__).resolve().parent.parent
GENERATED = {"FLAGS.md"}
UNITS = (
    "%|ms|us|s|seconds|min|minutes|h|hours|days|[kKMGT]i?B|[GT]B/s|T?FLOPS?|[TG]FLOP(?:/s)?|(?:M )?tokens/s|steps/s"
    "|times|nats|kills|faults|families|combinations|configurations|tests"
)
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
START = r"(?<![\w.,/#^*-])"
WITH_UNIT = re.compile(rf"{START}({NUMBER})(?=(?: (?:to|and|of|or) {NUMBER})?[ -]?(?:{UNITS})(?![\w/]))|\$({NUMBER})")
DECIMAL = re.compile(rf"{START}(\d[\d,]*\.\d+(?:e[-+]?\d+)?|\de[-+]?\d+)(?![\w/]|\.\d)")
IN_CELL = re.compile(rf"{START}({NUMBER})(?![\w/]|\.\d)")
VERSION = re.compile(
    r"(?i)(torch|transformers\S*|python|datasets|accelerate|lightning|tokenizers|safetensors|numpy|plotly|cudnn|cuda|nccl"
    r"|kubernetes|trainer|volcano|slurm|buildah|debian|trl|peft|lm-eval|llama|llama-cpp-python|xllamacpp|parser"
    r"|wandb|tensorboard|llama-?|qwen|version|saving \(|section|apache)[ -]v?(?:[\d.]+(?:,| to| and| or) )*$"
)
MARK = re.compile(r"<!-- figures: (.+?) -->")
RESULT = re.compile(r"benchmarks/results/([\w-]+\.json)")
TEST = re.compile(r"\btests/\w+/test_\w+\.py|\btest_\w+\b(?!\.py)")
CITATION = re.compile(r"arXiv[ :]\d{4}\.\d+|https?://[^)\s>]+|[\w/]+ issues? \d{3,}|[\w/-]+#\d{3,}|tuning\.cc")
LABEL = re.compile(r"(?i)\b(?:predicted|prediction|planned|plans?|assumed|guessed)\b|--plan\b")
LABEL_OF_SECTION = re.compile(
    r"\b(?:predicted|planned)\b|^(?:python|torchrun) .*train_fsdp\.py .*--plan\b", re.MULTILINE
)
SCALES = {"%": (1, 100), "ms": (1, 1e3), "M": (1, 1e-6), "G": (1, 1e-9, 2**-30)}


@dataclasses.dataclass
class Block:
    """A row of a table, a list item or a paragraph."""

    file: str
    line: int
    text: str
    section: str  # all of its section, fenced blocks too
    mark: str  # the comment above it, or ""
    mark_of_section: str


@dataclasses.dataclass
class Figure:
    place: str
    words: str  # the number and what is beside it
    source: str  # "" without one
    age: str  # date of the measurement, where there is one
    reason: str = ""  # why there is no source


def sections_of(text: str) -> Iterator[tuple[int, list[str], str]]:
    """The line where each section begins, its lines, and the mark that holds for it."""
    marks: dict[int, str] = {}  # by the level of the heading
    lines, first, level, fenced = [], 1, 0, False
    for number, line in enumerate([*text.splitlines(), "# the end"], 1):
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match("(#+) ", line)
        if heading:
            inner = [line for line in lines[1:] if line.strip()]
            found = MARK.fullmatch(inner[0].strip()) if inner else None
            marks = {above: words for above, words in marks.items() if above < level}
            if found:
                marks[level] = found[1]
            yield first, lines, marks[max(marks)] if marks else ""
            lines, first, level = [], number, len(heading[1])
        lines.append(line)


def blocks_of(path: pathlib.Path) -> Iterator[Block]:
    for first, lines, mark_of_section in sections_of(path.read_text()):
        section, fenced, block, mark = "\n".join(lines), False, None, ""
        for number, (line, following) in enumerate(itertools.pairwise([*lines, "", ""]), first):
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            begins = re.match(r" *(?:\||[-*] |\d+\. )", line)
            ends = fence or fenced or not line.strip() or line.startswith(("#", "<!--")) or following.startswith("|---")
            if block and (ends or begins):
                yield block
                block = None
            if found := MARK.fullmatch(line.strip()):
                mark = found[1]
            elif not line.strip():
                mark = ""
            if ends:
                continue
            if block:
                block.text += "\n" + line
            else:
                block = Block(path.name, number, line, section, mark, mark_of_section)


def prose_of(text: str) -> str:
    """Without code, targets of links and dates."""
    text = re.sub(r"`[^`]*`", "`", text)
    text = re.sub(r"\]\([^)]*\)|<!--.*?-->|<[^>]+>|arXiv \S+", "]", text)
    return re.sub(r"\d{4}-\d\d-\d\d", "", text)


def numbers_in(block: Block) -> list[tuple[str, str, str]]:
    """Each figure of a block: the number as written, its unit, and the words beside it."""
    cells, in_table = [prose_of(block.text)], block.text.lstrip().startswith("|")
    if in_table:
        cells = prose_of(block.text).strip().strip("|").split("|")
    found = []
    for column, cell in enumerate(cells):
        if in_table and not column:
            continue
        matches = [*WITH_UNIT.finditer(cell), *DECIMAL.finditer(cell)]
        if in_table and not re.search(r"[A-Za-z]{3}", re.sub(UNITS, "", cell)):
            matches += IN_CELL.finditer(cell)
        places = {match.start(): match for match in matches}
        for start, match in sorted(places.items()):
            if VERSION.search(cell[:start]):
                continue
            number = next(group for group in match.groups() if group)
            unit = re.match(r"(?: to [\d.,]+)?[ -]?(%|ms|M|G)", cell[match.end() :])
            words = " ".join(cell[max(0, start - 25) : match.end() + 25].split())
            found.append((number, unit[1] if unit else "", words))
    return found


def medians(rounds: list) -> list[float]:
    """The median of each figure that all rounds of a measurement have."""
    if not rounds or not all(isinstance(one, dict) for one in rounds):
        return []
    columns = [[one.get(key) for one in rounds] for key in rounds[0]]
    return [statistics.median(column) for column in columns if all(isinstance(x, int | float) for x in column)]


@functools.cache
def result(name: str) -> tuple[tuple[float, ...], str]:
    """The numbers of a file of results with the medians of its rounds, and its newest date.

    Raises:
        OSError: there is no such file.
    """
    numbers, dates = [], []
    waiting = [json.loads((ROOT / "benchmarks" / "results" / name).read_text())]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            dates += [words for key, words in value.items() if key == "date"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
            waiting += medians(value)
        elif isinstance(value, int | float):
            numbers.append(abs(float(value)))
    return tuple(numbers), max(dates, default="no date")[:10]


def has_number(name: str, number: str, unit: str) -> bool:
    """Whether a file of results has a number, rounded to the digits that are written."""
    digits, _, exponent = number.replace(",", "").partition("e")
    half = 0.5 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    wanted = float(number.replace(",", ""))
    return any(
        abs(scale * value - wanted) <= half * 1.000001 for value in result(name)[0] for scale in SCALES.get(unit, (1,))
    )


@functools.cache
def names_of_tests() -> set[str]:
    paths = list((ROOT / "tests").rglob("*.py"))
    names = {name for path in paths for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    return names | {str(path.relative_to(ROOT)) for path in paths}


def source_in(text: str, number: str, unit: str, label: re.Pattern = LABEL) -> tuple[str, str, str]:
    """The source that a text gives for a number, its age, and else why it is none."""
    reason = ""
    for name in RESULT.findall(text):
        try:
            if "computed from" in text or has_number(name, number, unit):
                return name, result(name)[1], ""
            reason = f"not in {name}"
        except OSError:
            reason = f"no file {name}"
    for name in TEST.findall(text):
        if name in names_of_tests():
            return name, "at each test", ""
        reason = reason or f"no test {name}"
    if reason:
        return "", "", reason
    if cited := CITATION.search(text):
        return cited[0], "", ""
    if labelled := label.search(text):
        return labelled[0].lower(), "", ""
    return "", "", ""


def source_of(block: Block, number: str, unit: str) -> tuple[str, str, str]:
    if block.mark:
        return source_by_mark(block.mark, number, unit)
    found = source_in(block.text, number, unit)
    if any(found):
        return found
    if block.mark_of_section:
        return source_by_mark(block.mark_of_section, number, unit)
    section = re.sub("<!--.*?-->", "", CITATION.sub("", block.section))  # a citation holds where it stands
    return source_in(section, number, unit, LABEL_OF_SECTION)


def source_by_mark(mark: str, number: str, unit: str) -> tuple[str, str, str]:
    if mark in ("definition", "arithmetic", "predicted") or mark.startswith("published in "):
        return mark, "", ""
    found = source_in(mark, number, unit)
    return found if any(found) else ("", "", f"not understood: {mark}")


def figures(paths: list[pathlib.Path]) -> list[Figure]:
    """The figures of documents, in their order."""
    found = []
    for path in paths:
        for block in blocks_of(path):
            for number, unit, words in numbers_in(block):
                source, age, reason = source_of(block, number, unit)
                found.append(Figure(f"{block.file}:{block.line}", words, source, age, reason))
    return found


def documents() -> list[pathlib.Path]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in pages if path.name not in GENERATED]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prose_figures", description="Figures and their sources.")
    parser.add_argument("--without", action="store_true", help="only the figures without a source")
    only_without = parser.parse_args(arguments).without
    all_figures = figures(documents())
    without = [figure for figure in all_figures if not figure.source]
    for figure in without if only_without else all_figures:
        source = figure.source or f"NONE {figure.reason}".strip()
        print(f"{figure.place:24}  {figure.words:56}  {source}  {figure.age}".rstrip())
    print(f"{len(all_figures)} figures, {len(without)} without a source")
    return 1 if without else 0


if __name__ == "__main__":
    console.never_fail()
    sys.exit(main())
