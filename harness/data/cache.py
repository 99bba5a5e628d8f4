"""The token cache: a corpus that is tokenized once, on all cores, and mapped afterwards. Beside the tokens of a cache
lie the ends of its documents and, of conversations and labels, the mask of what is trained on; a record, written last,
has their sizes."""

import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from harness import base, job
from harness.data.encode import Encoded
from harness.data.token_files import TokenFile, map_numbers

VERSION = 7  # of the files; another one makes them anew
LEFT_OUT = (
    *("empty documents", "bad records"),
    *("conversations without a trained token", "rows without a trained token"),
)
WARNING = "warning: "  # begins what is counted of records that were read with a warning, the first one's place in it
FIRST_LINE_SECONDS, LOG_SECONDS = 5, 30  # of tokenizing, after which a line says how far it is, and between two


def folder_of(cache_dir: str | os.PathLike | None) -> pathlib.Path:
    if cache_dir is not None:
        return pathlib.Path(cache_dir).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "train_fsdp"


def tokenize_once(
    identity: list,
    tokenize: Callable[[Counter], Iterator[Encoded]],
    cache_dir: str | os.PathLike | None,
    skip_bad: bool,
) -> tuple[pathlib.Path, dict]:
    """(the file of a corpus' tokens, made now where there is none that is whole; what was counted).

    `identity` decides which tokens come out of `tokenize`, which gets what it is to count in. `counts["seconds"]` is
    there where the file was made now. A UserError where the folder cannot be written.
    """
    from filelock import FileLock

    name = hashlib.sha256(json.dumps([VERSION, *identity]).encode()).hexdigest()[:20]
    path = folder_of(cache_dir) / f"tokens-{name}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # two runs that start together, or nodes with a common disk
            counts = counts_of(path)
            if counts is not None and (skip_bad or not counts.get("bad records")):
                return path, counts
            start, counts = time.perf_counter(), Counter()
            for leftover in path.parent.glob(f"{path.name}?*/"):  # of a killed run: the lock was free
                shutil.rmtree(leftover)
            write(with_progress(tokenize(counts), counts), path, counts)
            return path, dict(counts, seconds=time.perf_counter() - start)
    except OSError as error:
        raise base.UserError(f"--cache-dir {path.parent}: cannot be written ({error.strerror})") from error


def write(batches: Iterator[Encoded], path: pathlib.Path, counts: Counter) -> None:
    """Lays documents end to end into `path`, their ends and their mask into the files beside it."""
    total = 0
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        names = ["bin", "ends", "mask"]
        with (
            open(f"{folder}/bin", "wb") as tokens,
            open(f"{folder}/ends", "wb") as ends,
            open(f"{folder}/mask", "wb") as mask,
        ):
            for encoded in batches:
                tokens.write(encoded.tokens.data)
                ends.write((total + np.cumsum(encoded.lengths)).data)
                if encoded.trained is not None:
                    mask.write(encoded.trained.data)
                total += len(encoded.tokens)
        record = {"counts": counts, "bytes": {name: os.path.getsize(f"{folder}/{name}") for name in names}}
        pathlib.Path(folder, "json").write_text(json.dumps(record))
        if total:
            for name in [*names, "json"]:  # the record last: where it is, all are
                os.replace(f"{folder}/{name}", path.with_suffix(f".{name}"))


def counts_of(path: pathlib.Path) -> dict | None:
    """What was counted when a cache was made; None where it is not whole by the sizes of its files."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        sizes = {name: path.with_suffix(f".{name}").stat().st_size for name in record["bytes"]}
        return record["counts"] if sizes == record["bytes"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def open_cache(path: pathlib.Path, vocab_size: int) -> TokenFile:
    """The tokens of a cache, mapped."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    mask = path.with_suffix(".mask")
    return TokenFile(
        tokens=np.memmap(path, dtype, "r").view(np.ndarray),
        is_checked=True,
        find_ends=functools.partial(map_numbers, str(path.with_suffix(".ends")), np.int64),
        trained=np.memmap(mask, np.uint8, "r").view(np.ndarray) if mask.stat().st_size else None,
        reopen=functools.partial(open_cache, path, vocab_size),
    )


def describe(path: pathlib.Path, counts: dict) -> str:
    """Where a cache is, and what was counted when it was made, in words; both as `tokenize_once` returns them."""
    line = f"cached in {path}"
    if "seconds" in counts:
        tokenized = f"tokenized {base.counted(counts['documents'], 'document')}"
        line = f"{tokenized} in {counts['seconds']:.1f} s, {line}"
    left_out = [f"{kind} {counts[kind]:,}" for kind in LEFT_OUT if counts.get(kind)]
    if left_out:
        line += f", left out: {', '.join(left_out)}"
    return line


def warnings_in(counts: dict) -> list[str]:
    """The warnings that were counted when a cache was made."""
    found = {key.removeprefix(WARNING): count for key, count in counts.items() if key.startswith(WARNING)}
    return [f"{text} ({base.counted(count, 'conversation')})" for text, count in found.items()]


def with_progress(batches: Iterator[Encoded], counts: Counter) -> Iterator[Encoded]:
    """The arrays of `batches`. Rank 0 prints how far the tokenizing is: after some seconds, then each half minute."""
    start, next_line = time.monotonic(), float(FIRST_LINE_SECONDS)
    for encoded in batches:
        yield encoded
        seconds = time.monotonic() - start
        if seconds >= next_line:
            speed = f"{counts['tokens'] / seconds:,.0f} tokens/s"
            job.print0("data      ", f"tokenizing, once: {counts['documents']:,} documents, {speed}")
            next_line = seconds + LOG_SECONDS
