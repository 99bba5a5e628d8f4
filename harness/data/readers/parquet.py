"""Parquet files: a row each document, with its text, its token ids or its messages in a column."""

import io
import itertools
from collections.abc import Iterator

import numpy as np

from harness.data.records import BLOCK, CHAT_FIELD, MAX_TOKEN_ID, Field, Record, check_value, choose_field

SUFFIXES = (".parquet",)
PLACE = "row"
CAN_BE_CUT = True
PART_BYTES = 2**25  # of a part of a file: a row group is read from its beginning for each part of it
BATCH_ROWS = 256
READ_AHEAD = 2**22  # bytes of a file that is read as a whole


def read(stream: io.RawIOBase, text_field: Field, start: int = 0, end: int | None = None) -> Iterator[Record]:
    """The rows whose share of the file lies there, as if all were equally long; of row groups only those with such rows
    are read. A file of no byte has none, as in other formats."""
    import pyarrow.parquet

    size = stream.seek(0, io.SEEK_END)
    if not size:
        return
    buffer_size = READ_AHEAD if end is None else BLOCK
    parquet = pyarrow.parquet.ParquetFile(
        io.BufferedReader(stream, buffer_size), buffer_size=buffer_size, pre_buffer=False
    )
    names = parquet.schema_arrow.names
    field = choose_field(names, text_field)
    columns = [field, "tools"] if field == CHAT_FIELD and "tools" in names else [field]
    rows = parquet.metadata.num_rows
    first, last = -(-rows * start // size), rows if end is None else -(-rows * end // size)
    group_start = 0
    for group in range(parquet.num_row_groups):
        row, group_end = group_start, group_start + parquet.metadata.row_group(group).num_rows
        if group_start < last and group_end > first:
            for batch in parquet.iter_batches(BATCH_ROWS, [group], columns=columns, use_threads=end is None):
                wanted = batch[max(0, first - row) : max(0, last - row)]
                yield from read_batch(wanted, field)
                row += batch.num_rows
                if row >= last:
                    return
        group_start = group_end


def count(stream: io.RawIOBase) -> int:
    """How many rows a file has, by what stands at its end."""
    import pyarrow.parquet

    if not stream.seek(0, io.SEEK_END):
        return 0
    return pyarrow.parquet.ParquetFile(io.BufferedReader(stream, BLOCK)).metadata.num_rows


def read_batch(batch, field: str) -> Iterator[Record]:
    """The documents of rows in Arrow."""
    ids = token_ids(batch[field])
    if ids is not None:
        import pyarrow.compute

        lengths = pyarrow.compute.list_value_length(batch[field]).to_numpy(zero_copy_only=False)
        ends = [0, *np.cumsum(lengths).tolist()]
        yield from (ids[start:end] for start, end in itertools.pairwise(ends))
        return
    tools = batch["tools"].to_pylist() if "tools" in batch.schema.names else [None] * len(batch)
    for value, its_tools in zip(batch[field].to_pylist(), tools, strict=True):
        yield check_value(value, field, its_tools)


def token_ids(column) -> np.ndarray | None:
    """The token ids of all rows end to end; None where a row has anything else, which is then found row by row."""
    from pyarrow import types

    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type) or column.null_count:
        return None
    ids = column.flatten()
    if ids.null_count:
        return None
    ids = ids.to_numpy(zero_copy_only=False)
    return ids if 0 <= ids.min(initial=0) <= ids.max(initial=0) <= MAX_TOKEN_ID else None
