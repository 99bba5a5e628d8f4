"""Text files: one document, or several with <|endoftext|> between them."""

import pathlib
from collections import Counter
from collections.abc import Iterator

from harness.data.records import DOCUMENT_MARK, NOT_UTF8, BadRecord, Document, Field, not_utf8, open_text

SUFFIXES = (".txt", ".md")
PLACE = "line"
RECORDS = "documents"
HAS_FIELDS = False
CHUNK = 2**24  # characters that are read at once


def read(
    file: pathlib.Path, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    """Each document that is not empty."""
    first_line = 1
    with open_text(file, counts) as text:
        for part in parts(text):
            if NOT_UTF8 in part or "\0" in part:
                yield describe(part, first_line)
            elif document := part.strip("\n"):
                yield document
            first_line += part.count("\n")


def parts(text) -> Iterator[str]:
    """What stands between the marks."""
    rest = ""
    while chunk := text.read(CHUNK):
        *whole, rest = (rest + chunk).split(DOCUMENT_MARK)
        yield from whole
    yield rest


def describe(part: str, first_line: int) -> BadRecord:
    """The first line with what is no text, in a document that begins at `first_line`."""
    for number, line in enumerate(part.split("\n"), first_line):
        if NOT_UTF8 in line:
            return not_utf8(number)
        if "\0" in line:
            break
    return BadRecord("a NUL byte", number)
