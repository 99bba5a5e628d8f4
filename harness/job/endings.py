"""Endings: trackers, the endpoint and the page learn how a run ends. Called by whatever ends this process. Imports
nothing heavy; independent of its listeners."""

import contextlib
import math
import threading
import time
from collections.abc import Callable

STOPPED = (130, 143)  # by Ctrl-C, by SIGTERM or SIGUSR1
LISTENERS: list[Callable[[int], None]] = []  # each called with the exit code, at most once, in a thread of its own
ENDING: list[tuple[int, threading.Thread]] = []  # (exit code, thread) of each that ends this process; the first counts
HURRY = threading.Event()  # set by Ctrl-C, or by a signal to a run that is done: listeners are waited for no longer


def state_of(exit_code: int) -> str:
    """`done`, `stopped` or `failed`; a missed gate is a failure."""
    if exit_code in STOPPED:
        return "stopped"
    return "failed" if exit_code else "done"


def announce(exit_code: int, patience: float | None = None) -> None:
    """Calls every listener with the exit code and waits for them, for `patience` seconds at most. What listeners
    raise is ignored. Only the first thread that calls this returns, so that the process ends with its exit code."""
    own = exit_code, threading.current_thread()
    ENDING.append(own)
    block_if_exiting()
    if ENDING[0] is not own:
        return

    def tell(listener: Callable[[int], None]) -> None:
        with contextlib.suppress(Exception):
            listener(exit_code)

    threads = [threading.Thread(target=tell, args=(listener,), daemon=True) for listener in LISTENERS]
    for thread in threads:
        thread.start()
    deadline = math.inf if patience is None else time.monotonic() + patience
    for thread in threads:
        while thread.is_alive() and not HURRY.is_set() and time.monotonic() < deadline:
            thread.join(0.1)


def block_if_exiting() -> None:
    """Blocks for ever where another thread ends this process, so that nothing more is logged or saved."""
    if ENDING and ENDING[0][1] is not threading.current_thread():
        threading.Event().wait()
