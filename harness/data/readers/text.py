"""Text files: one document, or several with <|endoftext|> between them."""

from collections import Counter
from collections.abc import Iterator

from harness.data.byte_ranges import lines_before, open_range
from harness.data.records import DOCUMENT_MARK, NOT_UTF8, BadRecord, Document, Field, not_utf8, open_text
from harness.data.storage import DataFile

SUFFIXES = (".txt", ".md")
PLACE = "line"
RECORDS = "documents"
HAS_FIELDS = False
CHUNK = 2**24  # characters that are read at once
RANGE_CHUNK = 2**16  # of a range: many ranges may be read at a time


def read(file: DataFile, text_field: Field, counts: Counter, batched: bool = False) -> Iterator[Document | BadRecord]:
    """Each document that is not empty."""
    with open_text(file, counts) as text:
        yield from split_text(text, CHUNK)


def read_range(
    file: DataFile, text_field: Field, counts: Counter, start: int, end: int
) -> Iterator[Document | BadRecord]:
    with open_range(file, counts, start, end, DOCUMENT_MARK.encode()) as text:
        yield from split_text(text, RANGE_CHUNK)


def count_before(file: DataFile, start: int) -> int:
    return lines_before(file, start, DOCUMENT_MARK.encode())


def split_text(text, chunk_size: int) -> Iterator[Document | BadRecord]:
    first_line = 1
    for part in parts(text, chunk_size):
        if NOT_UTF8 in part or "\0" in part:
            yield describe(part, first_line)
        elif document := part.strip("\n"):
            yield document
        first_line += part.count("\n")


def parts(text, chunk_size: int) -> Iterator[str]:
    """What stands between the marks."""
    rest = ""
    while chunk := text.read(max(chunk_size, len(rest))):  # a long document is not joined chunk by chunk
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
