"""Formats: one module for each format of corpus files, found here by the suffixes of its files.

A format has `SUFFIXES`, the ends of its files' names, and one of these:

- `read(stream, names)`, a generator: for each record its text, its token ids, a conversation, a `schema.BadRecord` that
  says what is wrong, or None for nothing. `stream` has the file's bytes, decompressed; `names` are field names and keys
  of `schema.LAYOUTS`, of which the first that a record has is read. In `schema`, `find_document` (for objects) or
  `choose_name` and `read_named` (for columns) find what is read of a record and check it.
- `open_tokens(path, vocab_size)`: maps a file of token ids as a `tokens.MappedTokens`. Tokens are neither copied nor
  read. It checks what is cheap to check; a fault is `tokens.damaged_error`.

A format that has `read` also has `RECORD_NAME`, and may have the others:

- `RECORD_NAME`: what a record is called in messages ("line", "row").
- `CAN_BE_CUT = True`: `read(stream, names, start, end)` gives the records that begin within these bytes, so parts end
  to end hold each record once. Other files, and compressed ones, are read as a whole.
- `row_group_parts(file)`: (start, end) of each row group of a file, which is cut only between them. All records of a
  row group count as beginning at its first byte.
- `count(stream)`: the number of records, if that is cheap.
- `IS_FALLBACK = True`: files are data only if the corpus has no data files of other formats.

`COMPANIONS` are suffixes of files that belong to a data file. Files that cannot be read raise an OSError or a
ValueError. `harness/flags/choices.py` has the suffixes too, and which of them are of records with fields.
"""

import bz2
import contextlib
import functools
import gzip
import importlib
import io
import os
import pkgutil
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, BinaryIO, cast

from harness import base
from harness.data.data_file import COMPRESSIONS, DataFile
from harness.data.schema import Record
from harness.data.tokens import MappedTokens, damaged_error

READ_BYTES = 2**18  # bytes per read


@functools.cache
def all_formats() -> dict[str, ModuleType]:
    """Return the modules of this folder by the suffixes that they read."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        found.update(dict.fromkeys(module.SUFFIXES, module))
    return found


def suffixes() -> list[str]:
    """Return the suffixes of data files; other cases and compressed files count too: .TXT, .jsonl.gz."""
    return sorted(all_formats())


def find_format(name: str) -> ModuleType | None:
    """Return the format of a file by its name, compressed or not; None if it is no data file."""
    stem, compression = os.path.splitext(name.lower())
    if compression not in COMPRESSIONS:
        stem += compression
    return next((module for suffix, module in all_formats().items() if stem.endswith(suffix)), None)


def companions() -> tuple[str, ...]:
    """Return the suffixes of files that belong to a data file, such as its index."""
    return tuple(suffix for module in all_formats().values() for suffix in getattr(module, "COMPANIONS", ()))


def is_token_file(name: str) -> bool:
    """True if the tokens of a file are mapped; otherwise its records are read."""
    return hasattr(find_format(name), "open_tokens")


@contextlib.contextmanager
def report_read_errors(file: DataFile) -> Iterator[None]:
    """Raise a UserError that names the file for an error of reading it."""
    try:
        yield
    # ArrowInvalid is a ValueError, ArrowNotImplementedError a NotImplementedError
    except (OSError, ValueError, NotImplementedError, EOFError, zlib.error) as error:
        raise base.UserError(f"--dataset {file}: cannot be read ({base.first_line(error)})") from error


@contextlib.contextmanager
def decompressed(file: DataFile, raw: io.RawIOBase) -> Iterator[BinaryIO]:
    """Give the bytes of an open file, decompressed by the suffix of its name."""
    if file.compression is None:
        yield cast(BinaryIO, raw)
        return
    buffered: Any = io.BufferedReader(raw, READ_BYTES)
    stream: Any
    # gzip and bz2 by Python's readers: Arrow's fail on zeros after the end, such as padding to a disk block
    if file.compression == "gzip":
        stream = gzip.GzipFile(fileobj=buffered)
    elif file.compression == "bz2":
        stream = bz2.BZ2File(buffered)
    else:
        import pyarrow

        stream = pyarrow.input_stream(buffered, compression=file.compression)
    with stream:
        yield stream


def read_records(
    file: DataFile, names: tuple[str, ...], start: int = 0, end: int | None = None
) -> Iterator[tuple[str, Record]]:
    """Yield (position in words, record) of a file, or of the part [start, end) of one that can be cut; a UserError if
    it cannot be read."""
    file_format = find_format(file.name)
    after = f" after byte {start:,}" if start else ""
    part = () if start == 0 and end is None else (start, end)  # formats that cannot be cut take none
    with report_read_errors(file), file.open() as raw, decompressed(file, raw) as stream:
        for number, record in enumerate(file_format.read(stream, names, *part), 1):
            yield f"{file}, {file_format.RECORD_NAME} {number:,}{after}", record
    if end is None:  # opened once more: that raises if the file has changed while it was read
        with report_read_errors(file):
            file.open().close()


def open_token_file(file: DataFile, vocab_size: int) -> MappedTokens:
    """Map a token file; a UserError if it is damaged or compressed, or has changed since it was listed."""
    if file.compression:
        raise damaged_error(file, "it is compressed, and token files are mapped", "decompress it")
    with report_read_errors(file), file.open():  # which compares its size with the listing
        opened = find_format(file.name).open_tokens(file.path, vocab_size)
    opened.identity = file.identity()
    opened.reopen = functools.partial(open_token_file, file, vocab_size)
    return opened
