"""Text: one document, or several with <|endoftext|> between them."""

import sys
from collections.abc import Iterator
from typing import BinaryIO

from harness.data.formats import BLOCK
from harness.data.schema import DOCUMENT_MARK, BadRecord, Field, Record

SUFFIXES = (".txt", ".md")
RECORD_NAME = "document"
HAS_FIELDS = False
CAN_BE_CUT = True

FIRST_TAIL = 2**13  # bytes of the first read after the end of a part, for the end of its last record
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(stream: BinaryIO, text_field: Field, start: int = 0, end: int | None = None) -> Iterator[Record]:
    for content in split_records(stream, DOCUMENT_MARK.encode(), start, end):
        try:
            text = content.decode().replace("\r\n", "\n").strip("\n")
        except UnicodeDecodeError:
            yield BadRecord("bytes that are not UTF-8")
            continue
        if "\0" in text:
            yield BadRecord("a NUL byte")
        else:
            yield text or None


def split_records(stream: BinaryIO, mark: bytes, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of each record that begins within the bytes [start, end) of a file; to its end without `end`.

    A record begins at the start of the file and after each mark, so parts end to end have each record once.
    """
    end = sys.maxsize if end is None else end
    position = max(0, start - len(mark))  # of the next byte; a mark may end at `start`
    if position:
        stream.seek(position)
    is_begun, record_start, rest = start == 0, position, b""
    while True:
        size = min(BLOCK, end - position) if position < end else FIRST_TAIL
        block = stream.read(max(size, len(rest)))  # blocks grow with a record, which is joined less often
        if not block:
            break
        position += len(block)
        *records, rest = (rest + block).split(mark)
        for record in records:
            if is_begun:
                yield record if record_start else record.removeprefix(BYTE_ORDER_MARK)
            is_begun = True
            record_start += len(record) + len(mark)
            if record_start >= end:
                return
    if is_begun and rest:
        yield rest if record_start else rest.removeprefix(BYTE_ORDER_MARK)
