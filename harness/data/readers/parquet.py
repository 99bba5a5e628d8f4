"""Parquet files: a row each document, with its text or its token ids in a column. Rows of the hub come as the same
Arrow columns."""

import io
from collections import Counter
from collections.abc import Iterator

import numpy as np

from harness.data.records import (
    BUFFER_BYTES,
    CHAT_FIELD,
    MAX_TOKEN_ID,
    BadRecord,
    CountedFile,
    Document,
    Field,
    check_conversation,
    check_value,
    choose_field,
)
from harness.data.storage import DataFile, open_file

SUFFIXES = (".parquet",)
PLACE = "row"
RECORDS = "rows"
BATCH_ROWS = 1000
RANGE_ROWS = 64  # of a range: many ranges may be read at a time


def read(file: DataFile, text_field: Field, counts: Counter, batched: bool = False) -> Iterator[Document | BadRecord]:
    import pyarrow.parquet

    with open_file(file) as raw:
        parquet = pyarrow.parquet.ParquetFile(raw)
        field = choose_field(file, parquet.schema_arrow.names, text_field)
        bytes_per_row = file.stat().st_size / max(parquet.metadata.num_rows, 1)
        columns = columns_of_record(parquet.schema_arrow.names, field)
        first_row = 1
        for batch in parquet.iter_batches(BATCH_ROWS, columns=columns):
            counts["read"] += int(bytes_per_row * batch.num_rows)
            yield from read_batch(batch, columns, first_row, counts, batched)
            first_row += batch.num_rows


def read_range(
    file: DataFile, text_field: Field, counts: Counter, start: int, end: int
) -> Iterator[Document | BadRecord]:
    """The rows whose share of the file lies there; of row groups only those with such rows are read."""
    import pyarrow.parquet

    with io.BufferedReader(CountedFile(file, counts), BUFFER_BYTES) as raw:
        parquet = pyarrow.parquet.ParquetFile(raw, buffer_size=BUFFER_BYTES, pre_buffer=False)
        field = choose_field(file, parquet.schema_arrow.names, text_field)
        first, last = row_from(file, parquet, start), row_from(file, parquet, end)
        row = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if row < last and row + rows > first:
                for batch in parquet.iter_batches(RANGE_ROWS, [group], columns=[field], use_threads=False):
                    wanted = batch[field][max(0, first - row) : max(0, last - row)]
                    if len(wanted):
                        yield from read_column(wanted, field, max(row, first) - first + 1, counts, batched=False)
                    row += batch.num_rows
                    if row >= last:
                        break
            else:
                row += rows


def count_before(file: DataFile, start: int) -> int:
    import pyarrow.parquet

    with file.open("rb") as raw:
        return row_from(file, pyarrow.parquet.ParquetFile(raw), start)


def row_from(file: DataFile, parquet, start: int) -> int:
    """The first row at or after a byte of a file, as if all rows were equally long."""
    return -(-parquet.metadata.num_rows * start // file.stat().st_size)


def columns_of_record(names: list[str], field: str) -> list[str]:
    """The columns that a document is made of: its field, and for a conversation its tools too."""
    return [field, "tools"] if field == CHAT_FIELD and "tools" in names else [field]


def read_batch(batch, columns: list[str], first_row: int, counts: Counter, batched: bool) -> list[Document | BadRecord]:
    """The documents of rows in Arrow, see `read_column`."""
    if len(columns) == 1:
        return read_column(batch[columns[0]], columns[0], first_row, counts, batched)
    messages, tools = (values_of(batch[name]) for name in columns)
    rows = enumerate(zip(messages, tools, strict=True), first_row)
    return [check_conversation(of_row, number, its_tools) for number, (of_row, its_tools) in rows]


def read_column(column, field: str, first_row: int, counts: Counter, batched: bool) -> list[Document | BadRecord]:
    """The documents of an Arrow column. Where all are token ids they are arrays, or with `batched` one array, and
    `counts["documents"]` gets the number of rows that the array stands for beside the first."""
    column = column.combine_chunks() if hasattr(column, "chunks") else column
    ids = token_ids(column)
    if ids is None:
        return [check_value(value, field, number) for number, value in enumerate(values_of(column), first_row)]
    if batched:
        counts["documents"] += len(column) - 1
        return [ids]
    import pyarrow.compute

    lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
    return np.split(ids, np.cumsum(lengths)[:-1])


def token_ids(column) -> np.ndarray | None:
    """The token ids of all rows end to end; None where a row has anything else, which is then found row by row."""
    if not is_list_of_ids(column.type):
        return None
    ids = column.flatten()
    if column.null_count or ids.null_count:
        return None
    ids = ids.to_numpy(zero_copy_only=False)
    return ids if 0 <= ids.min(initial=0) <= ids.max(initial=0) <= MAX_TOKEN_ID else None


def is_list_of_ids(column_type) -> bool:
    """Whether a column of this Arrow type has lists of integers."""
    from pyarrow import types

    is_list = types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type)
    return is_list and types.is_integer(column_type.value_type)


def values_of(column) -> list:
    """The values of an Arrow column; text is marked where it is not UTF-8, which Arrow does not check."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [value and value.decode(errors="mark") for value in column.cast("binary").to_pylist()]
