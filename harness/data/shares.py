"""Shares: the text files of a corpus divided among tasks of as many bytes, and what a sample of it says. Called by
launch/datatrove.py. Independent of what tokenizes the shares."""

import math
import os
import pathlib
import time
from collections import Counter
from collections.abc import Iterator

from harness.base import UserError
from harness.data.corpus_files import local_files
from harness.data.documents import read_documents
from harness.data.formats import file_records, file_status, unreadable_file
from harness.data.readers import jsonl
from harness.data.records import NOT_UTF8, BadRecord, not_utf8
from harness.data.splits import files_of_split

SAMPLES, SAMPLE_CHARACTERS = 16, 250_000  # places of a corpus, and how much text at each is tokenized
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 2**21  # per call of the tokenizer, which takes a hundred times their memory


def describe_files(dataset: str, split: str) -> list:
    """(path, size, time of the last change) of each file of a split."""
    top = os.path.expanduser(dataset)
    files = local_files(top)
    if not files:
        raise UserError(f"--dataset {dataset}: no such file or folder; download it first")
    described = []
    for file in files_of_split(top, split, files):
        status = file_status(file)
        described.append([os.path.abspath(file), status.st_size, status.st_mtime_ns])
    return described


def check_unchanged(file: pathlib.Path, size: int, changed: int) -> None:
    """Raises a UserError where a file is not as the plan has it."""
    status = file_status(file)
    if (status.st_size, status.st_mtime_ns) != (size, changed):
        raise UserError(f"--dataset {file}: it has changed since the first start; give another --output")


def share_of(files: list, task: int, tasks: int) -> Iterator[tuple[pathlib.Path, int, int]]:
    """(file, first byte, byte after the last) of each piece of a task's share of the corpus. `files` are (path, size,
    time). All shares have as many bytes, but only plain .jsonl is cut; any other file belongs to one task as a whole.
    """
    total = sum(size for _, size, _ in files)
    low, high = total * task // tasks, total * (task + 1) // tasks
    start = 0
    for path, size, _ in files:
        if path.lower().endswith(".jsonl"):
            first, end = max(low, start), min(high, start + size)
            if first < end:
                yield pathlib.Path(path), first - start, end - start
        elif size and low <= start < high:
            yield pathlib.Path(path), 0, size
        start += size


def read_lines(file: pathlib.Path, first: int, end: int, names: tuple, counts: Counter) -> Iterator:
    """The records of the lines of a .jsonl file that begin in bytes [first, end), as its reader gives them."""
    with file.open("rb") as raw:
        if first:
            raw.seek(first - 1)
            raw.readline()  # the line that began before
        start = position = raw.tell()
        number = 0
        while position < end and (line := raw.readline()):
            encoding = "utf-8" if position else "utf-8-sig"
            position += len(line)
            number += 1
            counts["read"] += len(line)
            text = line.decode(encoding, errors="mark")
            document = jsonl.parse(text, names, number)
            if isinstance(document, BadRecord):
                if NOT_UTF8 in text:
                    document = not_utf8(number)
                document = document._replace(number=number + lines_before(file, start))
            yield document


def lines_before(file: pathlib.Path, end: int) -> int:
    """How many lines end in the first `end` bytes of a file."""
    lines = 0
    with file.open("rb") as raw:
        while chunk := raw.read(min(2**20, end - raw.tell())):
            lines += chunk.count(b"\n")
    return lines


def read_texts(file: pathlib.Path, first: int, end: int, plan: dict, counts: Counter) -> Iterator[str]:
    """The texts in a piece of the corpus."""
    names = (plan["text_field"],)
    if file.name.lower().endswith(".jsonl"):
        try:
            records = read_lines(file, first, end, names, counts)
            yield from read_documents(records, file, plan["skip_bad_records"], counts)
        except OSError as error:
            raise unreadable_file(file, error) from error
        return
    for document in read_documents(file_records(file, names, counts), file, plan["skip_bad_records"], counts):
        if not isinstance(document, str):
            raise UserError(f"--dataset {file}: it has token ids already, give it to train_fsdp.py")
        yield document


def places_to_sample(files: list) -> Counter:
    """Pieces of the corpus, and how many of its bytes each stands for: at even distances in the files of each format,
    as packed files and Parquet have more text a byte. Of a file that cannot be cut it is always the beginning."""
    total, pieces = sum(size for _, size, _ in files), Counter()
    formats: dict[str, list] = {}
    for path, size, _ in files:
        if size:
            formats.setdefault(pathlib.Path(path).suffix.lower(), []).append((path, size))
    for suffix, of_format in formats.items():
        size_of_format = sum(size for _, size in of_format)
        places = math.ceil(SAMPLES * size_of_format / total)
        for number in range(places):
            place, file = size_of_format * (2 * number + 1) // (2 * places), 0
            while place >= of_format[file][1]:
                place -= of_format[file][1]
                file += 1
            path, size = of_format[file]
            first = 0
            if suffix == ".jsonl":
                first = max(0, min(place, size - 4 * SAMPLE_CHARACTERS))
            pieces[pathlib.Path(path), first, size] += size_of_format / places
    return pieces


def measure(plan: dict, tokenizer) -> dict:
    """What a sample from all over the corpus says: tokens of the corpus, seconds of one core for it, documents a batch.
    The sample's own size is `sample_bytes`."""
    all_tokens = all_seconds = 0.0
    bytes_known = sample_bytes = all_documents = all_characters = 0
    for piece, stands_for in places_to_sample(plan["files"]).items():
        texts, counts = [], Counter()  # texts: those that are tokenized
        documents = characters = bytes_read = 0
        start = time.perf_counter()
        for text in read_texts(*piece, plan, counts):
            if characters > SAMPLE_CHARACTERS and counts["read"] > bytes_read:
                break  # the text is the first of bytes, in Parquet of rows, that count for later ones
            bytes_read = counts["read"]
            if characters < SAMPLE_CHARACTERS:
                texts.append(text[:SAMPLE_CHARACTERS])
            characters += len(text)
            documents += 1
        reading = time.perf_counter() - start
        if not documents:
            continue
        start = time.perf_counter()
        encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        tokens = sum(len(encoding.ids) + 1 for encoding in encoded)
        tokenizing = time.perf_counter() - start
        part = sum(map(len, texts)) / max(characters, 1)
        all_tokens += stands_for * tokens / part / bytes_read
        all_seconds += stands_for * (reading + tokenizing / part) / bytes_read
        bytes_known += stands_for
        sample_bytes += bytes_read
        all_documents += documents
        all_characters += characters
    if not bytes_known:
        raise UserError("--dataset: it holds no text")
    rest = sum(size for _, size, _ in plan["files"]) / bytes_known  # 1, or more where a place had no documents
    return {
        "tokens": round(all_tokens * rest),
        "seconds": all_seconds * rest,
        "batch": max(1, min(BATCH_DOCUMENTS, BATCH_CHARACTERS * all_documents // all_characters)),
        "sample_bytes": sample_bytes,
    }
