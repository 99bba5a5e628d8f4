"""Arrow's IPC files, such as those in the folders of `datasets.save_to_disk`: a row each document. A list column of
token ids that is not compressed is mapped; text and compressed columns are read as those of Parquet files are."""

import functools
import json
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from harness.data.mapped import Mapping, TokenFile, damaged
from harness.data.readers.parquet import is_list_of_ids, read_column
from harness.data.records import BadRecord, Document, Field, choose_field, names_of

SUFFIXES = (".arrow",)
PLACE = "row"
RECORDS = "rows"
COMPANION_NAMES = ("dataset_info.json", "state.json", "dataset_dict.json")  # of datasets' folders
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class Batches(NamedTuple):
    """A mapped file of record batches."""

    mapping: Mapping
    source: Any  # the pyarrow.BufferReader of it
    names: list[str]  # of the columns
    batches: Iterator  # of pyarrow.RecordBatch


def leave_out(file: pathlib.Path) -> str:
    """Why a file is no data: in a folder of datasets there are also copies that its `map` and `filter` keep there."""
    state = file.with_name("state.json")
    if not state.exists():
        return ""
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return "" if file.name in names else "not in state.json"


def open_batches(file: pathlib.Path) -> Batches:
    """Maps a file in either of Arrow's two layouts; Arrow's ValueError where it is neither."""
    import pyarrow

    if not file.stat().st_size:
        raise damaged(file, "it is empty")
    mapping = Mapping(file)
    source = pyarrow.BufferReader(pyarrow.py_buffer(mapping.bytes))
    if mapping.bytes[:6].tobytes() == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        return Batches(mapping, source, reader.schema.names, batches)
    if mapping.bytes[-len(STREAM_END) :].tobytes() != STREAM_END:
        raise damaged(file, "the mark at its end is not there: it was not written to its end")
    reader = pyarrow.ipc.open_stream(source)
    return Batches(mapping, source, reader.schema.names, iter(reader))


def read(
    file: pathlib.Path, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    opened = open_batches(file)
    field = choose_field(file, opened.names, text_field)
    first_row, position = 1, 0
    for batch in opened.batches:
        yield from read_column(batch[field], field, first_row, counts, batched)
        first_row += batch.num_rows
        counts["read"] += max(0, opened.source.tell() - position)
        position = opened.source.tell()


def holds_tokens(file: pathlib.Path, text_field: Field) -> bool:
    """Whether the column that is trained on can be mapped: lists of integers that are not compressed."""
    opened = open_batches(file)
    names = [name for name in names_of(text_field) if name in opened.names]
    if not names:
        return False
    for batch in opened.batches:
        column = batch[names[0]]
        if not is_list_of_ids(column.type):
            return False
        numbers = column.flatten().buffers()[-1]
        if numbers is not None and numbers.size:  # unpacked ones are elsewhere in memory
            offset = numbers.address - opened.mapping.bytes.ctypes.data
            return 0 <= offset < len(opened.mapping.bytes)
    return True


def open_tokens(file: pathlib.Path, text_field: Field, vocab_size: int) -> TokenFile:
    opened = open_batches(file)
    field = choose_field(file, opened.names, text_field)
    columns, pieces, rows = [], [], 0
    for batch in opened.batches:
        column = batch[field]
        ids = column.flatten()
        if column.null_count or ids.null_count:
            row = rows + first_with_null(column)
            raise damaged(f"{file}, row {row:,}", "null instead of token ids", "remove the row")
        columns.append(column)
        pieces.append(ids.to_numpy(zero_copy_only=True))
        rows += len(column)
    kind = f"Arrow's list column {field!r}"
    if pieces:
        kind += f", {pieces[0].dtype.name}"
    return TokenFile(kind, opened.mapping, pieces, functools.partial(document_ends, columns))


def first_with_null(column) -> int:
    """The number of the first row, from 1 on, that is null or has a null in it."""
    for number, row in enumerate(column, 1):
        if not row.is_valid or row.values.null_count:
            return number
    return 1


def document_ends(columns: list) -> np.ndarray:
    """Where each row ends."""
    import pyarrow.compute

    lengths = [np.empty(0, np.int64)]
    for column in columns:
        lengths.append(pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False))
    return np.cumsum(np.concatenate(lengths), dtype=np.int64)
