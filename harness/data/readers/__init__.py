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

import functools
import importlib
import os
import pkgutil
from types import ModuleType

from harness.data.records import COMPRESSIONS


@functools.cache
def all_readers() -> dict[str, ModuleType]:
    """The modules of this folder by the suffixes that they read."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        reader = importlib.import_module(f"{__name__}.{entry.name}")
        for suffix in reader.SUFFIXES:
            found[suffix] = reader
    return found


def suffixes() -> list[str]:
    """The suffixes of data files, in any case, and packed: .TXT, .jsonl.gz."""
    return sorted(all_readers())


def reader_of(name: str) -> ModuleType | None:
    """The reader of a file by its name, packed or not; None where it is no data file."""
    stem, packed = os.path.splitext(name.lower())
    if packed not in COMPRESSIONS:
        stem += packed
    return next((reader for suffix, reader in all_readers().items() if stem.endswith(suffix)), None)


def companions() -> tuple[str, ...]:
    """The suffixes of files that belong to a data file, such as its index."""
    return tuple(suffix for reader in all_readers().values() for suffix in getattr(reader, "COMPANIONS", ()))


def is_token_file(name: str) -> bool:
    """Whether the tokens of a file are mapped; otherwise its records are read."""
    return hasattr(reader_of(name), "open_tokens")
