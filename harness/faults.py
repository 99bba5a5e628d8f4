"""Faults in a corpus: the file and line of what cannot be read, what stands there and how often, found by reading local
files once more. Called where reading failed, for a token cache as for a stream. It does not know how they read."""

import errno
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import utils

COUNT_SECONDS = 60  # after which a large corpus is not searched for more


def name_fault(
    error: Exception, dataset: str, split: str, files: list[pathlib.Path], cache_dir: os.PathLike | None = None
) -> utils.UserError:
    """What to say of data that cannot be read: of an `UnreadableError`, or of what a library raised while reading.

    The files are the local ones; `cache_dir` is where they are copied to while they are tokenized.
    """
    cause = (error.__cause__ and error.__cause__.__cause__) or error.__cause__ or error
    full, refused = (errno.ENOSPC, errno.EDQUOT, errno.EROFS), (errno.EACCES, errno.ENOTDIR)
    if getattr(cause, "errno", 0) in (full if files else full + refused):
        import datasets

        place = f"--cache-dir {cache_dir}" if files else f"HF_DATASETS_CACHE {datasets.config.HF_DATASETS_CACHE}"
        return utils.UserError(f"{place}: cannot be written ({cause.strerror})")
    said = utils.first_line(cause)
    source = f"--dataset {dataset}, split {split!r}"
    record, named = getattr(error, "record", None), isinstance(error, utils.UnreadableError)
    wrong_split = "split" in said.replace(dataset, "")
    if not files and named and not record and not wrong_split:
        hint = f"without a network use a local {'/'.join(utils.DATA_SUFFIXES)} file or folder, 'synthetic' or 'demo'"
        problem = f"not a local file or folder, and not to be had from the hub ({said})"
        return utils.UserError(f"--dataset {dataset}: {problem}; {hint}")
    if wrong_split:
        divide = " Divide one file with --dataset-split 'train[:95%]' --eval-split 'train[95%:]'."
        return utils.UserError(f"{source}: cannot be read ({said}).{divide * (len(files) == 1)}")
    if gone := [file for file in files if not file.exists()]:
        return utils.UserError(f"--dataset {gone[0]}: deleted while it was read")
    bad, read, first, deadline = 0, 0, "", time.monotonic() + COUNT_SECONDS
    for file in itertools.chain(*utils.files_of_split(dataset, split, files).values()):
        unit = "row" if file.endswith(".parquet") else "line"
        try:
            for number, (value, field) in enumerate(records_of(file), 1):
                read += 1
                if utils.read_record(value, field) is None:
                    bad += 1
                    first = first or f"--dataset {file}, {unit} {number}: {describe(value, field)}"
                if time.monotonic() > deadline:
                    break
        except (OSError, ValueError) as fault:
            return utils.UserError(f"--dataset {file}: cannot be read ({utils.first_line(fault)})")
    counted = f"; {bad:,} of {read:,} {unit}s are bad" if bad else ""
    if not record:
        return utils.UserError(f"{first or source}{counted}: cannot be read ({said})")
    problem = first or f"{source}: {describe(*record)}"
    return utils.UserError(f"{problem}{counted}; mend them, or leave bad records out with --skip-bad-records")


def records_of(file: str) -> Iterator[tuple[Any, str]]:
    """The rows or lines of a local file as `utils.read_record` takes them."""
    if file.endswith(".parquet"):
        import pyarrow.parquet

        parquet = pyarrow.parquet.ParquetFile(file)
        names = parquet.schema_arrow.names
        field = "input_ids" if "input_ids" in names else "text"
        if field not in names:
            raise ValueError(f"no field 'text' (fields: {', '.join(names)})")
        for batch in parquet.iter_batches(columns=[field]):
            for value in utils.values_of(batch[field]):
                yield value, field
    else:
        with open(file, encoding="utf-8-sig", errors="mark") as lines:
            for line in lines:
                yield line, pathlib.Path(file).suffix


def describe(value: Any, field: str) -> str:
    """What a bad record holds, in words."""
    if isinstance(value, str) and utils.NOT_UTF8 in value:
        return "bytes that are not UTF-8"
    if field == ".txt":
        return "a NUL byte"
    if field == ".jsonl":
        try:
            record = json.loads(value)
        except (ValueError, RecursionError) as error:
            return f"broken JSON, {error}".replace("line 1 ", "")
        fields = record if isinstance(record, dict) else {}
        field = "input_ids" if "input_ids" in fields else "text"
        if field not in fields:
            return f"no field 'text' in {json.dumps(record)[:60]}"
        value = fields[field]
    if isinstance(value, str):
        return f"{json.dumps(value)[:60]} with half a surrogate pair"
    return f"{json.dumps(value, default=str)[:60]} instead of {'text' if field == 'text' else 'token ids'}"
