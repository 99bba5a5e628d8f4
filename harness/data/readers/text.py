"""Text files: one document, or several with <|endoftext|> between them."""

from collections.abc import Iterator
from typing import BinaryIO

from harness.data.records import DOCUMENT_MARK, BadRecord, Field, Record, split_records

SUFFIXES = (".txt", ".md")
PLACE = "document"
HAS_FIELDS = False
CAN_BE_CUT = True


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
