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

from harness.base.text import first_line
from harness.data.documents import in_vocabulary


def pack_tokens(batches: Iterator[np.ndarray], path: str | os.PathLike, vocab_size: int, counts: Any = None) -> int:
    """Lays arrays of token ids end to end into the raw file `path`; returns how many tokens it holds.

    The file appears under its name only when it is whole and not empty; after it, in a `.json` beside it, the record
    that `check_cache` compares it with: size, checksum and `counts`. A UserError where an id is not below `vocab_size`.
    """
    path, total, digest = pathlib.Path(path), 0, hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        with open(os.path.join(folder, "tokens"), "wb") as file:
            for tokens in in_vocabulary(batches, vocab_size):
                total += len(tokens)
                file.write(tokens.data)
                digest.update(tokens.data)
        if total:
            os.replace(file.name, path)
            write_record(path, {"bytes": path.stat().st_size, "sha256": digest.hexdigest(), "counts": counts or {}})
    return total


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
        record, status, now = json.loads(path.with_suffix(".json").read_text()), path.stat(), time.time_ns()
        if status.st_size != record["bytes"]:
            return None, f"{status.st_size:,} bytes, not {record['bytes']:,}"
        if whole or record.get("checked") != status.st_ctime_ns:
            with path.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            if checksum != record["sha256"]:
                return None, "another checksum"
            if now - status.st_ctime_ns > 10**9:  # a change within the clock's tick would have the same ctime
                with contextlib.suppress(OSError):  # a disk that can only be read
                    write_record(path, record | {"checked": status.st_ctime_ns})
        counts = {kind: int(number) for kind, number in record["counts"].items()}
        bad = counts.get("bad records", 0)
        if bad and not skip_bad:
            return None, f"{bad:,} bad records left out"
        return counts, ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if not path.exists():
            return None, ""
        return None, f"its .json, {first_line(error)}"
