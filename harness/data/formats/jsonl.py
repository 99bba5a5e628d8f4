"""JSON lines: an object per line, with a text, token ids or a conversation in its fields."""

import json
from collections.abc import Iterator
from typing import BinaryIO

from harness.data.formats.text import UTF8_BOM, UTF16_BOMS, describe_other_file, split_records
from harness.data.schema import BadRecord, Record, find_document

SUFFIXES = (".jsonl",)
RECORD_NAME = "line"
CAN_BE_CUT = True


def read(stream: BinaryIO, names: tuple[str, ...], start: int = 0, end: int | None = None) -> Iterator[Record]:
    for position, line in split_records(stream, b"\n", start, end):
        yield parse(line, position, names)


def parse(line: bytes, position: int, names: tuple[str, ...]) -> Record:
    """Return the document of a line at `position` in the file; None for a blank one, which is no error."""
    if position == 0 and line.startswith(UTF8_BOM):
        line, position = line.removeprefix(UTF8_BOM), len(UTF8_BOM)
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        fault = describe_other_file(line, position)
        if not fault and position == 0 and line.startswith(UTF16_BOMS):
            fault = "UTF-16, not UTF-8"
        elif not fault and isinstance(error, UnicodeDecodeError):
            fault = f"byte {position + error.start:,} of the file: 0x{line[error.start]:02x} is not UTF-8"
        elif not fault:
            fault = f"broken JSON, {error}".replace("line 1 ", "")  # the parser counts lines within this one
        return BadRecord(fault)
    return find_document(record, names)
