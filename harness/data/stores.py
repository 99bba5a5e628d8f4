"""Stores: the files at a URL such as `s3://bucket/folder`, listed and read through fsspec without a local copy.

Requests are retried here: fsspec's HTTP has no retries of its own, and those of s3fs give up after two seconds. gcsfs
tries 6 times, which takes up to 36 s and cannot be turned off."""

import glob
import io
import itertools
import logging
import re
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

from harness import base

if TYPE_CHECKING:
    from typing_extensions import Buffer

TIMEOUT_SECONDS = 45  # of a request for a range, or for information on a file; gcsfs' retries fit in
LISTING_SECONDS = 600  # of a request for the names in a folder
TRIES = 8
FIRST_WAIT = 0.5  # seconds before the second try, doubled for each further one
# Fields of a store's information that identify a version of a file; the first that is present is compared.
VERSIONS = ("generation", "ETag", "etag", "blob_id", "md5Hash", "mtime", "size")


def is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def without_query(url: str) -> str:
    """Return a URL for messages: the query of an HTTP URL is removed, as it may be a signature."""
    return url.partition("?")[0] if is_http(url) else url


def has_password(url: str) -> bool:
    try:
        return bool(urllib.parse.urlsplit(url).password)
    except ValueError:  # a pattern with brackets in the place of a host
        return False


def has_pattern(url: str) -> bool:
    """True if a URL is a pattern. In an HTTP URL only * makes one, as ? begins a query."""
    return "*" in url.partition("?")[0] if is_http(url) else glob.has_magic(url)


def before_pattern(path: str) -> str:
    """Return the folder of a path or URL before its pattern."""
    return re.split(r"[*?\[]", path)[0].rpartition("/")[0]


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return (fsspec's file system for a URL, the path in it); a UserError if there is none. fsspec caches it in each
    process; a forked one must not use its parent's, so no caller keeps it."""
    import fsspec

    scheme = url.partition(":")[0].lower()
    if "::" in url:  # not printed, as it may have a signature
        raise base.UserError(f"--dataset {scheme}::...: chained URLs are not read; give the file's own")
    if has_password(url):
        problem = "a password in a URL would be logged"
        raise base.UserError(f"--dataset {scheme}://: {problem}; give it as {scheme}'s package takes it")
    base.set_hub_offline_without_network(url)
    options: dict[str, Any] = {"use_listings_cache": False}  # files may change during a run
    is_s3 = scheme in ("s3", "s3a")
    if is_s3:  # requests are retried here, not by botocore
        user_options = fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}} | user_options
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # also for an unknown scheme, or a missing package
        raise failure_error(error, url) from error
    if is_s3:
        filesystem.retries = 1  # nor by s3fs: requests are retried here
    for package in ("s3fs", "gcsfs"):  # they log what the UserError says
        logging.getLogger(package).setLevel(logging.CRITICAL)
    return filesystem, path


def request(url: str, operation: str, timeout: float | None = None, **options: Any) -> Any:
    """Call an operation of the URL's file system with the path in it; retry it if the error is transient.

    A FileNotFoundError if the store has no such file; a UserError if the operation fails for good.
    """
    from fsspec.asyn import sync

    filesystem, path = filesystem_of(url)
    start, wait = time.monotonic(), FIRST_WAIT
    for number in itertools.count(1):
        try:
            if filesystem.async_impl:
                # the private coroutine of the operation, as only that takes a timeout
                coroutine = getattr(filesystem, f"_{operation}")
                return sync(filesystem.loop, coroutine, path, timeout=timeout or TIMEOUT_SECONDS, **options)
            return getattr(filesystem, operation)(path, **options)
        except Exception as error:
            if status_of(error) == 404 or isinstance(root_of(error), FileNotFoundError):
                raise FileNotFoundError(without_query(url)) from error
            if not is_transient(error):
                raise failure_error(error, url) from error
            if number == TRIES:
                tried = f"{TRIES} tries in {time.monotonic() - start:.0f} s"
                raise failure_error(error, url, tried) from error
        time.sleep(wait)
        wait *= 2


