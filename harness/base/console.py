"""Console: stdout and stderr that never fail. A pipe without a reader, a closed descriptor or a full disk changes
neither what a process does nor its exit code; a character that the console's encoding lacks is replaced. Called first
by the script and by every other program of the project. It must run on any Python 3."""

from __future__ import annotations  # older interpreters read this far, to be told so

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

if TYPE_CHECKING:
    from typing_extensions import Buffer

GONE = (errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET)  # any other may have room again later


def redirect_to_devnull(descriptor: int) -> None:
    """Opens /dev/null in the place of a descriptor, for libraries and children of this process too."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)


def send(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Writes all of some bytes; what cannot be written is dropped."""
    data = bytes(data)
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process that shares the pipe has made it non-blocking
            select.select([], [descriptor], [])
        except OSError as error:
            if error.errno in GONE:
                redirect_to_devnull(descriptor)
            return


class Output(io.RawIOBase):
    """A raw stream that writes to a descriptor and never fails."""

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
        send(self.descriptor, content)
        return content.nbytes


def ignore_closed_pipes() -> None:
    """Replaces this process's stdout and stderr by streams that never fail. A closed descriptor is opened: otherwise a
    file of the run would get its number, and with it what libraries write to that number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            redirect_to_devnull(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)  # None where the descriptor was closed
        encoding = old.encoding if old else "utf-8"
        by_line = not old or old.line_buffering or getattr(old, "write_through", False)  # the last: python -u
        buffer = io.BufferedWriter(Output(descriptor))
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, "replace", line_buffering=by_line))


def exit_with_error(line: str, as_json: bool = False) -> NoReturn:
    """Ends the process with 2. Rank 0 prints the line, with `as_json` on stdout too, as an object; the launcher ends
    the others when it leaves."""
    rank = os.environ.get("RANK", "0")
    if rank.isdigit() and int(rank):
        time.sleep(3)
        sys.exit(2)
    record_error(line)
    if as_json:
        print_json(line)
    sys.stderr.write(line + "\n")
    sys.exit(2)


def print_json(message: str) -> None:
    """Prints an error as the JSON object that --json promises on stdout."""
    print(json.dumps({"error": message.removeprefix("train_fsdp.py: error: ").rstrip()}), flush=True)


def record_error(message: str, happened: float | None = None) -> None:
    """Writes an error into the file that torchrun reads and prints at the end of its own output.

    torchrun takes the earliest error of all ranks for the cause: `happened` is in seconds since 1970, by default now.
    """
    details = {"py_callstack": "\n" + message, "timestamp": str(int(happened or time.time()))}
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            pathlib.Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
