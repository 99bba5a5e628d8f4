"""The cache: folders in --cache-dir that one process of a node makes once and all its ranks read: tokens, the ends of
documents, the documents of each sequence, and the records of data sets of --import."""

import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

from harness import base


def make_once(
    kind: str, identity: list, make: Callable[[pathlib.Path], dict], cache_dir: str | os.PathLike | None
) -> tuple[pathlib.Path, dict]:
    """Make a folder of files unless it is complete in the cache; return (the folder, its record).

    `make` writes files into an empty folder and returns the record, such as counts. The record has `seconds` only if
    this call made the files. `kind` begins the folder's name, `identity` is its key: all that decides what `make`
    writes. A UserError if the cache cannot be written.
    """
    from filelock import FileLock

    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    cache = cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "train_fsdp")
    folder = pathlib.Path(cache).expanduser() / f"{kind}-{name}"
    record = read_record(folder)  # before the lock, whose file cannot be opened in a cache that is read only
    if record is not None:
        return folder, record
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # against runs that start together, and nodes with a shared disk
            record = read_record(folder)
            if record is not None:
                return folder, record
            start = time.perf_counter()
            for leftover in folder.parent.glob(f"{folder.name}*/"):  # damaged, or of a killed run: the lock was free
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as parent:
                unfinished = pathlib.Path(parent, "files")
                unfinished.mkdir()  # with the permissions of other files; `parent` is readable by this user only
                record = make(unfinished)
                sizes = {file.name: file.stat().st_size for file in unfinished.iterdir()}
                (unfinished / "record.json").write_text(json.dumps({"counts": record, "bytes": sizes}))
                unfinished.rename(folder)
            return folder, dict(record, seconds=time.perf_counter() - start)
    except OSError as error:
        raise base.UserError(f"--cache-dir {folder.parent}: cannot be written ({base.first_line(error)})") from error


def read_record(folder: pathlib.Path) -> dict | None:
    """Return the record of a folder of the cache; None without one, or if files lack bytes, as after a power cut."""
    try:
        content = json.loads((folder / "record.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in content["bytes"]}
        return content["counts"] if sizes == content["bytes"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
