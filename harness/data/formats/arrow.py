"""Arrow IPC, stream or file: what `datasets` writes to its cache and with `save_to_disk`. A document per row, with
columns as in Parquet."""

import io
from collections.abc import Iterator
from typing import BinaryIO

from harness.data.formats.parquet import BATCH_ROWS, READ_AHEAD, choose_columns, read_batch, seekable
from harness.data.schema import Record

SUFFIXES = (".arrow",)
RECORD_NAME = "row"

FILE_MAGIC = b"ARROW1"  # first bytes of the file format, not of a stream


def read(stream: BinaryIO, names: tuple[str, ...]) -> Iterator[Record]:
    """Yield the rows of a file; an empty file has none, as in other formats."""
    import pyarrow.ipc

    buffered = io.BufferedReader(seekable(stream), READ_AHEAD)
    beginning = buffered.peek(len(FILE_MAGIC))
    if not beginning:
        return
    if beginning.startswith(FILE_MAGIC):
        reader = pyarrow.ipc.open_file(buffered)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    else:
        batches = reader = pyarrow.ipc.open_stream(buffered)
    field, columns = choose_columns(reader.schema, names)
    for batch in batches:
        for first in range(0, batch.num_rows, BATCH_ROWS):
            yield from read_batch(batch.select(columns)[first : first + BATCH_ROWS], field)
