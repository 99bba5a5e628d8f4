"""Formats: how each kind of file gives its records, and a record its text or token ids."""

import codecs
import functools
import io
import json
import logging
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.base.errors import NoSplitError, UnreadableError, UserError
from harness.base.text import first_line
from harness.data.corpus_files import COMPRESSIONS, kind_of

DOCUMENT_MARK = "<|endoftext|>"  # separates the documents of a text file, as in the original TinyStories files
NOT_UTF8 = "\ufdd0not UTF-8\ufdd1"  # stands for bytes of a file that are no text, until `read_record` meets it
codecs.register_error("mark", lambda error: (NOT_UTF8, error.end))


def load_documents(dataset: str, split: str, subset: str | None = None, streaming: bool = False):
    """A split of a hub data set as a `datasets.Dataset` or `IterableDataset`."""
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said below, once
    try:
        return datasets.load_dataset(dataset, subset, split=split, streaming=streaming)
    except Exception as error:
        said = first_line((error.__cause__ and error.__cause__.__cause__) or error.__cause__ or error)
        kind = NoSplitError if re.search("(Unknown|Bad) split", said) else UnreadableError
        raise kind(f"--dataset {dataset}, split {split!r}: cannot be read ({said})") from error


Field = str | tuple[str, ...]  # the column that is trained on, or several: the first one that is there
DEFAULT_FIELD = ("input_ids", "text")


def names_of(text_field: Field) -> tuple[str, ...]:
    return (text_field,) if isinstance(text_field, str) else text_field


def choose_field(source: Any, names: list[str], text_field: Field) -> str:
    """The column that is trained on."""
    wanted = names_of(text_field)
    if field := next((name for name in wanted if name in names), None):
        return field
    raise UserError(f"--text-field {wanted[-1]}: no such field in {source} (fields: {', '.join(names)})")


def hub_records(
    rows, source: str, text_field: Field, counts: Counter, whole: bool = False
) -> Iterator[tuple[Any, str]]:
    """(value, its field) of each row of a `datasets.Dataset` or `IterableDataset`; `counts` gets how many are read."""
    for table in rows.with_format("arrow").iter(1000):
        field = choose_field(source, table.column_names, text_field)
        values = values_of(table[field], whole)
        counts.update(read=len(table), documents=len(table) - len(values))
        yield from ((value, field) for value in values)


def file_records(file: pathlib.Path, text_field: Field, counts: Counter, whole=False) -> Iterator[tuple[Any, str]]:
    """(value, its field) of each record of a local file: of a .jsonl the lines, of a text file the parts between marks.
    `counts` gets how many bytes are read. What cannot be read is an UnreadableError."""
    kind, before, rest = kind_of(file), counts["read"], ""
    try:
        with file.open("rb") as raw:
            if kind == ".parquet":
                import pyarrow.parquet

                parquet = pyarrow.parquet.ParquetFile(raw)
                field = choose_field(file, parquet.schema_arrow.names, text_field)
                for batch in parquet.iter_batches(1000, columns=[field]):
                    values, share = values_of(batch[field], whole), batch.num_rows / parquet.metadata.num_rows
                    counts.update(read=int(share * file.stat().st_size), documents=batch.num_rows - len(values))
                    yield from ((value, field) for value in values)
                return
            text = open_text(file, raw)
            for part in text if kind == ".jsonl" else iter(functools.partial(text.read, 2**24), ""):
                counts["read"] = before + raw.tell()
                *parts, rest = [part, ""] if kind == ".jsonl" else (rest + part).split(DOCUMENT_MARK)
                yield from ((part if kind == ".jsonl" else part.strip("\n"), kind) for part in parts)
            if rest.strip("\n"):
                yield rest.strip("\n"), kind
    except (OSError, ValueError) as error:  # ValueError: Arrow's
        raise UnreadableError(f"--dataset {file}: cannot be read ({first_line(error)})") from error


def open_text(file: pathlib.Path, raw) -> io.TextIOWrapper:
    """The text of an open data file, unpacked; bytes that are not UTF-8 are marked, line ends are newlines."""
    if codec := COMPRESSIONS.get(file.suffix.lower()):
        import pyarrow

        raw = pyarrow.input_stream(raw, compression=codec)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="mark")


def values_of(column, whole: bool) -> list:
    """The values of an Arrow column: token ids as arrays, or one array if `whole`; text marked where it is not UTF-8,
    which Arrow does not check."""
    import pyarrow.compute
    from pyarrow import types

    column = column.combine_chunks() if hasattr(column, "chunks") else column
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if any(is_kind(column.type) for is_kind in kinds) and types.is_integer(column.type.value_type):
        ids = column.flatten()
        if not (column.null_count or ids.null_count):
            ids = ids.to_numpy(zero_copy_only=False)
            if 0 <= ids.min(initial=0) <= ids.max(initial=0) < 2**32:  # else each row is looked at by itself
                ends = np.cumsum(pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False))[:-1]
                return np.split(ids, [] if whole else ends)
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [value and value.decode(errors="mark") for value in column.cast("binary").to_pylist()]


def read_record(value: Any, field: str, text_field: Field = DEFAULT_FIELD) -> str | list[int] | np.ndarray | None:
    """The text or token ids of a record, or None for a bad one, which has neither.

    `field` is the column of `value`, or the kind of its file, .jsonl for a line of one, .txt for a document.
    """
    if field == ".jsonl":
        if not value.strip():
            return []  # a blank line is no document
        try:
            record = json.loads(value)
        except (ValueError, RecursionError):
            return None
        record = record if isinstance(record, dict) else {}
        field = next((name for name in names_of(text_field) if name in record), names_of(text_field)[-1])
        value = record.get(field)
    if isinstance(value, np.ndarray):
        return value
    if field == "input_ids":
        good = isinstance(value, list) and set(map(type, value)) <= {int}
        good = good and 0 <= min(value, default=0) <= max(value, default=0) < 2**32
    else:
        good = isinstance(value, str) and NOT_UTF8 not in value and not (field in (".txt", ".md") and "\0" in value)
        good = good and (value.isascii() or not re.search("[\ud800-\udfff]", value))  # of an escape in JSON
    return value if good else None
