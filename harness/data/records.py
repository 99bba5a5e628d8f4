"""Records: what a reader gives for one, and what readers share: the field, the check of a value, packed text files.
Independent of the formats."""

import codecs
import contextlib
import io
import json
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from harness.base.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix: what Arrow calls it
DOCUMENT_MARK = "<|endoftext|>"  # separates the documents of a text file, as in the original TinyStories files
NOT_UTF8 = "\ufdd0not UTF-8\ufdd1"  # stands in a text for bytes that are not UTF-8
codecs.register_error("mark", lambda error: (NOT_UTF8, error.end))
MAX_TOKEN_ID = 2**32 - 1

Field = str | tuple[str, ...]  # the column that is trained on, or several: the first one that is there
DEFAULT_FIELD = ("input_ids", "text")


class BadRecord(NamedTuple):
    """A record that cannot be trained on."""

    fault: str  # what stands there, in words
    number: int  # of its line or row, from 1
    advice: str = ""  # what may help beside mending the data
    wrong_encoding: bool = False  # it may be text in another encoding


Document = str | list[int] | np.ndarray  # text, or token ids


def not_utf8(number: int) -> BadRecord:
    return BadRecord("bytes that are not UTF-8", number, wrong_encoding=True)


def names_of(text_field: Field) -> tuple[str, ...]:
    return (text_field,) if isinstance(text_field, str) else text_field


def choose_field(source: Any, names: list[str], text_field: Field) -> str:
    """The column that is trained on, of those in a file or data set."""
    wanted = names_of(text_field)
    for name in wanted:
        if name in names:
            return name
    raise UserError(
        f"--text-field {wanted[-1]}: no such field in {source} (fields: {', '.join(names)})", entry="no-such-field"
    )


def check_value(value: Any, field: str, number: int) -> Document | BadRecord:
    """The value of a record as its document: token ids in the field `input_ids`, in any other a text."""
    if field == "input_ids":
        are_ints = isinstance(value, list) and set(map(type, value)) <= {int}
        if are_ints and 0 <= min(value, default=0) <= max(value, default=0) <= MAX_TOKEN_ID:
            return value
        return BadRecord(f"{excerpt(value)} instead of token ids", number)
    if not isinstance(value, str):
        return BadRecord(f"{excerpt(value)} instead of text", number)
    if NOT_UTF8 in value:
        return not_utf8(number)
    if not value.isascii() and re.search("[\ud800-\udfff]", value):  # of an escape in JSON
        return BadRecord(f"{excerpt(value)} with half a surrogate pair", number)
    return value


def excerpt(value: Any) -> str:
    """The beginning of a value as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


class CountedFile(io.FileIO):
    """A file that adds to `counts["read"]` the bytes that are read of it."""

    def __init__(self, file: str | os.PathLike, counts: Counter):
        super().__init__(file)
        self.counts = counts

    def readinto(self, buffer) -> int:
        size = super().readinto(buffer)
        self.counts["read"] += size
        return size


@contextlib.contextmanager
def open_unpacked(file: pathlib.Path, counts: Counter) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its name says that it is packed; `counts` gets how many are read, packed."""
    with io.BufferedReader(CountedFile(file, counts)) as raw:
        codec = COMPRESSIONS.get(file.suffix.lower())
        if codec is None:
            yield raw
        else:
            import pyarrow

            with pyarrow.input_stream(raw, compression=codec) as unpacked:
                yield unpacked


@contextlib.contextmanager
def open_text(file: pathlib.Path, counts: Counter) -> Iterator[io.TextIOWrapper]:
    """The text of a file, unpacked; bytes that are not UTF-8 are `NOT_UTF8`, line ends are newlines."""
    with open_unpacked(file, counts) as unpacked:
        yield io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="mark")
