"""JSON lines: an object per line, with a text, token ids or a conversation in its fields."""

import json
from collections.abc import Iterator
from typing import BinaryIO

from harness.data.formats.text import split_records
from harness.data.schema import BadRecord, Field, Record, field_names, find_document

SUFFIXES = (".jsonl",)
RECORD_NAME = "line"
CAN_BE_CUT = True


def read(stream: BinaryIO, text_field: Field, start: int = 0, end: int | None = None) -> Iterator[Record]:
    names = field_names(text_field)
    for line in split_records(stream, b"\n", start, end):
        yield parse(line, names)


def parse(line: bytes, names: tuple[str, ...]) -> Record:
    """Return the document of a line; None for a blank one, which is no error."""
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return BadRecord("bytes that are not UTF-8")
    except (ValueError, RecursionError) as error:
        return BadRecord(f"broken JSON, {error}".replace("line 1 ", ""))
    return find_document(record, names)
