"""Endings: exit of this process from any thread, after its listeners got the exit code. Imports nothing heavy."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED, STOPPED = 130, 143  # exit codes after Ctrl-C; after SIGTERM, SIGUSR1 or SIGHUP
LISTENERS: list[Callable[[int], object]] = []  # each is called with the exit code, in a new thread
ENDING: list[tuple[int, threading.Thread]] = []  # (exit code, thread) of each call of `end`; the first one counts


def at_exit(listener: Callable[[int], object]) -> None:
    """Call `listener` with the exit code before this process ends, unless it is killed."""
    LISTENERS.append(listener)


def describe_exit(exit_code: int) -> str:
    """Return `done`, `stopped` or `failed`; a missed gate is a failure."""
    if exit_code in (INTERRUPTED, STOPPED):
        return "stopped"
    return "failed" if exit_code else "done"


def announce(exit_code: int, timeout: float | None) -> None:
    """Call every listener with the exit code and wait at most `timeout` seconds for all. Their exceptions are ignored.
    Only the first thread that calls this returns: its exit code is the process's."""
    own = exit_code, threading.current_thread()
    ENDING.append(own)
    block_if_ending()
    if ENDING[0] is not own:
        return

    def notify(listener: Callable[[int], object]) -> None:
        with contextlib.suppress(Exception):
            listener(exit_code)

    threads = [threading.Thread(target=notify, args=(listener,), daemon=True) for listener in LISTENERS]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    for thread in threads:
        thread.join(None if timeout is None else max(0.0, began + timeout - time.monotonic()))


def block_if_ending() -> None:
    """Block forever if another thread ends this process: nothing more is logged or saved."""
    if ENDING and ENDING[0][1] is not threading.current_thread():
        threading.Event().wait()


def end(exit_code: int, timeout: float | None = None) -> NoReturn:
    """End this process from any thread, after its listeners (`announce`). The interpreter's clean-up is left out: there
    a library's thread can abort the process or wait for ranks that are gone."""
    announce(exit_code, timeout)
    if threading.current_thread() is threading.main_thread():  # another thread's flush may wait for the main one
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
