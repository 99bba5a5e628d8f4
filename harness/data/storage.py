"""Storage: corpus files at a URL such as `s3://bucket/folder`, listed and read by fsspec where they lie, without a copy
on this machine. Independent of what the files hold."""

import concurrent.futures
import functools
import glob
import io
import pathlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import BinaryIO, NamedTuple

from harness.base import UnreadableError
from harness.data.store_requests import (
    TIMEOUT_SECONDS,
    answer_of,
    ask_store,
    copy_command,
    filesystem_of,
    is_http,
    report,
    request,
    try_again,
    without_query,
)

FIRST_BLOCK = 2**18  # bytes of the first request at a place; each one that follows on it is twice as large
MAX_BLOCK = 2**22  # two of these are held of an open file: the one that is read and the one ahead
PART_FIRST_BLOCK = 2**16  # the same of a file of which many parts are read at a time
PART_MAX_BLOCK = 2**19
LISTING_SECONDS = 600  # for all names below a folder
READING_TRIES = 8  # hours into a run too: a minute of waiting

# What changes with a file's content, by the name that a store gives it; the first one counts. Other times are not the
# same to the digit in a listing and for a file alone.
MARKS = ("generation", "ETag", "etag", "blob_id", "md5Hash", "mtime")


class RemoteStatus(NamedTuple):
    st_size: int  # bytes
    mark: str  # changes with the content, such as `ETag "1a2b"`; empty where the store has none


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL as it was listed, with what the program uses of `pathlib.Path`."""

    url: str
    size: int
    mark: str = ""
    in_parts: bool = field(default=False, compare=False)  # many parts of it are read at a time, in smaller blocks

    def __str__(self) -> str:
        return without_query(self.url)

    def __lt__(self, other: "RemoteFile") -> bool:
        return self.url.split("/") < other.url.split("/")  # folders as paths are compared

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return pathlib.PurePosixPath(self.name).suffix

    def stat(self) -> RemoteStatus:
        return RemoteStatus(self.size, self.mark)

    def resolve(self) -> "RemoteFile":
        return self

    def relative_to(self, folder: str) -> str:
        """The path below the URL of a folder; a ValueError where it lies elsewhere."""
        top = folder.rstrip("/") + "/"
        if not str(self).startswith(top):
            raise ValueError(f"{self} is not below {folder}")
        return str(self).removeprefix(top)

    def open(self, mode: str = "rb") -> BinaryIO:
        return open_file(self)


DataFile = pathlib.Path | RemoteFile


def for_parts(file: DataFile) -> DataFile:
    """A file of which many parts are read at a time; a local one is as before."""
    return replace(file, in_parts=True) if isinstance(file, RemoteFile) else file


def open_file(file: DataFile, counts: Counter | None = None) -> BinaryIO:
    """The bytes of a file, which can be sought in; `counts["read"]` gets how many are read of a remote one.

    Of a remote file only the ranges around what is read are asked for, up to `MAX_BLOCK` bytes more; it holds twice so
    many in memory. An UnreadableError, also while reading, where the store gives none after some tries, or where the
    file has changed since it was listed.
    """
    if isinstance(file, RemoteFile):
        return io.BufferedReader(RemoteReader(file, counts), FIRST_BLOCK)
    return file.open("rb")


def list_files(url: str, left_out: dict[str, str]) -> list[RemoteFile]:
    """The files at a URL, below a folder or where a pattern leads, in order, without hidden ones; none where there is
    nothing. `left_out` gets the folders that a pattern leads to, with the reason."""
    filesystem, path = filesystem_of(url)
    ask = functools.partial(ask_store, url, filesystem)
    base = url
    try:
        if has_pattern(url):
            plain = url[: min(url.find(sign) for sign in "*?[" if sign in url)]
            base = plain.rpartition("/")[0]
            found = ask("glob", path, detail=True, seconds=LISTING_SECONDS)
        elif "." not in RemoteFile(url, 0).name:  # a folder, where a server has such
            found = ask("find", path, detail=True, seconds=LISTING_SECONDS)
        else:
            found = {path: ask("info", path)}
            if found[path]["type"] == "directory":
                found = ask("find", path, detail=True, seconds=LISTING_SECONDS)
    except FileNotFoundError:
        return []
    top = filesystem_of(base)[1].rstrip("/")
    files = []
    for place, info in found.items():
        within = place.removeprefix(top).strip("/")
        if any(part.startswith(".") for part in within.split("/")):
            continue
        if info["type"] == "directory":
            left_out[f"{base.rstrip('/')}/{within}"] = "a folder"
        elif not place.endswith("/"):  # such names stand for empty folders
            if info.get("size") is None:  # a page of links
                info = ask("info", place)
            files.append(describe(f"{base.rstrip('/')}/{within}" if within else base, info))
    return sorted(files)


def describe(url: str, info: dict) -> RemoteFile:
    """A file by what a store says of it."""
    if info.get("size") is None:
        raise UnreadableError(
            f"--dataset {without_query(url)}: the server does not say how large it is; {copy_command(url)}"
        )
    marks = [f"{name} {info[name]}" for name in MARKS if info.get(name)]
    return RemoteFile(url, info["size"], marks[0] if marks else "")


def differs(file: RemoteFile, info: dict) -> bool:
    """Whether what a store says now is of another content than when the file was listed."""
    name, _, value = file.mark.partition(" ")
    return info.get("size") != file.size or str(info.get(name) or value) != value


def has_pattern(url: str) -> bool:
    """Whether a URL stands for several files. In one of http only * does so; ? begins a query."""
    return "*" in url.partition("?")[0] if is_http(url) else glob.has_magic(url)


# ----------------------------------------------------------------------------------------------------------------------
# Reading


class RemoteReader(io.RawIOBase):
    """The bytes of a remote file before `end`, asked for in ranges; `counts["read"]` gets how many are read.

    A range that follows on the one before is twice as large, up to `MAX_BLOCK`, and the next one is asked for while it
    is read. A range that fails is asked for again, smaller, from the byte on where it begins.
    """

    def __init__(self, file: RemoteFile, counts: Counter | None = None, end: int | None = None):
        self.file = file
        self.end = file.size if end is None else end
        self.first_size, self.max_size = FIRST_BLOCK, MAX_BLOCK
        if file.in_parts:
            self.first_size, self.max_size = PART_FIRST_BLOCK, PART_MAX_BLOCK
        self.counts = Counter() if counts is None else counts
        self.filesystem, self.path = filesystem_of(file.url)
        self.has_failed = False  # said once: a slow network fails often
        self.place = 0  # of the next byte that is read
        self.block, self.block_start = b"", 0
        self.block_size = self.first_size
        self.ahead: tuple[int, int, concurrent.futures.Future] | None = None  # (start, end, its request)
        self._check_unchanged()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.file.size}[whence]
        if origin + offset < 0:
            raise ValueError(f"negative place {origin + offset}")
        self.place = origin + offset
        return self.place

    def readinto(self, buffer) -> int:
        if self.place >= self.end:
            return 0
        if not 0 <= self.place - self.block_start < len(self.block):
            self._load()
        offset = self.place - self.block_start
        part = memoryview(self.block)[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self.place += len(part)
        self.counts["read"] += len(part)
        return len(part)

    def close(self) -> None:
        self._drop_ahead()
        self.block = b""
        super().close()

    def _drop_ahead(self) -> None:
        if getattr(self, "ahead", None) is not None:  # not where the opening failed
            self.ahead[2].cancel()
            self.ahead = None

    def _load(self) -> None:
        """Makes the block the one that begins at the place."""
        follows = bool(self.block) and self.place == self.block_start + len(self.block)
        self.block_size = min(2 * self.block_size, self.max_size) if follows else self.first_size
        self.block = b""  # one block less in memory while the next one comes
        self.block = self._fetch(self.place, min(self.place + self.block_size, self.end))
        self.block_start = self.place
        start = self.block_start + len(self.block)
        if follows and start < self.end and self.filesystem.async_impl:
            end = min(start + min(2 * self.block_size, self.max_size), self.end)
            self.ahead = (start, end, self._request(start, end))

    def _request(self, start: int, end: int) -> concurrent.futures.Future:
        return request(self.filesystem, "cat_file", self.path, start=start, end=end)

    def _fetch(self, start: int, end: int) -> bytes:
        """The bytes from `start` on, up to `end` or fewer, but one at least."""
        future = None
        if self.ahead is not None and self.ahead[0] == start:
            _, end, future = self.ahead
            self.ahead = None
        self._drop_ahead()

        def attempt(number: int) -> bytes:
            if number == 1:
                stop = end
                data = answer_of(future or self._request(start, stop), TIMEOUT_SECONDS)
            else:
                stop = min(end, start + self.first_size)
                data = answer_of(self._request(start, stop), TIMEOUT_SECONDS)
                self._check_unchanged()
            if len(data) > stop - start:
                raise self._unreadable(f"the server sends no ranges of a file; {copy_command(self.file.url)}")
            if not data:
                raise ConnectionError("no bytes came")
            return data

        try:
            return try_again(attempt, self.file.url, READING_TRIES, f" at byte {start:,}", self._say_once)
        except FileNotFoundError as error:
            raise self._changed() from error

    def _say_once(self, line: str) -> None:
        if not self.has_failed:
            report(line)
        self.has_failed = True

    def _check_unchanged(self) -> None:
        """Raises an UnreadableError where the file is another one than when it was listed."""
        try:
            info = try_again(
                lambda number: answer_of(request(self.filesystem, "info", self.path), TIMEOUT_SECONDS),
                self.file.url,
                READING_TRIES,
                " when it is opened",
            )
        except FileNotFoundError as error:
            raise self._changed() from error
        if differs(self.file, info):
            raise self._changed()

    def _changed(self) -> UnreadableError:
        problem = "it has changed since it was listed, or is gone; start a new run"
        unreadable = UnreadableError(f"--dataset {self.file}: {problem}")
        unreadable.file = self.file
        return unreadable

    def _unreadable(self, problem: str) -> UnreadableError:
        unreadable = UnreadableError(f"--dataset {self.file}: {problem}")
        unreadable.file = self.file
        return unreadable
