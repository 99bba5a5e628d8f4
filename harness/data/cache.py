"""The cache: files of --cache-dir that one process of a node makes once and all its ranks map: tokens, the ends of
documents, and the documents of each sequence. A record, written last, has the sizes of the others."""

import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

from harness import base


def cache_folder(cache_dir: str | os.PathLike | None) -> pathlib.Path:
    if cache_dir is not None:
        return pathlib.Path(cache_dir).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "train_fsdp"


def make_once(
    kind: str,
    identity: list,
    make: Callable[[pathlib.Path], dict],
    cache_dir: str | os.PathLike | None,
    is_wanted: Callable[[dict], bool] = lambda counts: True,
) -> tuple[pathlib.Path, dict]:
    """Make files unless they are complete in the cache; return (their path without its suffix, counts).

    `make` writes files into an empty folder, each named by its suffix, and returns counts. Counts have `seconds` only
    if the files were made now. `identity` is the key: all that decides what `make` writes. If the counts of complete
    files are not wanted, they are made again. A UserError if the folder cannot be written.
    """
    from filelock import FileLock

    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    path = cache_folder(cache_dir) / f"{kind}-{name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # against runs that start together, and nodes with a shared disk
            counts = counts_of(path)
            if counts is not None and is_wanted(counts):
                return path, counts
            start = time.perf_counter()
            for leftover in path.parent.glob(f"{path.name}?*/"):  # of killed runs: the lock was free
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
                counts = make(pathlib.Path(folder))
                sizes = {file.name: file.stat().st_size for file in pathlib.Path(folder).iterdir()}
                pathlib.Path(folder, "json").write_text(json.dumps({"counts": counts, "bytes": sizes}))
                for suffix in [*sizes, "json"]:  # the record last: if it exists, all files do
                    os.replace(f"{folder}/{suffix}", path.with_suffix(f".{suffix}"))
            return path, dict(counts, seconds=time.perf_counter() - start)
    except OSError as error:
        raise base.UserError(f"--cache-dir {path.parent}: cannot be written ({base.first_line(error)})") from error


def counts_of(path: pathlib.Path) -> dict | None:
    """Return the counts of files in the cache; None if they are incomplete by their sizes."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        sizes = {name: path.with_suffix(f".{name}").stat().st_size for name in record["bytes"]}
        return record["counts"] if sizes == record["bytes"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
