"""JSON lines: an object a line, with its text or its token ids in a field."""

import json
from collections import Counter
from collections.abc import Iterator

from harness.data.byte_ranges import lines_before, open_range
from harness.data.records import (
    CHAT_FIELD,
    NOT_UTF8,
    BadRecord,
    Document,
    Field,
    check_conversation,
    check_value,
    excerpt,
    names_of,
    not_utf8,
    open_text,
)
from harness.data.storage import DataFile

SUFFIXES = (".jsonl",)
PLACE = "line"
RECORDS = "lines"


def read(file: DataFile, text_field: Field, counts: Counter, batched: bool = False) -> Iterator[Document | BadRecord]:
    with open_text(file, counts) as text:
        yield from parse_lines(text, text_field)


def read_range(
    file: DataFile, text_field: Field, counts: Counter, start: int, end: int
) -> Iterator[Document | BadRecord]:
    with open_range(file, counts, start, end, b"\n") as text:
        yield from parse_lines(text, text_field)


def count_before(file: DataFile, start: int) -> int:
    return lines_before(file, start, b"\n")


def parse_lines(text: Iterator[str], text_field: Field) -> Iterator[Document | BadRecord]:
    names = names_of(text_field)
    for number, line in enumerate(text, 1):
        document = parse(line, names, number)
        if isinstance(document, BadRecord) and NOT_UTF8 in line:
            document = not_utf8(number)  # also where they break the JSON
        yield document


def parse(line: str, names: tuple[str, ...], number: int) -> Document | BadRecord:
    """The document of a line; no token ids for a blank one, which is no mistake."""
    if not line.strip():
        return []
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRecord(f"broken JSON, {error}".replace("line 1 ", ""), number)
    fields = record if isinstance(record, dict) else {}
    for name in names:
        if name == CHAT_FIELD and not isinstance(fields.get(name, ""), str):
            return check_conversation(fields[name], number, fields.get("tools"))
        if name in fields:
            return check_value(fields[name], name, number)
    others = f", only {', '.join(fields)}" if len(fields) > 1 else ""
    fault = f"no field {names[-1]!r} in {excerpt(record)}{others}"
    return BadRecord(fault, number, advice="name the field with --text-field")
