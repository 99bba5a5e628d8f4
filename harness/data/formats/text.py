"""Text: one document, or several with <|endoftext|> between them. UTF-8, or UTF-16 with its byte order mark."""

import codecs
import sys
from collections.abc import Iterator
from typing import BinaryIO

from harness.data.formats import READ_BYTES
from harness.data.schema import DOC_SEPARATOR, BadRecord, Record

SUFFIXES = (".txt", ".md")
RECORD_NAME = "document"
CAN_BE_CUT = True

TAIL_BYTES = 2**13  # first read beyond the end of a part, to complete its last record
UTF8_BOM, UTF16_BOMS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")  # byte order marks
OTHER_FILES = {  # first bytes of files that are no text: what they are
    b"%PDF-": "a PDF, not text",
    b"PK\3\4": "a ZIP archive (.docx, .epub, .odt), not text",
    b"\xd0\xcf\x11\xe0": "an old Office file (.doc), not text",
    b"{\\rtf": "rich text (RTF), not plain text",
    b"PAR1": "Parquet, whose name ends in .parquet",
    b"\x1f\x8b": "gzip data, whose name ends in .gz",
    b"BZh91AY&SY": "bzip2 data, whose name ends in .bz2",
    b"\x28\xb5\x2f\xfd": "zstd data, whose name ends in .zst",
    b"\xff\xfe\0\0": "UTF-32; only UTF-8 and UTF-16 are read",
}

# An error handler: bytes that cannot be decoded become a NUL, which no text has. surrogateescape fails on UTF-16.
AS_NUL = "harness-nul"
codecs.register_error(AS_NUL, lambda error: ("\0", error.end))  # type: ignore[attr-defined]


def read(stream: BinaryIO, names: tuple[str, ...], start: int = 0, end: int | None = None) -> Iterator[Record]:
    # a UTF-16 file has no separator bytes, so it is one record
    for position, content in split_records(stream, DOC_SEPARATOR.encode(), start, end):
        kind = describe_other_file(content, position)
        if kind:
            yield BadRecord(kind)
        else:
            yield from read_document(content, position)


def describe_other_file(content: bytes, position: int) -> str:
    """Describe a file that is no text from its first record; "" for text and for later records."""
    if position:
        return ""
    return next((kind for start, kind in OTHER_FILES.items() if content.startswith(start)), "")


def read_document(content: bytes, position: int) -> Iterator[Record]:
    """Yield a bad record for each line that cannot be decoded or has a NUL, then the document of the other lines.
    `position` is that of `content` in the file, in bytes."""
    encoding = "utf-16" if position == 0 and content.startswith(UTF16_BOMS) else "utf-8"
    fault = before = ""  # the first fault, and the text before it
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        fault = f"0x{content[error.start]:02x} is not {encoding.upper()} (iconv converts other encodings)"
        text, before = content.decode(encoding, AS_NUL), content[: error.start].decode(encoding)
    if not fault and "\0" in text:
        fault, before = "a NUL byte", text.partition("\0")[0]
    if position == 0:
        text = text.removeprefix("\ufeff")
    text = text.replace("\r\n", "\n")
    if fault:
        line_number, byte = before.count("\n") + 1, position + len(before.encode(encoding))
        lines = text.split("\n")
        good = [line for line in lines if "\0" not in line]
        # one per line, so that they are counted; all name the first
        bad = BadRecord(f"line {line_number:,} of the document, byte {byte:,} of the file: {fault}")
        yield from [bad] * (len(lines) - len(good))
        text = "\n".join(good)
    yield text.strip("\n") or None


def split_records(stream: BinaryIO, separator: bytes, start: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of each record that begins within the bytes [start, end) of a file; to its end without
    `end`.

    A record begins at the start of the file and after each separator, so parts end to end have each record once.
    """
    end = sys.maxsize if end is None else end
    position = max(0, start - len(separator))  # of the next byte; a separator may end at `start`
    if position:
        stream.seek(position)
    is_ours = start == 0  # False until a separator is found: what is before it is of a record that began earlier
    record_start, rest = position, b""
    while is_ours or position < end:
        size = min(READ_BYTES, end - position) if position < end else TAIL_BYTES
        block = stream.read(max(size, len(rest)))  # reads grow with an unfinished record, so joining it stays linear
        if not block:
            break
        position += len(block)
        *records, rest = (rest + block).split(separator)
        for record in records:
            if is_ours:
                yield record_start, record
            is_ours = True
            record_start += len(record) + len(separator)
            if record_start >= end:
                return
    if is_ours and rest:
        yield record_start, rest
