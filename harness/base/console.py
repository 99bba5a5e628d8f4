"""Console: stdout and stderr that never fail. A pipe without a reader, a closed descriptor or a full disk changes
neither the process nor its exit code; characters outside the console's encoding are replaced. The script and all other
programs call this first. It must run on any Python 3."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import contextlib
import errno
import io
import json
import os
import pathlib
import select
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from harness.base.ranks import working

if TYPE_CHECKING:
    from typing_extensions import Buffer

CLOSED = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # after other errors, retry later


def redirect_to_devnull(descriptor: int) -> None:
    """Replace a descriptor by /dev/null, also for libraries and children of this process."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)


def send(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`; bytes that cannot be written are dropped."""
    data = bytes(data)
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process made the shared pipe non-blocking
            select.select([], [descriptor], [])
        except OSError as error:
            if error.errno in CLOSED:
                redirect_to_devnull(descriptor)
            return


class Output(io.RawIOBase):
    """A raw stream to a descriptor that never fails."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: Buffer) -> int:
        content = memoryview(data)
        with working():  # a paused terminal blocks this rank, but it has not stalled
            send(self.descriptor, content)
        return content.nbytes


def ignore_closed_pipes() -> None:
    """Replace stdout and stderr by streams that never fail. Closed descriptors are opened: otherwise a file of the run
    would get their number, and the output of libraries."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            redirect_to_devnull(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)  # None for a closed descriptor
        encoding = old.encoding if old else "utf-8"
        line_buffering = not old or old.line_buffering or getattr(old, "write_through", False)  # python -u
        buffer = io.BufferedWriter(Output(descriptor))
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, "replace", line_buffering=line_buffering))


def exit_with_error(line: str, as_json: bool = False) -> NoReturn:
    """Exit with code 2. Rank 0 prints the line, with `as_json` also on stdout as an object; the other ranks record it
    and wait for the launcher to end them."""
    record_error(line)  # for torchrun of another node, whose ranks alone may have failed
    rank = os.environ.get("RANK", "0")
    if rank.isdigit() and int(rank):
        time.sleep(3)
        sys.exit(2)
    if as_json:
        print_json(line)
    sys.stderr.write(line + "\n")
    sys.exit(2)


def print_json(message: str) -> None:
    """Print an error as a JSON object on stdout, for --json."""
    print(json.dumps({"error": message.removeprefix("train_fsdp.py: error: ").rstrip()}), flush=True)


def record_error(message: str, happened: float | None = None) -> None:
    """Write an error into the file that torchrun reads and prints at the end. torchrun takes the earliest error of all
    ranks for the cause: `happened` is in seconds since 1970, by default now."""
    details = {"py_callstack": "\n" + message, "timestamp": str(int(happened or time.time()))}
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            pathlib.Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
