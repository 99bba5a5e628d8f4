"""Storage: corpus files at a URL such as `s3://bucket/folder`, listed and read by fsspec where they lie, without a copy
on this machine. Independent of what the files hold."""

import asyncio
import concurrent.futures
import functools
import glob
import io
import logging
import pathlib
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

import torch.distributed as dist

from harness.base.errors import UnreadableError, UserError
from harness.base.hub import answer_from_cache_without_network
from harness.base.text import first_line
from harness.job.printing import say

FIRST_BLOCK = 2**18  # bytes of the first request at a place; each one that follows on it is twice as large
MAX_BLOCK = 2**22  # two of these are held of an open file: the one that is read and the one ahead
PART_FIRST_BLOCK = 2**16  # the same of a file of which many parts are read at a time
PART_MAX_BLOCK = 2**19
TIMEOUT_SECONDS = 30  # for a range of a file, or what is known about it
LISTING_SECONDS = 600  # for all names below a folder
LISTING_TRIES = 4  # at the start, when a user may have mistyped the name
READING_TRIES = 8  # hours into a run too: a minute of waiting
FIRST_WAIT = 0.5  # seconds before the second try; twice as long before each further one

# Forms of fsspec that read another URL through a copy on this machine, or through a list that names any other URL.
INDIRECT = ("blockcache", "cached", "dir", "filecache", "generic", "reference", "simplecache")
# What changes with a file's content, by the name that a store gives it; the first one counts. Other times are not the
# same to the digit in a listing and for a file alone.
MARKS = ("generation", "ETag", "etag", "blob_id", "md5Hash", "mtime")
LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    NotImplementedError,
)
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket FSSPEC_S3_ANON=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "hf": "HF_TOKEN, or run hf auth login",
}


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
            f"--dataset {without_query(url)}: the server does not say how large it is; {copy_command(url)}",
            entry="store-ranges",
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


def is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def without_query(url: str) -> str:
    """A URL as messages have it: one of http without the query, which may be a signature."""
    return url.partition("?")[0] if is_http(url) else url


def filesystem_of(url: str) -> tuple[Any, str]:
    """(the file system of fsspec for a URL, the path in it). It belongs to this process, not to one forked from it.
    A UserError where there is none."""
    import fsspec
    from fsspec.registry import known_implementations

    scheme = url.partition(":")[0].lower()
    if "::" in url or scheme in INDIRECT:
        raise UserError(f"--dataset {url}: chained and cached URLs are not read; give the file's own", entry="bad-url")
    if urllib.parse.urlsplit(url).password:
        raise UserError(
            f"--dataset {scheme}://: a password in a URL would stand in logs; give it as {scheme}'s package takes it",
            entry="bad-url",
        )
    answer_from_cache_without_network(url)
    options: dict[str, Any] = {"use_listings_cache": False}  # a file may change while a run reads others
    if scheme in ("s3", "s3a"):  # tries are counted here, so that each is one request
        given = fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}} | given
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = getattr(root_of(error), "name", None) or known_implementations[scheme]["class"]
        package = package.partition(".")[0]
        raise UserError(
            f"--dataset {url}: needs the package {package} (pip install {package})", entry="missing-package"
        ) from error
    except Exception as error:
        if scheme not in fsspec.available_protocols():
            problem = f"no kind of store is called {scheme}; such as s3, gs, hf or https"
            raise UserError(f"--dataset {url}: {problem}", entry="bad-url") from error
        raise name_failure(error, url) from error
    if hasattr(filesystem, "retries"):
        filesystem.retries = 1
    for package in ("s3fs", "gcsfs"):  # the UserError alone reports what goes wrong
        logging.getLogger(package).setLevel(logging.CRITICAL)
    return filesystem, path


# ----------------------------------------------------------------------------------------------------------------------
# Requests, and what to say of those that fail


def request(filesystem, operation: str, *arguments, **options) -> concurrent.futures.Future:
    """Begins an operation of a file system. One without coroutines is done when this returns."""
    if filesystem.async_impl:
        coroutine = getattr(filesystem, f"_{operation}")(*arguments, **options)
        return asyncio.run_coroutine_threadsafe(coroutine, filesystem.loop)
    future: concurrent.futures.Future = concurrent.futures.Future()
    try:
        future.set_result(getattr(filesystem, operation)(*arguments, **options))
    except Exception as error:
        future.set_exception(error)
    return future


def answer_of(future: concurrent.futures.Future, seconds: float) -> Any:
    """What a request gives; a TimeoutError where it takes longer, after which it is given up."""
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError as error:
        future.cancel()
        raise TimeoutError(f"no answer within {seconds} s") from error


def report(line: str) -> None:
    """Prints a line on rank 0; outside of a job it is a warning of the library."""
    if dist.is_initialized():
        say("data      ", line)
    else:
        logging.getLogger(__name__).warning(line)


