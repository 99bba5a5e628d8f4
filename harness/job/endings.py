"""Endings: whoever shows a run to others, a tracker or an endpoint, hears how it ends. Called by whatever ends this
process. It imports nothing heavy and does not know who listens."""

import contextlib
import threading
import time
from collections.abc import Callable

STOPPED = (130, 143)  # by Ctrl-C, by SIGTERM or SIGUSR1
LISTENERS: list[Callable[[int], None]] = []  # each called with the exit code, at most once, in a thread of its own
ENDING: list[tuple[int, threading.Thread]] = []  # who ends this process, and with what; the first one's word stands
HURRY = threading.Event()  # by Ctrl-C, or a signal to a run that is done: listeners are awaited no longer


def state_of(exit_code: int) -> str:
    """`done`, `stopped` or `failed`, to which a missed gate belongs."""
    return "stopped" if exit_code in STOPPED else "failed" if exit_code else "done"


def announce(exit_code: int, patience: float | None = None) -> None:
    """Tells every listener how this process ends and waits for them, `patience` seconds at most. What a listener raises
    changes no ending. Only the first caller returns, to leave with its exit code: no other thread may be faster."""
    own = exit_code, threading.current_thread()
    ENDING.append(own)
    hold()
    if ENDING[0] is not own:
        return

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


def hold() -> None:
    """Waits for the end where another thread ends this process: nothing is to be logged or saved any more."""
    if ENDING and ENDING[0][1] is not threading.current_thread():
        threading.Event().wait()
