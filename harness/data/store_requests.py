"""Store requests: what is asked of a store at a URL through fsspec, tried again where it may pass, and what to say of a
request that fails for good. Independent of files (`storage`)."""

import asyncio
import concurrent.futures
import logging
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from harness.base.errors import UnreadableError, UserError
from harness.base.hub import answer_from_cache_without_network
from harness.base.text import first_line
from harness.job import say

TIMEOUT_SECONDS = 30  # for a range of a file, or what is known about it
LISTING_TRIES = 4  # at the start, when a user may have mistyped the name
FIRST_WAIT = 0.5  # seconds before the second try; twice as long before each further one

# Forms of fsspec that read another URL through a copy on this machine, or through a list that names any other URL.
INDIRECT = ("blockcache", "cached", "dir", "filecache", "generic", "reference", "simplecache")
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
        raise UserError(f"--dataset {url}: chained and cached URLs are not read; give the file's own")
    if urllib.parse.urlsplit(url).password:
        raise UserError(
            f"--dataset {scheme}://: a password in a URL would stand in logs; give it as {scheme}'s package takes it"
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
        raise UserError(f"--dataset {url}: needs the package {package} (pip install {package})") from error
    except Exception as error:
        if scheme not in fsspec.available_protocols():
            problem = f"no kind of store is called {scheme}; such as s3, gs, hf or https"
            raise UserError(f"--dataset {url}: {problem}") from error
        raise name_failure(error, url) from error
    if hasattr(filesystem, "retries"):
        filesystem.retries = 1
    for package in ("s3fs", "gcsfs"):  # the UserError alone reports what goes wrong
        logging.getLogger(package).setLevel(logging.CRITICAL)
    return filesystem, path


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
            f"--dataset {shown}{place}: no access ({cause}); check the credentials: set {credentials}"
        )
    else:
        advice = "check the name and the network"
        if place:
            advice = "when the store answers again, --resume auto goes on from the newest checkpoint"
        unreadable = UnreadableError(f"--dataset {shown}: cannot be read{place}{tried} ({cause}); {advice}")
    unreadable.file = url
    return unreadable


def copy_command(url: str) -> str:
    """The advice to copy what a URL names, with the command, which needs no other package or credentials."""
    code = f"import fsspec; fs, path = fsspec.core.url_to_fs({url!r}); fs.get(path, './', recursive=True)"
    return f'copy it to a local disk and give that path: python -c "{code}"'


def cannot_map(url: str) -> UserError:
    """What to say of a file whose tokens would be mapped into memory, which only a local one can be."""
    problem = "its tokens are mapped into memory, which a store cannot give"
    return UserError(f"--dataset {without_query(url)}: {problem}; {copy_command(url)}")
