"""Signals: a thread that reads Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP, and the agreement of all ranks to stop. Imports
nothing heavy, as signals are read before torch is imported."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from harness import flags
from harness.job import endings, heartbeats, terminal

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Stopped(BaseException):
    """Raised on all ranks before the same forward pass. A BaseException, so that no library catches it."""


class StopRequest:
    """After SIGTERM, SIGUSR1 or SIGHUP (a closed terminal) to any rank, all ranks stop before the same forward pass (of
    a microbatch, an evaluation batch or a sampled token), save the last complete step and exit with 143. A second
    signal, or one before the first step is done, ends the job at once. So does Ctrl-C, with 130 and a summary; in a
    long run without --checkpoint-interval the first Ctrl-C saves as SIGTERM does, with 130."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    EXIT_CODE = endings.STOPPED
    SAME_REQUEST = 1.0  # seconds; a scheduler's signal reaches a rank directly and through torchrun
    LONG_RUN = 300.0  # seconds; Ctrl-C in a shorter one saves nothing

    def __init__(self, settings: flags.Args | None = None):
        self.settings = settings
        self.name = ""  # name of the signal
        self.exit_code = self.EXIT_CODE
        self.can_save = False  # set by the loop once a step is done
        self.has_finished = False  # set once all ranks have finished their work
        self.began = time.monotonic()
        self.first_request = math.inf  # monotonic time, seconds
        self.group: Any = None  # process group for the agreement, by default the world
        self.round: Any = None  # the last all-reduce of `flag`
        self.flag: Any = None  # 1 on a rank with a request

    def listen(self) -> None:
        """Start the thread that reads signals. Called in the main thread.

        Python's own handlers run in the main thread, which may be inside a collective. Python's C handler writes the
        signal's number to a pipe at any time, and the thread reads the pipe. No signal is blocked, as child processes
        would inherit that: they get signals as usual."""
        numbers = {*self.SIGNALS, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
            numbers.remove(signal.SIGHUP)
        pipe, into_pipe = os.pipe()
        os.set_blocking(into_pipe, False)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        signal.set_wakeup_fd(into_pipe, warn_on_full_buffer=False)
        for number in numbers:
            signal.siginterrupt(number, False)  # interrupted system calls are restarted

        masks = threading.local()  # signal mask of the thread that forks

        def block_signals() -> None:
            masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

        def unblock_signals() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

        def reset_in_child() -> None:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            unblock_signals()  # signals since the fork have their default effect

        has_launcher = os.environ.keys() & {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
        if has_launcher and sys.platform == "linux":
            # when torchrun dies, or accelerate, which as the launcher of one process forwards no signals
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        # With this pipe, a signal to a child would stop its parent and not the child.
        os.register_at_fork(before=block_signals, after_in_parent=unblock_signals, after_in_child=reset_in_child)
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):  # other signals with a Python handler arrive here too
                if number in (*self.SIGNALS, signal.SIGINT):
                    try:
                        self.react(number)
                    except Exception:  # without this thread, no signal would end the run
                        traceback.print_exc()
                        endings.end(endings.INTERRUPTED if number == signal.SIGINT else self.EXIT_CODE, timeout=3)

    def react(self, number: int) -> None:
        """Handle a signal, in the thread that reads signals."""
        interrupts, now = number == signal.SIGINT, time.monotonic()
        if endings.ENDING:
            exit_code, _ = endings.ENDING[0]
            if interrupts or exit_code == 0:  # any other is torchrun's, as another rank has exited
                os._exit(exit_code)
        elif interrupts and self.saves_on_interrupt(now):
            if terminal.is_first_rank():
                terminal.print_error("Ctrl-C: the last step is saved first; a second Ctrl-C ends at once")
            self.first_request, self.exit_code = now, endings.INTERRUPTED
            self.request("Ctrl-C")
        elif interrupts:
            if self.settings is not None and terminal.is_first_rank():
                progress = heartbeats.PROGRESS
                lines = terminal.describe_interrupt(self.settings, progress.step, progress.phase, progress.folder)
                terminal.print_error(lines)
            endings.end(endings.INTERRUPTED, timeout=3)
        elif not self.has_finished:  # torchrun sends SIGTERM to the ranks that exit after the first one
            if now - self.first_request > self.SAME_REQUEST:
                endings.end(self.EXIT_CODE, timeout=3)
            self.first_request = min(self.first_request, now)
            self.request(signal.Signals(number).name)

    def saves_on_interrupt(self, now: float) -> bool:
        """Return True for the first Ctrl-C in a long run without --checkpoint-interval that keeps its last state."""
        if not self.can_save or self.settings is None or self.first_request < math.inf:
            return False
        saves_only_last = self.settings.saves_final_checkpoint() and not self.settings.checkpoint_interval
        return saves_only_last and now - self.began > self.LONG_RUN

    def request(self, name: str) -> None:
        """Request that all ranks save and exit, because of the signal `name`; end this process if there is nothing to
        save. Called in any thread."""
        if self.can_save:
            self.name = name
            return
        trains = self.settings is None or self.settings.trains()
        if terminal.is_first_rank() and trains and heartbeats.PROGRESS.phase != "failure":
            terminal.print_error(terminal.describe_stop(name, heartbeats.PROGRESS.folder))
        endings.end(self.EXIT_CODE, timeout=3)

    def any_rank_wants_to_stop(self) -> bool:
        """Return True if any rank had a request at the previous call. Every rank calls this before every forward pass.

        The answer is one pass old, so no rank waits for it: a small all-reduce on the host runs during the pass.
        """
        import torch
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return bool(self.name)
        if self.round:
            self.round.wait()
        answer = self.flag is not None and bool(self.flag)
        self.flag = torch.tensor(int(bool(self.name)))
        self.round = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, async_op=True)
        return answer

    @contextlib.contextmanager
    def checked_before_each_forward(self, model: Any) -> Iterator[None]:
        """Raise Stopped in the forward passes of `model` if a rank has a request. Every rank makes the same passes."""

        def check(*_: object) -> None:
            if self.any_rank_wants_to_stop():
                raise Stopped

        hook = model.register_forward_pre_hook(check, prepend=True)  # before FSDP2 gathers parameters
        try:
            yield
        finally:
            hook.remove()

    def raise_if_stopping(self) -> None:
        """Raise Stopped if a rank has a request now. Every rank calls this and waits for the others."""
        if self.any_rank_wants_to_stop() or self.any_rank_wants_to_stop():  # the first answer is one call old
            raise Stopped


LISTENING: list[StopRequest] = []  # this process's, at most one


def listen(settings: flags.Args) -> StopRequest:
    """Return this process's request; signals reach it from the first call on."""
    if not LISTENING:
        LISTENING.append(StopRequest(settings))
        LISTENING[0].listen()
    return LISTENING[0]


def ignore_signals(worker: int) -> None:
    """Ignore signals in a data worker: a scheduler signals every process, and workers serve until their rank exits."""
    for number in (*StopRequest.SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
