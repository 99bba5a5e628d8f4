"""Signals: SIGTERM, SIGUSR1 and Ctrl-C, heard by a thread, and the agreement of all ranks to stop."""

import os
import select
import signal
import threading
import time

import torch
import torch.distributed as dist

from harness.flags.settings import Settings
from harness.job import endings, heartbeats, terminal
from harness.job.world import new_group

LAUNCHER_PATIENCE = 1.0  # seconds between two looks for this rank's launcher


class StopRequest:
    """SIGTERM or SIGUSR1 to any rank: all ranks save after the same step and leave with 143; a second one, or one
    before the first step is done, leaves at once. So does Ctrl-C at any time, with 130 and what to do next.

    A thread reads the signals, as Python's own handlers wait for the main thread, which may be inside a collective.
    """

    SIGNALS = terminal.STOP_SIGNALS
    EXIT_CODE = terminal.STOPPED
    SAME_REQUEST = 1.0  # seconds; a scheduler's signal reaches a rank directly and through torchrun as well

    def __init__(self, settings: Settings | None = None):
        self.settings, self.name, self.can_save, self.leaving = settings, "", False, False
        self.group, self.round, self.flag = None, None, torch.tensor(0)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (*self.SIGNALS, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True).start()

    def _listen(self, read_end: int) -> None:
        first, signals = float("inf"), select.poll()  # select() takes no descriptor above 1,023
        signals.register(read_end, select.POLLIN)
        while True:
            while not signals.poll(1000 * LAUNCHER_PATIENCE):
                if terminal.lost_launcher() and not (self.name or self.leaving or endings.ENDING):
                    self.request("the end of its launcher")
            number, now = os.read(read_end, 1)[0], time.monotonic()
            if endings.ENDING:  # of a run that is not done SIGTERM is torchrun's, as another rank has left too
                if number == signal.SIGINT or (number in self.SIGNALS and endings.ENDING[0][0] == 0):
                    endings.HURRY.set()
                continue
            if self.leaving and number in self.SIGNALS:
                continue
            if number == signal.SIGINT:
                here = heartbeats.HERE.step, heartbeats.HERE.phase, heartbeats.HERE.folder
                says = self.settings is not None and terminal.is_first_rank()
                terminal.leave(says and terminal.describe_interrupt(self.settings, *here))
            if number not in self.SIGNALS:  # another handler's, such as the data loader's SIGCHLD
                continue
            if now - first > self.SAME_REQUEST:
                terminal.leave("", self.EXIT_CODE)
            first = min(first, now)
            self.request(signal.Signals(number).name)

    def request(self, name: str) -> None:
        """Asks for a save and an end because of `name`; called in any thread."""
        if not self.can_save:
            speaks = terminal.is_first_rank() and heartbeats.HERE.phase != "failure"
            text = speaks and terminal.describe_stop(name, heartbeats.HERE.folder)
            terminal.leave(text, self.EXIT_CODE)
        self.name = name

    def agreed(self) -> bool:
        """Whether any rank had a request when this was last asked; every rank asks after every step.

        The answer is one step old, so that nobody waits for it: a small all-reduce on the host, beside the next step.
        """
        if dist.get_world_size() == 1:
            return bool(self.name)
        self.group = self.group or new_group()
        if self.round:
            self.round.wait()
        answer, self.flag = bool(self.flag), torch.tensor(int(bool(self.name)))
        self.round = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, async_op=True)
        return answer
