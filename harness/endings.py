"""Endings: whoever shows a run to others, a tracker or an endpoint, hears how it ends. Called by whatever ends this
process. It imports nothing heavy and does not know who listens."""

import contextlib
import threading
import time
from collections.abc import Callable

STOPPED = (130, 143)  # by Ctrl-C, by SIGTERM or SIGUSR1
LISTENERS: list[Callable[[int], None]] = []  # each called with the exit code, at most once, in a thread of its own
ENDING = threading.Event()
HURRY = threading.Event()  # by Ctrl-C: listeners are awaited no longer


def state_of(exit_code: int) -> str:
    """`done`, `stopped` or `failed`, to which a missed gate belongs."""
    return "stopped" if exit_code in STOPPED else "failed" if exit_code else "done"


def announce(exit_code: int, patience: float | None = None) -> None:
    """Tells every listener how this process ends and waits for them, `patience` seconds at most; only the first call
    does. What a listener raises changes no ending."""
    if ENDING.is_set():
        return
    ENDING.set()

    def tell(listener: Callable[[int], None]) -> None:
        with contextlib.suppress(Exception):
            listener(exit_code)

    threads = [threading.Thread(target=tell, args=(listener,), daemon=True) for listener in LISTENERS]
    for thread in threads:
        thread.start()
    until = None if patience is None else time.monotonic() + patience
    for thread in threads:
        while thread.is_alive() and not HURRY.is_set() and (until is None or time.monotonic() < until):
            thread.join(0.1)
