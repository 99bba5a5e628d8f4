"""Stores: what lies at a URL such as `s3://bucket/folder`, listed and read through fsspec, without a copy on this
machine. A request is tried again where it may pass."""

import glob
import io
import itertools
import logging
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

from harness import base

if TYPE_CHECKING:
    from typing_extensions import Buffer

TIMEOUT_SECONDS = 30  # of a request for a range, or for what is known about a file
LISTING_SECONDS = 600  # of the names below a folder
TRIES = 8
FIRST_WAIT = 0.5  # seconds before the second try; twice as long before each further one
# What a store calls the mark that changes with a file's content; the first that is there counts.
MARKS = ("generation", "ETag", "etag", "blob_id", "md5Hash", "mtime")


def is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def without_query(url: str) -> str:
    """A URL as messages have it: one of http without the query, which may be a signature."""
    return url.partition("?")[0] if is_http(url) else url


def has_pattern(url: str) -> bool:
    """Whether a URL stands for several files. In one of http only * does so; ? begins a query."""
    return "*" in url.partition("?")[0] if is_http(url) else glob.has_magic(url)


def before_pattern(path: str) -> str:
    """The folder, of a path or URL, below which a pattern begins."""
    return path[: min(path.find(sign) for sign in "*?[" if sign in path)].rpartition("/")[0]


def filesystem_of(url: str) -> tuple[Any, str]:
    """(fsspec's file system for a URL, which belongs to this process and not to one forked from it; the path in it).
    A UserError where there is none."""
    import fsspec

    scheme = url.partition(":")[0].lower()
    if "::" in url:
        raise base.UserError(f"--dataset {url}: chained URLs are not read; give the file's own")
    if urllib.parse.urlsplit(url).password:
        problem = "a password in a URL would stand in logs"
        raise base.UserError(f"--dataset {scheme}://: {problem}; give it as {scheme}'s package takes it")
    base.answer_from_cache_without_network(url)
    options: dict[str, Any] = {"use_listings_cache": False}  # a file may change while a run reads others
    if scheme in ("s3", "s3a"):  # tries are counted here
        given = fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}} | given
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # among others a kind of store that fsspec does not know, or whose package is missing
        raise describe_failure(error, url) from error
    if hasattr(filesystem, "retries"):
        filesystem.retries = 1
    for package in ("s3fs", "gcsfs"):  # the UserError alone reports what goes wrong
        logging.getLogger(package).setLevel(logging.CRITICAL)
    return filesystem, path


def ask(url: str, operation: str, seconds: float | None = None, **options: Any) -> Any:
    """What an operation of the URL's file system gives, with the path in it as the first argument.

    It is tried again where the error may pass. A FileNotFoundError where the store has no such thing; a UserError for
    what fails for good.
    """
    from fsspec.asyn import sync

    filesystem, path = filesystem_of(url)
    start, wait = time.monotonic(), FIRST_WAIT
    for number in itertools.count(1):
        try:
            if filesystem.async_impl:
                # private: the coroutine behind a public operation, which alone can be given up after some time
                coroutine = getattr(filesystem, f"_{operation}")
                return sync(filesystem.loop, coroutine, path, timeout=seconds or TIMEOUT_SECONDS, **options)
            return getattr(filesystem, operation)(path, **options)
        except Exception as error:
            if status_of(error) == 404 or isinstance(root_of(error), FileNotFoundError):
                raise FileNotFoundError(without_query(url)) from error
            if not is_transient(error):
                raise describe_failure(error, url) from error
            if number == TRIES:
                tried = f"{TRIES} tries in {time.monotonic() - start:.0f} s"
                raise describe_failure(error, url, tried) from error
        time.sleep(wait)
        wait *= 2


