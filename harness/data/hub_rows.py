"""Rows of the hub: data sets that `datasets` fetches, read as the columns of a Parquet file are."""

import logging
import re
from collections import Counter
from collections.abc import Iterator

from harness.base import NoSplitError, UnreadableError, answer_from_cache_without_network, first_line
from harness.data.readers.parquet import BATCH_ROWS, columns_of_record, read_batch
from harness.data.records import BadRecord, Document, Field, choose_field


def load_documents(dataset: str, split: str, subset: str | None = None, streaming: bool = False):
    """A split of a hub data set as a `datasets.Dataset` or `IterableDataset`."""
    answer_from_cache_without_network(dataset)  # before the import, which reads it
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # the error below alone reports what goes wrong
    try:
        return datasets.load_dataset(dataset, subset, split=split, streaming=streaming)
    except Exception as error:
        cause = error
        for _ in range(2):  # `datasets` wraps what happened up to twice
            cause = cause.__cause__ or cause
        reason = first_line(cause)
        kind = NoSplitError if re.search("(Unknown|Bad) split", reason) else UnreadableError
        raise kind(f"--dataset {dataset}, split {split!r}: cannot be read ({reason})") from error


def find_features(dataset: str, subset: str | None = None):
    """The columns of a hub data set with their types, a `datasets.Features`, without its rows; None where its card does
    not list them and it was never fetched, or where it cannot be read."""
    answer_from_cache_without_network(dataset)
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # `load_documents` reports what goes wrong
    try:
        return datasets.load_dataset_builder(dataset, subset).info.features
    except Exception:
        return None


def shard_of(rows, number: int):
    """One of the `rows.num_shards` shards of an `IterableDataset`; mostly that is a file on the hub."""
    return rows.shard(rows.num_shards, number)


def hub_records(
    rows, source: str, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    """The document of each row of a `datasets.Dataset` or `IterableDataset`, as `file_records` gives those of a file;
    `counts` gets how many rows are read. Shuffled rows are numbered in the order in which they come."""
    first_row = 1
    for table in rows.with_format("arrow").iter(BATCH_ROWS):
        field = choose_field(source, table.column_names, text_field)
        columns = columns_of_record(table.column_names, field)
        counts["read"] += len(table)
        yield from read_batch(table, columns, first_row, counts, batched)
        first_row += len(table)
