"""Byte ranges: the part of a file between two marks, found without reading the file from its beginning. Called by
readers whose files can be cut. Independent of what the marks are."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterator

from harness.data.records import BUFFER_BYTES, CountedFile
from harness.data.storage import DataFile


def open_range(file: DataFile, counts: Counter, start: int, end: int, mark: bytes) -> contextlib.AbstractContextManager:
    """The text of the records that begin within the bytes [start, end) of a file, as `open_text` gives that of a whole
    one. A record begins at the file's beginning and after each mark, so that ranges end to end hold each record once.
    """
    first = record_from(file, start, end, mark)
    last = first
    if first < end:
        size = file.stat().st_size
        last = record_from(file, end, size, mark)
    return open_bytes(file, counts, first, last)


def record_from(file: DataFile, start: int, end: int, mark: bytes) -> int:
    """Where the first record begins within the bytes [start, end) of a file; `end` where none does."""
    if start == 0:
        return 0
    place = max(0, start - len(mark))  # a mark that ends at `start` counts
    kept = b""
    with io.BufferedReader(CountedFile(file, Counter(), place), BUFFER_BYTES) as raw:
        while place < end and (block := raw.read(BUFFER_BYTES)):
            found = (kept + block).find(mark)
            if found >= 0:
                return min(place - len(kept) + found + len(mark), end)
            place += len(block)
            kept = (kept + block)[1 - len(mark) :] if len(mark) > 1 else b""
    return end


@contextlib.contextmanager
def open_bytes(file: DataFile, counts: Counter, start: int, end: int) -> Iterator[io.TextIOWrapper]:
    """The text in the bytes [start, end) of a file; bytes that are not UTF-8 are `NOT_UTF8`, line ends are newlines."""
    encoding = "utf-8" if start else "utf-8-sig"
    with io.BufferedReader(CountedFile(file, counts, start, end), BUFFER_BYTES) as raw:
        yield io.TextIOWrapper(raw, encoding=encoding, errors="mark")


def lines_before(file: DataFile, start: int, mark: bytes) -> int:
    """How many lines end before the first record that begins at or after a byte of a file. Reads all before it."""
    first = record_from(file, start, file.stat().st_size, mark)
    with open_bytes(file, Counter(), 0, first) as text:
        return sum(line.endswith("\n") for line in text)
