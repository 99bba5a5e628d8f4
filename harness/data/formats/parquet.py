"""Parquet: a document per row, with a text, token ids or a conversation in its columns. A file is cut at row groups."""

import io
import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.data.formats import READ_BYTES, report_read_errors
from harness.data.schema import (
    ID_FIELDS,
    MAX_TOKEN_ID,
    BadRecord,
    Record,
    check_ids,
    choose_name,
    is_named_like_mask,
    layout_of,
    optional_columns,
    read_named,
)

if TYPE_CHECKING:
    import pyarrow

    from harness.data.data_file import DataFile

SUFFIXES = (".parquet",)
RECORD_NAME = "row"
CAN_BE_CUT = True
BATCH_ROWS = 256
READ_AHEAD = 2**22  # bytes per read of a full file


def read(stream: io.RawIOBase, names: tuple[str, ...], start: int = 0, end: int | None = None) -> Iterator[Record]:
    """Yield the rows of the row groups whose first byte is within [start, end), so a group is never read in part. An
    empty file has no rows, as in other formats."""
    stream = seekable(stream)
    if not stream.seek(0, io.SEEK_END):
        return
    parquet = open_parquet(stream, READ_AHEAD if end is None else READ_BYTES)
    field, columns = choose_columns(parquet.schema_arrow, names)
    for group, first in enumerate(row_group_starts(parquet.metadata)):
        if start <= first and (end is None or first < end):
            # without threads for a part: a stream reads it in one of many workers
            for batch in parquet.iter_batches(BATCH_ROWS, [group], columns=columns, use_threads=end is None):
                yield from read_batch(batch, field)


def seekable(stream: Any) -> Any:
    """`stream`, or its content in memory if it cannot seek: Arrow's reader of zstd cannot."""
    return stream if stream.seekable() else io.BytesIO(stream.read())


def open_parquet(stream: io.RawIOBase, buffer_size: int = READ_BYTES) -> "pyarrow.parquet.ParquetFile":
    import pyarrow.parquet

    buffered = io.BufferedReader(stream, buffer_size)
    return pyarrow.parquet.ParquetFile(buffered, buffer_size=buffer_size, pre_buffer=False)


def row_group_parts(file: "DataFile") -> list[tuple[int, int]]:
    """The parts that a file can be cut into: (start, end) in bytes of each row group, in order.

    The parts lie end to end, from 0 to the size of the file; `read` with the start of one part and the end of the same
    or a later one gives the rows of these groups. An empty file has no part. Only the footer is read, but through a
    store it is a request: list the parts on one rank. A UserError if the file cannot be read.
    """
    if not file.size:
        return []
    with report_read_errors(file), file.open() as stream:
        metadata = open_parquet(stream).metadata
    starts = sorted({0, *row_group_starts(metadata)[1:]})  # the first part has the file's header too
    return list(itertools.pairwise([*starts, file.size]))


def row_group_starts(metadata: "pyarrow.parquet.FileMetaData") -> list[int]:
    """The position of the first byte of each row group; Arrow gives 0 for one without rows."""
    columns = (metadata.row_group(group).column(0) for group in range(metadata.num_row_groups))
    return [column.dictionary_page_offset or column.data_page_offset for column in columns]


def choose_columns(schema: "pyarrow.Schema", names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return (the field or layout that is read, the columns that it needs)."""
    flat_columns = {column.name for column in schema if not is_nested(column.type)}
    field = choose_name(schema.names, flat_columns, names)
    column_types = dict(zip(schema.names, schema.types, strict=True))
    if field in column_types and not may_hold_messages(column_types[field]):  # a column of texts or token ids
        columns = [field]
        if field not in flat_columns:  # token ids
            masks = [name for name in schema.names if name not in flat_columns and is_named_like_mask(name)]
            columns += [*(name for name in ID_FIELDS if name in schema.names), *masks]
    else:
        columns = [*layout_of(field).needs, *optional_columns(layout_of(field), schema.names)]
    columns = list(dict.fromkeys(columns))
    if doubled := [name for name in columns if schema.names.count(name) > 1]:
        raise ValueError(f"two of its columns are named {doubled[0]}")
    return field, columns


def is_nested(kind: "pyarrow.DataType") -> bool:
    """True if the values of a column may be lists or objects."""
    from pyarrow import types

    return types.is_nested(kind) or is_json(kind)


def may_hold_messages(kind: "pyarrow.DataType") -> bool:
    """True if the values of a column, or the items of its lists, may be objects."""
    return is_nested(getattr(kind, "value_type", kind))


def is_json(kind: "pyarrow.DataType") -> bool:
    """True for the type of `datasets` for objects that have other fields in each row, which are JSON text in Arrow."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def count(stream: io.RawIOBase) -> int:
    """Return the number of rows of a file, from its footer."""
    return open_parquet(stream).metadata.num_rows if stream.seek(0, io.SEEK_END) else 0


def read_batch(batch: "pyarrow.RecordBatch", field: str) -> Iterator[Record]:
    """Yield the documents of Arrow rows: token ids and what is read with them as slices of arrays, all else through
    Python objects."""
    arrays = {name: batch[name] for name in batch.schema.names}
    columns = {name: rows_of_integers(array) for name, array in arrays.items()}
    ids = columns.pop(field, None)
    all_integers = None not in columns.values()
    if ids is None or not all_integers or not are_token_ids(ids):
        for row in range(batch.num_rows):
            scalars = {name: array[row] for name, array in arrays.items()}
            try:
                fields = {name: scalar.as_py(maps_as_pydicts="strict") for name, scalar in scalars.items()}
                fields = {name: convert(value, scalars[name].type) for name, value in fields.items()}
            # a map has a key twice, a text is not UTF-8, or JSON is broken or nested too deep
            except (KeyError, ValueError, RecursionError) as error:
                fault = error.args[0] if isinstance(error, KeyError) else str(error)
                is_chat = field not in arrays or may_hold_messages(arrays[field].type)
                yield BadRecord(fault, field if is_chat else "")
            else:
                yield read_named(fields, field)
        return
    for row, values in enumerate(ids):
        yield check_ids(values, {name: rows[row] for name, rows in columns.items()})


def convert(value: Any, kind: "pyarrow.DataType") -> Any:
    """Return a value of an Arrow column as its record means it: with JSON parsed, and without the null fields of
    structs. Arrow gives each struct all fields that any of them has, so null means absent; a template would render the
    null."""
    if value is None:
        return None
    if is_json(kind):
        return json.loads(value)
    if isinstance(value, dict):
        kinds = {name: getattr(kind, "item_type", None) or kind.field(name).type for name in value}  # a map or a struct
        return {name: convert(field, kinds[name]) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [convert(item, kind.value_type) for item in value]
    return value


def are_token_ids(rows: list[np.ndarray]) -> bool:
    return all(0 <= row.min(initial=0) <= row.max(initial=0) <= MAX_TOKEN_ID for row in rows)


def rows_of_integers(column: "pyarrow.Array") -> list[np.ndarray] | None:
    """Return the integers of each row, as slices of one array; None if a row has anything else."""
    import pyarrow.compute
    from pyarrow import types

    kind = column.type
    is_list = types.is_nested(kind) and hasattr(kind, "value_type")  # not a struct or map
    if not is_list or not types.is_integer(kind.value_type) or column.null_count:
        return None
    integers = column.flatten()
    if integers.null_count:
        return None
    lengths = pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False)
    array, ends = integers.to_numpy(zero_copy_only=False), [0, *np.cumsum(lengths).tolist()]
    return [array[start:end] for start, end in itertools.pairwise(ends)]
