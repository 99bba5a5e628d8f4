"""Faults in a corpus: what to say of data that cannot be read, for a token cache as for a stream. Local files with a
bad record are read once more, to count how many there are. Independent of formats, which describe their own records."""

import codecs
import contextlib
import errno
import os
import re
import shlex
import time
from collections import Counter

from harness.base import UnreadableError, UserError, first_line
from harness.data.corpus_files import local_files
from harness.data.formats import DATA_SUFFIXES, file_records, name_place, reader_of
from harness.data.records import CHAT_FIELD, COMPRESSIONS, DEFAULT_FIELD, BadRecord, Field, open_unpacked
from harness.data.splits import files_of_split, parse_split
from harness.data.storage import DataFile, RemoteFile
from harness.flags import is_local

DISK = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR)]
MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}  # before UTF-16, which begins as they do
MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
COUNT_SECONDS = 60  # after which the bad records of a large corpus are not counted further


def name_fault(error: Exception, dataset: str, split: str, text_field: Field = DEFAULT_FIELD) -> UserError:
    """What to say of data that cannot be read: of an `UnreadableError`, or of what a library raised while reading."""
    source, reason = f"--dataset {dataset}, split {split!r}", first_line(error)
    unreadable = isinstance(error, UnreadableError)
    if unreadable and error.record and error.record.of_chat:
        text_field = CHAT_FIELD
    if unreadable and error.record and error.file:
        return name_bad_record(error.record, error.file, dataset, split, text_field)
    if unreadable and error.record:
        fault, advice = error.record.fault, advise(error.record)
        return UserError(f"{source}: {fault}; {advice}, or leave bad records out with --skip-bad-records")
    if unreadable and error.file:
        return UserError(str(error))
    if is_local(dataset):
        return UserError(f"{source}: cannot be read ({reason})")
    for why in DISK:
        if why in reason:
            import datasets

            place = f"HF_DATASETS_CACHE {datasets.config.HF_DATASETS_CACHE}"
            return UserError(f"{place}: cannot be written ({why})")
    if unreadable:
        hint = f"without a network use a local {'/'.join(DATA_SUFFIXES)} file or folder, 'synthetic' or 'demo'"
        cause = re.sub(r".*?cannot be read \((.*)\)$", r"\1", reason)
        problem = f"not a local file or folder, and not to be had from the hub ({cause})"
        return UserError(f"--dataset {dataset}: {problem}; {hint}")
    return UserError(f"{source}: cannot be read ({reason})")


def name_bad_record(record: BadRecord, file: DataFile, dataset: str, split: str, text_field: Field) -> UserError:
    """What to say of a bad record of a local file: where it stands, how many there are, how to mend them."""
    encoding, command = guess_encoding(file) if record.wrong_encoding else ("", "")
    advice = f"convert it: {command}" if command else advise(record)
    others = [other for other in files_of_split(dataset, parse_split(split)[0], local_files(dataset)) if other != file]
    numbers, all_are_bad = count_bad(file, others, text_field)
    if not all_are_bad:
        advice += ", or leave bad records out with --skip-bad-records"
    return UserError(f"--dataset {name_place(file, record.number)}: {record.fault}{encoding}{numbers}; {advice}")


def advise(record: BadRecord) -> str:
    return f"{record.advice}, or mend them" if record.advice else "mend them"


def count_bad(file: DataFile, others: list[DataFile], text_field: Field) -> tuple[str, bool]:
    """(how many records of a file are bad, and how many of all files of its split, in words; whether all are)."""
    deadline = time.monotonic() + COUNT_SECONDS
    bad, read, is_complete = count_bad_of_file(file, text_field, deadline)
    if not bad:  # too far on in a large file, or mended since
        return "", False
    kind = reader_of(file).RECORDS
    if not is_complete:
        return f"; {bad:,} of the first {read:,} {kind} are bad", False
    numbers = f"; {bad:,} of {read:,} {kind} are bad"
    for other in others:
        bad_there, read_there, is_complete = count_bad_of_file(other, text_field, deadline)
        if not is_complete:
            return numbers, False
        bad, read = bad + bad_there, read + read_there
    if others:
        numbers += f", {bad:,} of {read:,} in all {1 + len(others)} files"
    return numbers, bad == read


def count_bad_of_file(file: DataFile, text_field: Field, deadline: float) -> tuple[int, int, bool]:
    """(bad records of a file, records that were read, whether these are all of it)."""
    bad = read = 0
    try:
        for record in file_records(file, text_field, Counter()):
            read += 1
            if isinstance(record, BadRecord):
                bad += 1
            if time.monotonic() > deadline:
                return bad, read, False
    except UserError:  # a file that cannot be read further
        return bad, read, False
    return bad, read, True


def guess_encoding(file: DataFile) -> tuple[str, str]:
    """(in which encoding a text file that is not UTF-8 may be, in words, the command that converts it); nothing where
    it cannot be told, or where a part of it is UTF-8."""
    start = b""
    with contextlib.suppress(OSError), open_unpacked(file, Counter()) as unpacked:  # a packed file may be cut
        start = unpacked.read(2**24)
    for mark, name in MARKS.items():
        if start.startswith(mark):
            return f", by its mark {name}", convert_command(file, name)
    if not start or b"\0" in start:  # no text in an encoding of single bytes
        return "", ""
    with contextlib.suppress(UnicodeDecodeError):  # a few bytes are no character there
        start.decode("windows-1252")
        if start.decode(errors="ignore").isascii():
            return ", perhaps Windows-1252", convert_command(file, "WINDOWS-1252")
    return "", ""


def convert_command(file: DataFile, encoding: str) -> str:
    if isinstance(file, RemoteFile):
        return f"iconv -f {encoding} -t UTF-8, on a copy that then replaces it"
    old, new = shlex.quote(str(file)), shlex.quote(f"{file}.new")
    command = f"iconv -f {encoding} -t UTF-8"
    if packer := COMPRESSIONS.get(file.suffix.lower()):
        packer = {"bz2": "bzip2"}.get(packer, packer)
        return f"{packer} -dc {old} | {command} | {packer} > {new} && mv {new} {old}"
    return f"{command} {old} > {new} && mv {new} {old}"