def ask_store(url: str, filesystem, operation: str, *arguments, seconds: float = TIMEOUT_SECONDS, **options) -> Any:
    """What a store says of a path. A FileNotFoundError where it has none, else an UnreadableError."""

    def attempt(number: int) -> Any:
        return answer_of(request(filesystem, operation, *arguments, **options), seconds)

    return try_again(attempt, url, LISTING_TRIES)


def try_again(
    attempt: Callable[[int], Any], url: str, tries: int, place: str = "", say_failure: Callable[[str], None] = report
) -> Any:
    """What `attempt(number of the try)` returns, tried up to so many times where its error may pass; then, or at an
    error that lasts, an UnreadableError with `place`. `say_failure` gets a line about the first failure. A
    FileNotFoundError is passed on."""
    start, wait = time.monotonic(), FIRST_WAIT
    for number in range(1, tries + 1):
        try:
            return attempt(number)
        except UserError:
            raise
        except Exception as error:
            if status_of(error) == 404 or isinstance(root_of(error), FileNotFoundError):
                raise FileNotFoundError(url) from error
            if not may_pass(error):
                raise name_failure(error, url, place) from error
            if number == tries:
                tried = f", {tries} tries in {time.monotonic() - start:.0f} s"
                raise name_failure(error, url, place, tried) from error
            if number == 1:
                say_failure(f"{without_query(url)}{place}: {cause_of(error)}; trying again, up to {tries - 1} times")
            time.sleep(wait)
            wait *= 2
    raise AssertionError("no try was made")


def root_of(error: BaseException) -> BaseException:
    """What was raised first; packages wrap it into errors of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error stands for, by the names that the packages give it; None where it is of none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore's
            statuses = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
        else:
            statuses = [getattr(response, "status_code", None), getattr(error, "status", None)]
            if type(error).__module__.startswith("gcsfs"):  # aiohttp gives a code 400 to an answer that is cut off
                statuses.append(getattr(error, "code", None))
        for status in statuses:
            if isinstance(status, int) and 400 <= status < 600:
                return status
        error = error.__cause__
    return None


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    root = root_of(error)
    return not (isinstance(root, LASTING) or is_about_credentials(root))


def is_about_credentials(error: BaseException) -> bool:
    """By the name of its type: botocore's errors have no common one."""
    return any(word in type(error).__name__ for word in ("Credential", "Token", "Auth", "ProfileNotFound"))


def cause_of(error: BaseException) -> str:
    """What went wrong, in words, with the HTTP status where there is one."""
    words, status = first_line(error), status_of(error)
    if type(error).__name__ in ("ClientPayloadError", "IncompleteRead"):  # of aiohttp, http.client
        words = "the connection ended in the middle of the answer"
    if status and str(status) not in words:
        return f"HTTP {status}, {words}"
    return words


def name_failure(error: Exception, url: str, place: str = "", tried: str = "") -> UnreadableError:
    """What to say of a request that failed for good, at a place in a file or, without one, while files are listed."""
    scheme, cause, shown = url.partition(":")[0].lower(), cause_of(error), without_query(url)
    denied = status_of(error) in (401, 403) or isinstance(root_of(error), PermissionError)
    if denied or is_about_credentials(root_of(error)):
        known = {"s3a": "s3", "gcs": "gs"}.get(scheme, scheme)
        credentials = CREDENTIALS.get(known, f"what fsspec's package for {scheme} takes them from")
        unreadable = UnreadableError(
            f"--dataset {shown}{place}: no access ({cause}); check the credentials: set {credentials}",
            entry="store-access",
        )
    else:
        advice = "check the name and the network"
        if place:
            advice = "when the store answers again, --resume auto goes on from the newest checkpoint"
        unreadable = UnreadableError(
            f"--dataset {shown}: cannot be read{place}{tried} ({cause}); {advice}", entry="store-unreachable"
        )
    unreadable.file = url
    return unreadable


def copy_command(url: str) -> str:
    """The advice to copy what a URL names, with the command, which needs no other package or credentials."""
    code = f"import fsspec; fs, path = fsspec.core.url_to_fs({url!r}); fs.get(path, './', recursive=True)"
    return f'copy it to a local disk and give that path: python -c "{code}"'


def cannot_map(url: str) -> UserError:
    """What to say of a file whose tokens would be mapped into memory, which only a local one can be."""
    problem = "its tokens are mapped into memory, which a store cannot give"
    return UserError(f"--dataset {without_query(url)}: {problem}; {copy_command(url)}", entry="store-mapped")


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
        unreadable = UnreadableError(f"--dataset {self.file}: {problem}", entry="store-changed")
        unreadable.file = self.file
        return unreadable

    def _unreadable(self, problem: str) -> UnreadableError:
        unreadable = UnreadableError(f"--dataset {self.file}: {problem}", entry="store-ranges")
        unreadable.file = self.file
        return unreadable
