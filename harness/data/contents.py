"""Contents: what a listed file holds: its records as its reader gives them, or its tokens, mapped."""

import bz2
import contextlib
import functools
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from harness import base
from harness.data.conversations import LAYOUTS, OF_PREFERENCES, describe_layouts
from harness.data.files import DataFile
from harness.data.readers import reader_of
from harness.data.records import BLOCK, Field, NoFieldError, Record, field_names
from harness.data.token_files import TokenFile, damaged


@contextlib.contextmanager
def unpacked(file: DataFile, raw: io.RawIOBase) -> Iterator[BinaryIO]:
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
    file: DataFile, text_field: Field, start: int = 0, end: int | None = None
) -> Iterator[tuple[str, Record]]:
    """(place in words, record) of a file, or of the part of a file that can be cut; a UserError where it cannot be
    read."""
    reader = reader_of(file.name)
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


def open_token_file(file: DataFile, vocab_size: int) -> TokenFile:
    if file.packing:
        raise damaged(file, "it is packed, and token files are mapped", "unpack it")
    try:
        opened = reader_of(file.name).open_tokens(file.path, vocab_size)
    except (OSError, ValueError) as error:
        raise base.UserError(f"--dataset {file}: cannot be read ({base.first_line(error)})") from error
    opened.reopen = functools.partial(open_token_file, file, vocab_size)
    return opened
