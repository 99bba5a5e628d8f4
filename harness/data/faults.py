"""Faults in a corpus: the file and line of what cannot be read, what stands there and how often, found by reading local
files once more. Called where reading failed, for a token cache as for a stream. It does not know how they read."""

import codecs
import collections
import contextlib
import errno
import json
import os
import pathlib
import re
import shlex
import time
from collections.abc import Iterator
from typing import Any

from harness.base.errors import UnreadableError, UserError
from harness.base.text import first_line
from harness.data.corpus_files import COMPRESSIONS, DATA_SUFFIXES, kind_of, local_files
from harness.data.formats import DEFAULT_FIELD, NOT_UTF8, Field, file_records, names_of, open_text, read_record
from harness.data.splits import files_of_split, parse_split
from harness.flags.settings import is_local

DISK = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR)]
MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}  # before UTF-16, which begins as they do
MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
COUNT_SECONDS = 60  # after which a large corpus is not searched for more


def name_fault(error: Exception, dataset: str, split: str, text_field: Field = DEFAULT_FIELD) -> UserError:
    """What to say of data that cannot be read: of an `UnreadableError`, or of what a library raised while reading."""
    source, record = f"--dataset {dataset}, split {split!r}", getattr(error, "record", None)
    said = first_line(error)
    if is_local(dataset) and isinstance(error, UnreadableError) and not record:
        return UserError(str(error))
    files = local_files(dataset)
    if not files and (why := next((why for why in DISK if why in said), "")):
        import datasets

        place = f"HF_DATASETS_CACHE {datasets.config.HF_DATASETS_CACHE}"
        return UserError(f"{place}: cannot be written ({why})")
    if not files and isinstance(error, UnreadableError) and not record:
        hint = f"without a network use a local {'/'.join(DATA_SUFFIXES)} file or folder, 'synthetic' or 'demo'"
        cause = re.sub(r".*?cannot be read \((.*)\)$", r"\1", said)
        problem = f"not a local file or folder, and not to be had from the hub ({cause})"
        return UserError(f"--dataset {dataset}: {problem}; {hint}")
    first, convert, unit, here, counts, deadline = "", "", "line", "", [], time.monotonic() + COUNT_SECONDS
    of_split = files_of_split(dataset, parse_split(split)[0], files) if files else ()
    for file in of_split:
        bad = read = 0
        unit = "row" if kind_of(file) == ".parquet" else "line"
        try:
            for number, (value, field) in enumerate(records_of(file, text_field), 1):
                read += 1
                if read_record(value, field, text_field) is None:
                    bad += 1
                    if not first:
                        first = f"--dataset {file}, {unit} {number}: {describe(value, field, text_field)}"
                        if isinstance(value, str) and NOT_UTF8 in value and unit == "line":
                            encoding, convert = guess_encoding(file)
                            first += encoding
                if time.monotonic() > deadline:
                    break
        except UserError as fault:
            return fault
        counts.append((bad, read))
        here = here or (f"; {bad:,} of {read:,} {unit}s are bad" if bad else "")
    bad, read = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    counted = here + f", {bad:,} of {read:,} in all {len(of_split)} files" * (len(of_split) > 1 and bool(bad))
    if not record:
        return UserError(f"{first or source}{counted}: cannot be read ({said})")
    problem = first or f"{source}: {describe(*record, text_field)}"
    mend = f"convert it: {convert}" if convert else "mend them"
    advice = mend + ", or leave bad records out with --skip-bad-records" * (not bad or bad < read)
    advice = "name the field with --text-field, or " * ("no field" in problem) + advice
    return UserError(f"{problem}{counted}; {advice}")


def records_of(file: pathlib.Path, text_field: Field) -> Iterator[tuple[Any, str]]:
    """The rows or lines of a local file as `formats.read_record` takes them."""
    if kind_of(file) in (".txt", ".md"):
        with file.open("rb") as raw:
            for line in open_text(file, raw):
                yield line, ".txt"
    else:
        yield from file_records(file, text_field, collections.Counter())


def guess_encoding(file: pathlib.Path) -> tuple[str, str]:
    """(in which encoding a text file that is not UTF-8 may be, in words, the command that converts it); nothing where
    it cannot be told, or where a part of it is UTF-8."""
    start = b""
    with file.open("rb") as raw:
        text = open_text(file, raw)
        with contextlib.suppress(OSError):  # a packed file that is cut further on
            start = text.buffer.read(2**24)
    for mark, name in MARKS.items():
        if start.startswith(mark):
            return f", by its mark {name}", convert_command(file, name)
    with contextlib.suppress(UnicodeDecodeError):  # a few bytes are no character there
        start.decode("windows-1252")
        if start and start.decode(errors="ignore").isascii():
            return ", perhaps Windows-1252", convert_command(file, "WINDOWS-1252")
    return "", ""


def convert_command(file: pathlib.Path, encoding: str) -> str:
    old, new = shlex.quote(str(file)), shlex.quote(f"{file}.new")
    command = f"iconv -f {encoding} -t UTF-8"
    if packer := COMPRESSIONS.get(file.suffix.lower()):
        packer = {"bz2": "bzip2"}.get(packer, packer)
        return f"{packer} -dc {old} | {command} | {packer} > {new} && mv {new} {old}"
    return f"{command} {old} > {new} && mv {new} {old}"


def describe(value: Any, field: str, text_field: Field) -> str:
    """What a bad record holds, in words."""
    if isinstance(value, str) and NOT_UTF8 in value:
        return "bytes that are not UTF-8"
    if field in (".txt", ".md"):
        return "a NUL byte"
    if field == ".jsonl":
        try:
            record = json.loads(value)
        except (ValueError, RecursionError) as error:
            return f"broken JSON, {error}".replace("line 1 ", "")
        fields = record if isinstance(record, dict) else {}
        names = names_of(text_field)
        field = next((name for name in names if name in fields), names[-1])
        if field not in fields:
            fields = f", only {', '.join(fields)}" if len(fields) > 1 else ""
            return f"no field {field!r} in {excerpt(record)}{fields}"
        value = fields[field]
    if isinstance(value, str):
        return f"{excerpt(value)} with half a surrogate pair"
    return f"{excerpt(value)} instead of {'token ids' if field == 'input_ids' else 'text'}"


def excerpt(value: Any) -> str:
    """The beginning of a value as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "..."
