"""Faults in a corpus: the file and line of what cannot be read, what stands there and how often, found by reading local
files once more. Called where reading failed, for a token cache as for a stream. It does not know how they read."""

import collections
import errno
import glob
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import utils

DISK = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR)]
COUNT_SECONDS = 60  # after which a large corpus is not searched for more


def name_fault(error: Exception, dataset: str, split: str, text_field: str = "text") -> utils.UserError:
    """What to say of data that cannot be read: of an `UnreadableError`, or of what a library raised while reading."""
    source, record = f"--dataset {dataset}, split {split!r}", getattr(error, "record", None)
    said, of_a_file = utils.first_line(error), os.path.exists(dataset) or glob.has_magic(dataset)
    if of_a_file and isinstance(error, utils.UnreadableError) and not record:
        return utils.UserError(str(error))
    files = utils.local_files(dataset)
    if not files and (why := next((why for why in DISK if why in said), "")):
        import datasets

        place = f"HF_DATASETS_CACHE {datasets.config.HF_DATASETS_CACHE}"
        return utils.UserError(f"{place}: cannot be written ({why})")
    if not files and isinstance(error, utils.UnreadableError) and not record:
        hint = f"without a network use a local {'/'.join(utils.DATA_SUFFIXES)} file or folder, 'synthetic' or 'demo'"
        cause = re.sub(r".*?cannot be read \((.*)\)$", r"\1", said)
        problem = f"not a local file or folder, and not to be had from the hub ({cause})"
        return utils.UserError(f"--dataset {dataset}: {problem}; {hint}")
    bad, read, first, deadline, unit = 0, 0, "", time.monotonic() + COUNT_SECONDS, "line"
    for file in utils.files_of_split(dataset, utils.parse_split(split)[0], files) if files else ():
        unit = "row" if utils.kind_of(file) == ".parquet" else "line"
        try:
            for number, (value, field) in enumerate(records_of(file, text_field), 1):
                read += 1
                if utils.read_record(value, field, text_field) is None:
                    bad += 1
                    first = first or f"--dataset {file}, {unit} {number}: {describe(value, field, text_field)}"
                if time.monotonic() > deadline:
                    break
        except utils.UserError as fault:
            return fault
    counted = f"; {bad:,} of {read:,} {unit}s are bad" if bad else ""
    if not record:
        return utils.UserError(f"{first or source}{counted}: cannot be read ({said})")
    problem = first or f"{source}: {describe(*record, text_field)}"
    advice = "mend them, or leave bad records out with --skip-bad-records"
    advice = "name the field with --text-field, or " * ("no field" in problem) + advice
    return utils.UserError(f"{problem}{counted}; {advice}")


def records_of(file: pathlib.Path, text_field: str) -> Iterator[tuple[Any, str]]:
    """The rows or lines of a local file as `utils.read_record` takes them."""
    if utils.kind_of(file) in (".txt", ".md"):
        with file.open("rb") as raw:
            for line in utils.open_text(file, raw):
                yield line, ".txt"
    else:
        yield from utils.file_records(file, text_field, collections.Counter())


def describe(value: Any, field: str, text_field: str) -> str:
    """What a bad record holds, in words."""
    if isinstance(value, str) and utils.NOT_UTF8 in value:
        return "bytes that are not UTF-8"
    if field in (".txt", ".md"):
        return "a NUL byte"
    if field == ".jsonl":
        try:
            record = json.loads(value)
        except (ValueError, RecursionError) as error:
            return f"broken JSON, {error}".replace("line 1 ", "")
        fields = record if isinstance(record, dict) else {}
        field = "input_ids" if "input_ids" in fields else text_field
        if field not in fields:
            return f"no field {text_field!r} in {json.dumps(record)[:60]}"
        value = fields[field]
    if isinstance(value, str):
        return f"{json.dumps(value)[:60]} with half a surrogate pair"
    return f"{json.dumps(value, default=str)[:60]} instead of {'token ids' if field == 'input_ids' else 'text'}"
