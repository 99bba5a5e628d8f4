"""Formats: the list of readers, by the suffixes of their files. Everything else asks it what is a data file, how it is
read or mapped, and how a place in it is called."""

import importlib
import os
import pathlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

from harness.base import UnreadableError, first_line
from harness.data import readers
from harness.data.mapped import TokenFile, damaged
from harness.data.records import COMPRESSIONS, BadRecord, Document, Field
from harness.data.storage import DataFile, RemoteFile, RemoteStatus
from harness.data.store_requests import cannot_map


def find_readers() -> tuple[dict[str, ModuleType], list[ModuleType]]:
    """(the modules in the folder of readers by the suffixes that they read, those that need a file beside theirs)."""
    by_suffix, paired = {}, []
    for entry in pkgutil.iter_modules(readers.__path__):
        reader = importlib.import_module(f"{readers.__name__}.{entry.name}")
        if hasattr(reader, "BESIDE"):
            paired.append(reader)
            continue
        for suffix in reader.SUFFIXES:
            by_suffix[suffix] = reader
    return by_suffix, paired


READERS, PAIRED_READERS = find_readers()
DATA_SUFFIXES = tuple(sorted(READERS))  # in any case, and packed: .TXT, .jsonl.gz


def reader_of(path) -> ModuleType | None:
    """The reader of a file by its name, packed or not; None where it is no data file."""
    name, packed = os.path.splitext(str(path).lower())
    if packed not in COMPRESSIONS:
        name += packed
    for reader in PAIRED_READERS:
        is_remote = isinstance(path, RemoteFile)
        if name.endswith(reader.SUFFIXES) and not is_remote and pathlib.Path(path).with_suffix(reader.BESIDE).exists():
            return reader
    for suffix, reader in READERS.items():
        if name.endswith(suffix):
            return reader
    return None


def all_readers() -> list[ModuleType]:
    return [*PAIRED_READERS, *dict.fromkeys(READERS.values())]


def owner_of(path: pathlib.Path) -> pathlib.Path | None:
    """The data file that a file belongs to by its name, such as NAME.bin for NAME.idx, whether it is there or not; the
    file itself where it may stand alone. None for a file that belongs to none."""
    for reader in all_readers():
        for suffix, of_owner in getattr(reader, "COMPANIONS", {}).items():
            if path.name.endswith(suffix):
                return path.with_name(path.name.removesuffix(suffix) + of_owner) if of_owner else path
        if path.name in getattr(reader, "COMPANION_NAMES", ()):
            return next((other for other in path.parent.rglob("*") if other.name.endswith(reader.SUFFIXES)), None)
    return None


def reason_to_leave_out(file: pathlib.Path) -> str:
    """Why a file is no data although it has a data file's name; "" for one that is."""
    reader = reader_of(file)
    return reader.leave_out(file) if hasattr(reader, "leave_out") else ""


def can_map(file: DataFile, text_field: Field) -> bool:
    """Whether the tokens of a file can be mapped; otherwise its records are read."""
    reader = reader_of(file)
    if isinstance(file, RemoteFile):
        if not hasattr(reader, "read"):
            raise cannot_map(file.url)
        return False
    if not hasattr(reader, "read"):
        return True
    if not hasattr(reader, "holds_tokens"):
        return False
    try:
        return reader.holds_tokens(file, text_field)
    except (OSError, ValueError) as error:
        raise unreadable_file(file, error) from error


def map_tokens(file: pathlib.Path, text_field: Field, vocab_size: int) -> TokenFile:
    """The tokens of a local file, mapped. What cannot be read is an UnreadableError."""
    if file.suffix.lower() in COMPRESSIONS:
        raise damaged(file, "it is packed, and token files are mapped", "unpack it")
    try:
        return reader_of(file).open_tokens(file, text_field, vocab_size)
    except (OSError, ValueError) as error:
        raise unreadable_file(file, error) from error


def name_place(file: DataFile, number: int) -> str:
    """A file and the place of a record in it, as messages name them."""
    return f"{file}, {reader_of(file).PLACE} {number}"


def file_records(
    file: DataFile, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    """The document of each record of a file, or what is wrong with it. With `batched` one array of token ids may
    stand for many rows. `counts` gets how many bytes are read. What cannot be read is an UnreadableError."""
    try:
        yield from reader_of(file).read(file, text_field, counts, batched)
    except (OSError, ValueError) as error:  # ValueError: Arrow's
        raise unreadable_file(file, error) from error


def file_status(file: DataFile) -> os.stat_result | RemoteStatus:
    """Size and times of a data file; an UnreadableError where it is gone since it was listed."""
    try:
        return file.stat()
    except OSError as error:
        raise unreadable_file(file, error) from error


def file_version(file: DataFile) -> tuple[str, int, int | str]:
    """(place, size, time of its change or mark of the store): what tells a file from others and from itself changed."""
    status = file_status(file)
    if isinstance(file, RemoteFile):
        return str(file), status.st_size, status.mark
    return str(file.resolve()), status.st_size, status.st_mtime_ns


def unreadable_file(file: DataFile, error: Exception) -> UnreadableError:
    unreadable = UnreadableError(f"--dataset {file}: cannot be read ({first_line(error)})")
    unreadable.file = file
    return unreadable