def list_url(url: str) -> list[tuple[str, dict]]:
    """(URL, what the store says of it) of the files at a URL, below a folder or where a pattern leads; none where there
    is nothing."""
    top = url
    try:
        if has_pattern(url):
            top = before_pattern(url)
            found = ask(url, "glob", detail=True, seconds=LISTING_SECONDS)
        else:
            # a server of http has folders only as pages of links, which `info` takes for files
            is_folder = "." not in without_query(url).rpartition("/")[2]
            if not is_folder:
                info = ask(url, "info")
                is_folder = info["type"] == "directory"
            if not is_folder:
                return [(url, info)]
            found = ask(url, "find", detail=True, seconds=LISTING_SECONDS)
    except FileNotFoundError:
        return []
    path_of_top = filesystem_of(top)[1].rstrip("/")
    files = []
    for path, info in found.items():
        within = path.removeprefix(path_of_top).strip("/")
        file = f"{top.rstrip('/')}/{within}" if within else url
        if info["type"] == "directory" or path.endswith("/"):  # such names stand for empty folders
            continue
        if info.get("size") is None:  # a page of links
            info = ask(file, "info")
        files.append((file, info))
    return files


def size_and_mark(url: str, info: dict) -> tuple[int, str]:
    """(bytes of a file, what changes with its content) by what its store says of it."""
    if info.get("size") is None:
        problem = "the server does not say how large it is"
        raise base.UserError(f"--dataset {without_query(url)}: {problem}; copy it to a local disk")
    marks = [f"{name} {info[name]}" for name in MARKS if info.get(name)]
    return info["size"], marks[0] if marks else ""


class RangeReader(io.RawIOBase):
    """The bytes of a file in a store; each read is one request for a range. A UserError where the file is not the one
    that was listed, and where the store gives no bytes after some tries."""

    def __init__(self, url: str, size: int, mark: str):
        self.url, self.size, self.position = url, size, 0
        name = mark.partition(" ")[0]
        now = self._ask("info")
        if now.get("size") != size or (mark and f"{name} {now.get(name)}" != mark):
            raise changed(without_query(url))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: "Buffer") -> int:
        view = memoryview(buffer)
        end = min(self.position + len(view), self.size)
        if self.position >= end:
            return 0
        content = self._ask("cat_file", start=self.position, end=end)
        if len(content) > end - self.position:
            problem = "the server sends no ranges of a file"
            raise base.UserError(f"--dataset {without_query(self.url)}: {problem}; copy it to a local disk")
        if not content:
            raise changed(without_query(self.url))
        view[: len(content)] = content
        self.position += len(content)
        return len(content)

    def _ask(self, operation: str, **options: Any) -> Any:
        try:
            return ask(self.url, operation, **options)
        except FileNotFoundError as error:
            raise changed(without_query(self.url)) from error


def changed(name: str) -> base.UserError:
    return base.UserError(f"--dataset {name}: it has changed since it was listed, or is gone; start a new run")


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
        for status in statuses:
            if isinstance(status, int) and 400 <= status < 600:
                return status
        error = error.__cause__
    return None


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    status, root = status_of(error), root_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    lasting = (IsADirectoryError, NotADirectoryError, ImportError, ValueError, TypeError, LookupError)
    return not (isinstance(root, lasting) or is_refusal(root))


def is_refusal(error: BaseException) -> bool:
    """Whether it is about credentials; by the name of its type, as botocore's errors have no common one."""
    words = ("Permission", "Credential", "Token", "Auth", "ProfileNotFound")
    return any(word in type(error).__name__ for word in words)


def describe_failure(error: Exception, url: str, tried: str = "") -> base.UserError:
    """What to say of a request that failed for good."""
    cause, status, root = base.first_line(error), status_of(error), root_of(error)
    if status and str(status) not in cause:
        cause = f"HTTP {status}, {cause}"
    advice = "check the name and the network"
    if status in (401, 403) or is_refusal(root):
        cause, advice = f"no access, {cause}", "check the credentials of the store's package"
    elif tried:
        cause = f"{cause}, {tried}"
        advice = "when the store answers again, --resume auto goes on from the newest checkpoint"
    return base.UserError(f"--dataset {without_query(url)}: cannot be read ({cause}); {advice}")
