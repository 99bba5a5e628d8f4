"""Formats: the list of readers, by the suffixes of their files. Everything else asks it what is a data file, how it is
read, and how a place in it is called."""

import importlib
import os
import pathlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

from harness.base.errors import UnreadableError
from harness.base.text import first_line
from harness.data import readers
from harness.data.records import COMPRESSIONS, BadRecord, Document, Field


def find_readers() -> dict[str, ModuleType]:
    """The modules in the folder of readers by the suffixes that they read."""
    by_suffix = {}
    for entry in pkgutil.iter_modules(readers.__path__):
        reader = importlib.import_module(f"{readers.__name__}.{entry.name}")
        for suffix in reader.SUFFIXES:
            by_suffix[suffix] = reader
    return by_suffix


READERS = find_readers()
DATA_SUFFIXES = tuple(sorted(READERS))  # in any case, and packed: .TXT, .jsonl.gz


def reader_of(path) -> ModuleType | None:
    """The reader of a file by its name, packed or not; None where it is no data file."""
    name, packed = os.path.splitext(str(path).lower())
    if packed not in COMPRESSIONS:
        name += packed
    for suffix, reader in READERS.items():
        if name.endswith(suffix):
            return reader
    return None


def name_place(file: pathlib.Path, number: int) -> str:
    """A file and the place of a record in it, as messages name them."""
    return f"{file}, {reader_of(file).PLACE} {number}"


def file_records(
    file: pathlib.Path, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    """The document of each record of a local file, or what is wrong with it. With `batched` one array of token ids may
    stand for many rows. `counts` gets how many bytes are read. What cannot be read is an UnreadableError."""
    try:
        yield from reader_of(file).read(file, text_field, counts, batched)
    except (OSError, ValueError) as error:  # ValueError: Arrow's
        raise unreadable_file(file, error) from error


def file_status(file: pathlib.Path) -> os.stat_result:
    """Size and times of a data file; an UnreadableError where it is gone since it was listed."""
    try:
        return file.stat()
    except OSError as error:
        raise unreadable_file(file, error) from error


def unreadable_file(file: pathlib.Path, error: Exception) -> UnreadableError:
    unreadable = UnreadableError(f"--dataset {file}: cannot be read ({first_line(error)})", entry="data-unreadable")
    unreadable.file = file
    return unreadable
