"""The token cache: one flat file for each corpus, with a record of its size and checksum."""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.base import first_line
from harness.data.documents import in_vocabulary

BESIDE = ("mask", "ends")  # suffixes of the files beside the tokens of conversations


def pack_tokens(batches: Iterator[np.ndarray], path: str | os.PathLike, vocab_size: int, counts: Any = None) -> int:
    """Lays arrays of token ids end to end into the raw file `path`; returns how many tokens it holds.

    The file appears under its name only when it is whole and not empty; after it, in a `.json` beside it, the record
    that `check_cache` compares it with: size, checksum and `counts`. A UserError where an id is not below `vocab_size`.
    """
    return write_files(((tokens,) for tokens in in_vocabulary(batches, vocab_size)), pathlib.Path(path), (), counts)


def pack_conversations(
    batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]], path: pathlib.Path, vocab_size: int, counts: Any
) -> int:
    """As `pack_tokens`, for what `chat.example_batches` gives. Beside the tokens are the file `.mask`, a byte of 0 or 1
    for each token, and `.ends`, int64, where each conversation ends."""

    def arrays() -> Iterator[tuple[np.ndarray, ...]]:
        before = 0
        for tokens, trained, lengths in batches:
            (tokens,) = in_vocabulary(iter([tokens]), vocab_size)
            yield tokens, trained, before + np.cumsum(lengths)
            before += len(tokens)

    return write_files(arrays(), path, BESIDE, counts)


def write_files(
    batches: Iterator[tuple[np.ndarray, ...]], path: pathlib.Path, beside: tuple[str, ...], counts: Any
) -> int:
    """Writes the first array of each batch into `path`, and the others into the files `beside` it; then the record.
    Returns how many items the first ones have."""
    total, names = 0, ["tokens", *beside]
    digests = {name: hashlib.sha256() for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder, contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(os.path.join(folder, name), "wb")) for name in names}
        for arrays in batches:
            total += len(arrays[0])
            for name, array in zip(names, arrays, strict=True):
                files[name].write(array.data)
                digests[name].update(array.data)
        for file in files.values():
            file.close()
        if total:
            entries = {}
            for name in reversed(names):  # the tokens last: where they are, all are
                target = path if name == "tokens" else path.with_suffix(f".{name}")
                os.replace(files[name].name, target)
                entries[name] = {"bytes": target.stat().st_size, "sha256": digests[name].hexdigest()}
            record = entries.pop("tokens") | {"counts": counts or {}}
            if entries:
                record["beside"] = entries
            write_record(path, record)
    return total


def read_beside(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray] | None:
    """(mask, ends) of the conversations of a token cache, the mask mapped; None for a cache of other documents."""
    if "beside" not in json.loads(path.with_suffix(".json").read_text()):
        return None
    mask = np.memmap(path.with_suffix(".mask"), np.uint8, mode="r")
    return mask, np.fromfile(path.with_suffix(".ends"), np.int64)


def write_record(path: pathlib.Path, record: dict) -> None:
    """Replaces the record of a token cache atomically."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        file = pathlib.Path(folder, "record")
        file.write_text(json.dumps(record))
        os.replace(file, path.with_suffix(".json"))


def check_cache(path: pathlib.Path, skip_bad: bool, whole: bool) -> tuple[dict | None, str]:
    """(what was counted in the corpus, "") for a token cache that is as it was written, else (None, what is wrong).

    It is compared with its checksum if `whole`, or if its ctime, which no program can set, is another than when it was
    last compared.
    """
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        checked = {path: record} | {
            path.with_suffix(f".{name}"): part for name, part in record.get("beside", {}).items()
        }
        is_changed = False
        for file, part in checked.items():
            problem, is_compared = check_file(file, part, whole)
            if problem:
                return None, problem
            is_changed = is_changed or is_compared
        if is_changed:
            with contextlib.suppress(OSError):  # a disk that can only be read
                write_record(path, record)
        counts = {kind: int(number) for kind, number in record["counts"].items()}
        bad = counts.get("bad records", 0)
        if bad and not skip_bad:
            return None, f"{bad:,} bad records left out"
        return counts, ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if not path.exists():
            return None, ""
        return None, f"its .json, {first_line(error)}"


def check_file(file: pathlib.Path, entry: dict, whole: bool) -> tuple[str, bool]:
    """(what is wrong with a file of a cache by its entry in the record, whether the entry was changed: it has when the
    file was last compared with its checksum)."""
    status, now = file.stat(), time.time_ns()
    if status.st_size != entry["bytes"]:
        return f"{status.st_size:,} bytes, not {entry['bytes']:,}", False
    if not whole and entry.get("checked") == status.st_ctime_ns:
        return "", False
    with file.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()
    if checksum != entry["sha256"]:
        return "another checksum", False
    if now - status.st_ctime_ns <= 10**9:  # a change within the clock's tick would have the same ctime
        return "", False
    entry["checked"] = status.st_ctime_ns
    return "", True
