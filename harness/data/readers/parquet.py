"""Parquet files: a row each document, with its text or its token ids in a column. Rows of the hub come as the same
Arrow columns."""

import pathlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

from harness.data.records import MAX_TOKEN_ID, BadRecord, Document, Field, check_value, choose_field

SUFFIXES = (".parquet",)
PLACE = "row"
RECORDS = "rows"
BATCH_ROWS = 1000


def read(
    file: pathlib.Path, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    import pyarrow.parquet

    with file.open("rb") as raw:
        parquet = pyarrow.parquet.ParquetFile(raw)
        field = choose_field(file, parquet.schema_arrow.names, text_field)
        bytes_per_row = file.stat().st_size / max(parquet.metadata.num_rows, 1)
        first_row = 1
        for batch in parquet.iter_batches(BATCH_ROWS, columns=[field]):
            counts["read"] += int(bytes_per_row * batch.num_rows)
            yield from read_column(batch[field], field, first_row, counts, batched)
            first_row += batch.num_rows


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
    from pyarrow import types

    is_list = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    if not is_list or not types.is_integer(column.type.value_type):
        return None
    ids = column.flatten()
    if column.null_count or ids.null_count:
        return None
    ids = ids.to_numpy(zero_copy_only=False)
    return ids if 0 <= ids.min(initial=0) <= ids.max(initial=0) <= MAX_TOKEN_ID else None


def values_of(column) -> list:
    """The values of an Arrow column; text is marked where it is not UTF-8, which Arrow does not check."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [value and value.decode(errors="mark") for value in column.cast("binary").to_pylist()]