def list_url(url: str) -> list[tuple[str, dict]]:
    """List (URL, the store's information) of the files at a URL, in a folder or matching a pattern."""
    top = url
    try:
        if has_pattern(url):
            top = before_pattern(url)
            found = request(url, "glob", detail=True, timeout=LISTING_SECONDS)
        else:
            # `info` of HTTP takes a page of links for a file, so a name without a dot is listed, which finds a file too
            if "." in without_query(url).rpartition("/")[2]:
                info = request(url, "info")
                if info["type"] != "directory":
                    return [(url, info)]
            found = request(url, "find", detail=True, timeout=LISTING_SECONDS)
    except FileNotFoundError:
        return []
    # the store gives paths in its file system: bucket/folder/a.txt for s3://bucket/folder/
    path_of_top = filesystem_of(top)[1].rstrip("/")
    files = []
    for path, info in found.items():
        name = path.removeprefix(path_of_top).strip("/")
        file = f"{top.rstrip('/')}/{name}" if name else url  # no name: `url` is a file without a suffix
        if info["type"] == "directory" or path.endswith("/"):  # an empty folder
            continue
        if info.get("size") is None:  # a page of links
            info = request(file, "info")
        files.append((file, info))
    return files


def size_and_version(url: str, info: dict) -> tuple[int, tuple[str, str]]:
    """Return (size in bytes, version) of a file from its store's information."""
    if info.get("size") is None:
        problem = "the server does not give its size"
        raise base.UserError(f"--dataset {without_query(url)}: {problem}; copy it to a local disk")
    name = next((name for name in VERSIONS if info.get(name)), "size")
    return info["size"], (name, str(info[name]))


class RangeReader(io.RawIOBase):
    """The bytes of a file in a store; each read is one request for a range. A UserError if the file has changed since
    it was listed, or if a request fails for good."""

    def __init__(self, url: str, size: int, version: tuple[str, str]):
        self.url, self.size, self.position = url, size, 0
        name, value = version
        now = self._request("info")
        if now.get("size") != size or str(now.get(name)) != value:
            raise changed_error(without_query(url))

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
        content = self._request("cat_file", start=self.position, end=end)
        if len(content) > end - self.position:
            problem = "the server sends no ranges of a file"
            raise base.UserError(f"--dataset {without_query(self.url)}: {problem}; copy it to a local disk")
        if not content:
            raise changed_error(without_query(self.url))
        view[: len(content)] = content
        self.position += len(content)
        return len(content)

    def _request(self, operation: str, **options: Any) -> Any:
        try:
            return request(self.url, operation, **options)
        except FileNotFoundError as error:
            raise changed_error(without_query(self.url)) from error


def changed_error(name: str) -> base.UserError:
    return base.UserError(f"--dataset {name}: it has changed since it was listed, or is gone; start a new run")


def root_of(error: BaseException) -> BaseException:
    """Return the first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error or of one of its causes; None without one."""
    while error is not None:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if type(error).__module__.startswith(("gcsfs.", "google.")):  # `code` of aiohttp's errors is no status
            status = getattr(error, "code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def is_transient(error: Exception) -> bool:
    """True if the same request may succeed later."""
    status, root = status_of(error), root_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    permanent = (IsADirectoryError, NotADirectoryError, ImportError, ValueError, TypeError, LookupError)
    return not (isinstance(root, permanent) or is_access_error(root))


def is_access_error(error: BaseException) -> bool:
    """True for an error about credentials or permissions, by the name of its type, as botocore's errors have no common
    base; by its text for gcsfs, which raises an OSError."""
    words = ("Permission", "Credential", "Token", "Auth", "ProfileNotFound")
    return any(word in type(error).__name__ for word in words) or str(error).startswith("Forbidden: ")


def failure_error(error: Exception, url: str, tried: str = "") -> base.UserError:
    """Make the error for a request that failed for good."""
    cause, status, root = base.first_line(error), status_of(error), root_of(error)
    if status and str(status) not in cause:
        cause = f"HTTP {status}, {cause}"
    advice = "check the name and the network"
    if status in (401, 403) or is_access_error(root):
        cause, advice = f"no access, {cause}", "check the credentials of the store's package"
    elif tried:
        cause = f"{cause}, {tried}"
        advice = "when the store answers again, --resume auto resumes from the newest checkpoint"
    return base.UserError(f"--dataset {without_query(url)}: cannot be read ({cause}); {advice}")
