"""Readers: one module for each format of corpus files, found here by the suffixes of its files.

A reader has `SUFFIXES`, the ends of its files' names, and one of these:

- `read(stream, text_field)`, a generator that gives for each record in order its text, its token ids, a conversation, a
  `records.BadRecord` that says what is wrong, or None for nothing. `stream` has the file's bytes, unpacked. `PLACE` is
  what its records are called ("line", "row"). `records` and `conversations` have what readers share:
  `read_fields` decides whether a record is good, `choose_field` and `find_document` find what is read of it.
  `text_field` may be several names, the best first.
- `open_tokens(file, vocab_size)`, which maps a file of token ids and returns a `token_files.TokenFile`. Tokens are
  neither copied nor read. What can be checked of the file cheaply is checked here; a fault is `token_files.damaged`.

A reader of records whose files can be cut into parts has `CAN_BE_CUT = True` and `read(stream, text_field, start, end)`
gives the records that begin within these bytes. Parts end to end must hold each record once. Other files, and packed
ones, are read as a whole.

What cannot be read at all is an OSError or a ValueError. `HAS_FIELDS = False` is for records without fields that
--text-field could name. `ONLY_ALONE = True` is for files that are data only where no other data files lie beside them.
`COMPANIONS` has the suffixes of files that belong to a data file.
`harness/flags/choices.py` has the suffixes too.
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
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from harness import base
from harness.data.schema import LAYOUTS, OF_PREFERENCES, Field, NoFieldError, Record, describe_layouts, field_names
from harness.data.token_files import TokenFile, damaged

if TYPE_CHECKING:
    from harness.data.files import DataFile

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix: Arrow's name
BLOCK = 2**18  # bytes per read


@functools.cache
def all_formats() -> dict[str, ModuleType]:
    """The modules of this folder by the suffixes that they read."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        reader = importlib.import_module(f"{__name__}.{entry.name}")
        for suffix in reader.SUFFIXES:
            found[suffix] = reader
    return found


def suffixes() -> list[str]:
    """The suffixes of data files, in any case, and packed: .TXT, .jsonl.gz."""
    return sorted(all_formats())


def find_format(name: str) -> ModuleType | None:
    """The reader of a file by its name, packed or not; None where it is no data file."""
    stem, packed = os.path.splitext(name.lower())
    if packed not in COMPRESSIONS:
        stem += packed
    return next((reader for suffix, reader in all_formats().items() if stem.endswith(suffix)), None)


def companions() -> tuple[str, ...]:
    """The suffixes of files that belong to a data file, such as its index."""
    return tuple(suffix for reader in all_formats().values() for suffix in getattr(reader, "COMPANIONS", ()))


def is_token_file(name: str) -> bool:
    """Whether the tokens of a file are mapped; otherwise its records are read."""
    return hasattr(find_format(name), "open_tokens")


@contextlib.contextmanager
def unpacked(file: "DataFile", raw: io.RawIOBase) -> Iterator[BinaryIO]:
    """The bytes of an open file, unpacked where its name says that it is packed."""
    if file.packing is None:
        yield cast(BinaryIO, raw)  # typing has no common name for both
        return
    packed: Any = io.BufferedReader(raw, BLOCK)
    stream: Any
    if file.packing == "gzip":  # Arrow refuses zeros behind the end, as tapes and block devices leave them
        stream = gzip.GzipFile(fileobj=packed)
    elif file.packing == "bz2":  # the same
        stream = bz2.BZ2File(packed)
    else:
        import pyarrow

        stream = pyarrow.input_stream(packed, compression=file.packing)
    with stream:
        yield stream


def read_records(
    file: "DataFile", text_field: Field, start: int = 0, end: int | None = None
) -> Iterator[tuple[str, Record]]:
    """(place in words, record) of a file, or of the part of a file that can be cut; a UserError where it cannot be
    read."""
    reader = find_format(file.name)
    of_file, after = f"{file}, {reader.PLACE}", f" after byte {start:,}" if start else ""
    try:
        with file.open() as raw, unpacked(file, raw) as stream:
            part = (start, end) if (start, end) != (0, None) else ()
            for number, record in enumerate(reader.read(stream, text_field, *part), 1):
                yield f"{of_file} {number:,}{after}", record
    except NoFieldError as error:
        wanted, fields = field_names(text_field)[-1], ", ".join(error.args[0])
        if wanted in LAYOUTS:
            needs = " and ".join(LAYOUTS[wanted].needs)
            problem = f"no {needs}, which the first file has (fields: {fields})"
            advice = "give files of another format a source of their own: --dataset FILE FILE"
            raise base.UserError(f"--dataset {file}: {problem}; {advice}") from error
        problem = f"no such field in {file} (fields: {fields})"
        advice = f"conversations are {describe_layouts()}"
        if {"chosen", "rejected"} <= set(error.args[0]):
            advice = OF_PREFERENCES
        raise base.UserError(f"--text-field {wanted}: {problem}; {advice}") from error
    except (OSError, ValueError, NotImplementedError, EOFError, zlib.error) as error:  # ValueError is Arrow's too
        raise base.UserError(f"--dataset {file}: cannot be read ({base.first_line(error)})") from error


def open_token_file(file: "DataFile", vocab_size: int) -> TokenFile:
    if file.packing:
        raise damaged(file, "it is packed, and token files are mapped", "unpack it")
    try:
        opened = find_format(file.name).open_tokens(file.path, vocab_size)
    except (OSError, ValueError) as error:
        raise base.UserError(f"--dataset {file}: cannot be read ({base.first_line(error)})") from error
    opened.reopen = functools.partial(open_token_file, file, vocab_size)
    return opened
