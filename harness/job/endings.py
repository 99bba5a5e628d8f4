"""Endings: how this process ends. Whoever shows the run hears its exit code first. Imports nothing heavy."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED, STOPPED = 130, 143  # by Ctrl-C; by SIGTERM or SIGUSR1
LISTENERS: list[Callable[[int], object]] = []  # each called with the exit code, in a thread of its own
ENDING: list[tuple[int, threading.Thread]] = []  # (exit code, thread) of each that ends this process; the first counts


def at_exit(listener: Callable[[int], object]) -> None:
    """Has `listener` called with the exit code before this process ends, however it ends but by a kill."""
    LISTENERS.append(listener)


def describe_exit(exit_code: int) -> str:
    """`done`, `stopped` or `failed`; a missed gate is a failure."""
    if exit_code in (INTERRUPTED, STOPPED):
        return "stopped"
    return "failed" if exit_code else "done"


def announce(exit_code: int, timeout: float | None) -> None:
    """Calls every listener with the exit code and waits for them, for `timeout` seconds at most. What listeners
    raise is ignored. Only the first thread that calls this returns, so that the process ends with its exit code."""
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
    """Blocks for ever where another thread ends this process, so that nothing more is logged or saved."""
    if ENDING and ENDING[0][1] is not threading.current_thread():
        threading.Event().wait()


def end(exit_code: int, timeout: float | None = None) -> NoReturn:
    """Ends this process from any thread, after its listeners (`announce`) and without the interpreter's clean-up, in
    which the thread of a library can abort the process or wait for ranks that answer no more."""
    announce(exit_code, timeout)
    if threading.current_thread() is threading.main_thread():  # in another thread a flush may wait for the main one
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
