"""JSON lines: an object a line, with its text or its token ids in a field."""

import json
import pathlib
from collections import Counter
from collections.abc import Iterator

from harness.data.records import (
    NOT_UTF8,
    BadRecord,
    Document,
    Field,
    check_value,
    excerpt,
    names_of,
    not_utf8,
    open_text,
)

SUFFIXES = (".jsonl",)
PLACE = "line"
RECORDS = "lines"


def read(
    file: pathlib.Path, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    names = names_of(text_field)
    with open_text(file, counts) as text:
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
        if name in fields:
            return check_value(fields[name], name, number)
    others = f", only {', '.join(fields)}" if len(fields) > 1 else ""
    fault = f"no field {names[-1]!r} in {excerpt(record)}{others}"
    return BadRecord(fault, number, advice="name the field with --text-field")
