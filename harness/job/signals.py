"""Signals: Ctrl-C, SIGTERM and SIGUSR1, which a thread reads, and the agreement of all ranks to stop. Imports nothing
heavy: signals are read before torch is loaded."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from harness import flags
from harness.job import endings, heartbeats, terminal

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Stopped(BaseException):
    """All ranks stop here: each is before the same forward pass. As with KeyboardInterrupt no library catches it."""


class StopRequest:
    """On SIGTERM or SIGUSR1 to any rank all ranks stop before the same forward pass, of a microbatch, of a batch of an
    evaluation or of a token of a sample, save the last complete step and leave with 143. A second signal, or one before
    the first step is done, ends the job at once; so does Ctrl-C at any time, with 130 and what to do next."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
    EXIT_CODE = endings.STOPPED
    SAME_REQUEST = 1.0  # seconds; a scheduler's signal reaches a rank directly and through torchrun as well

    def __init__(self, settings: flags.Args | None = None):
        self.settings = settings
        self.name = ""  # of the signal that asked for the end
        self.can_save = False  # set by the loop, from when a step is done
        self.resumed_step = 0  # set by the loop, what this start went on from
        self.has_finished = False  # set when the ranks have done all their work
        self.first_request = math.inf  # when, on the monotonic clock
        self.group: Any = None  # of the ranks that ask each other, by default all of the world
        self.round: Any = None  # the all-reduce of `flag` that was begun last
        self.flag: Any = None

    def listen(self) -> None:
        """Starts the thread that reads signals; called in the main thread. Only such a thread can act at any time:
        Python's own handlers run in the main thread, which may be inside a collective. What C does when a signal comes
        is to write its number into the pipe, whatever all threads are doing.

        No signal is blocked, as every child process would inherit that: a program that is started gets signals as
        usual, and so does a process that is forked."""
        numbers = {*self.SIGNALS, signal.SIGINT}
        pipe, into_pipe = os.pipe()
        os.set_blocking(into_pipe, False)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        signal.set_wakeup_fd(into_pipe, warn_on_full_buffer=False)
        for number in numbers:
            signal.siginterrupt(number, False)  # a library's system call that it meets goes on

        masks = threading.local()  # of the thread that forks

        def block_signals() -> None:
            masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

        def unblock_signals() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

        def reset_in_child() -> None:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            unblock_signals()  # what came since the fork acts as it does on any program

        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)  # when torchrun or accelerate dies
        # A signal to a child that still has this pipe would stop its parent, and not the child.
        os.register_at_fork(before=block_signals, after_in_parent=unblock_signals, after_in_child=reset_in_child)
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):  # other signals with a handler of Python's come here too
                if number in (*self.SIGNALS, signal.SIGINT):
                    self.react(number)

    def react(self, number: int) -> None:
        """Does what a signal asks for; called in a thread of its own."""
        interrupts = number == signal.SIGINT
        if endings.ENDING:
            exit_code, _ = endings.ENDING[0]
            if interrupts or exit_code == 0:  # otherwise torchrun sends it, as another rank has left
                os._exit(exit_code)
        elif interrupts:
            if self.settings is not None and terminal.is_first_rank():
                progress = heartbeats.PROGRESS
                lines = terminal.describe_interrupt(
                    self.settings, progress.step, progress.phase, progress.folder, self.resumed_step
                )
                terminal.print_error(lines)
            endings.end(endings.INTERRUPTED, timeout=3)
        elif not self.has_finished:  # torchrun sends SIGTERM to ranks that leave a moment after the first one
            now = time.monotonic()
            if now - self.first_request > self.SAME_REQUEST:
                endings.end(self.EXIT_CODE, timeout=3)
            self.first_request = min(self.first_request, now)
            self.request(signal.Signals(number).name)

    def request(self, name: str) -> None:
        """Asks all ranks to save and leave because of `name`; ends this process where there is nothing to save. Called
        in any thread."""
        if self.can_save:
            self.name = name
            return
        trains = self.settings is None or self.settings.trains()
        if terminal.is_first_rank() and trains and heartbeats.PROGRESS.phase != "failure":
            terminal.print_error(terminal.describe_stop(name, heartbeats.PROGRESS.folder))
        endings.end(self.EXIT_CODE, timeout=3)

    def any_rank_wants_to_stop(self) -> bool:
        """Whether any rank had a request when this was last called; every rank calls it before every forward pass.

        The answer is one pass old, so that no rank waits for it: a small all-reduce on the host during the next pass.
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
    def before_each_forward(self, model: Any) -> Iterator[None]:
        """Inside, each forward pass of `model` raises Stopped where a rank has a request. Each rank makes every pass,
        so there they can agree."""

        def check(*_: object) -> None:
            if self.any_rank_wants_to_stop():
                raise Stopped

        hook = model.register_forward_pre_hook(check, prepend=True)  # before FSDP2 gathers parameters
        try:
            yield
        finally:
            hook.remove()

    def raise_if_stopping(self) -> None:
        """Raises Stopped where a rank has a request at this moment. Every rank calls this, and waits for the others."""
        if self.any_rank_wants_to_stop() or self.any_rank_wants_to_stop():  # the first answer is older
            raise Stopped


LISTENING: list[StopRequest] = []  # the one of this process


def listen(settings: flags.Args) -> StopRequest:
    """The request of this process, which signals reach from the first call on."""
    if not LISTENING:
        LISTENING.append(StopRequest(settings))
        LISTENING[0].listen()
    return LISTENING[0]


def ignore_signals(worker: int) -> None:
    """Called in a data worker: a scheduler signals every process of a job, and they serve until their rank leaves."""
    for number in (*StopRequest.SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
