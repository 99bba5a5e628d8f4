"""JSON: a list of objects, as Alpaca and ShareGPT, or objects and lists one after another; each object with a text,
token ids or a conversation in its fields."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from harness.data.formats import READ_BYTES
from harness.data.formats.text import describe_other_file
from harness.data.schema import Record, find_document

SUFFIXES = (".json",)
RECORD_NAME = "record"
IS_FALLBACK = True  # next to other data files, JSON files are metadata

# An error this near to the end of what was read may be a number, word or escape that is cut there, such as -Infinity.
MAX_CUT = 16  # characters

SEPARATORS, LIST_SEPARATORS = re.compile(r"\s*"), re.compile(r"[\s,]*")  # between values


def read(stream: BinaryIO, names: tuple[str, ...]) -> Iterator[Record]:
    for value in values_in(stream):
        yield find_document(value, names)


def values_in(stream: BinaryIO) -> Iterator[Any]:
    """Yield the values of a file and of its lists, with only a few of them in memory. A ValueError at the first fault,
    without reading on."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, position = "", 0  # of the next value in `text`
    is_list = file_ended = False
    bytes_read = records = 0
    while True:
        separators = LIST_SEPARATORS if is_list else SEPARATORS
        position = separators.match(text, position).end()
        if text[position : position + 1] == ("]" if is_list else "["):
            position, is_list = position + 1, not is_list
            continue
        if file_ended and position == len(text) and not is_list:
            return
        try:
            value, end = decoder.raw_decode(text, position)
            if end < len(text) or file_ended:  # else the value may continue in the next block, as 12 of 123
                yield value
                position, records = end, records + 1
                continue
        except (ValueError, RecursionError) as error:
            fault, fault_position = getattr(error, "msg", str(error)), getattr(error, "pos", position)
            may_continue = fault.startswith("Unterminated string") or len(text) - fault_position < MAX_CUT
            if file_ended or not may_continue:
                not_decoded, _ = utf8.getstate()
                byte = bytes_read - len(not_decoded) - len(text[fault_position:].encode())
                problem = f"broken JSON after {records:,} records, at byte {byte:,} of the file: {fault}"
                raise ValueError(problem) from error
        # blocks grow, so a long value is not parsed for each of them
        block = stream.read(max(READ_BYTES, len(text) - position))
        if other_file := describe_other_file(block, bytes_read):
            raise ValueError(other_file)
        bytes_read, file_ended = bytes_read + len(block), not block
        try:
            text, position = text[position:] + utf8.decode(block, final=file_ended), 0
        except UnicodeDecodeError as error:
            byte = bytes_read - len(error.object) + error.start
            raise ValueError(f"byte {byte:,} of the file: 0x{error.object[error.start]:02x} is not UTF-8") from error
