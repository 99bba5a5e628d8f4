"""Signals: SIGTERM, SIGUSR1 and Ctrl-C, read by a thread, and the agreement of all ranks to stop."""

import math
import os
import select
import signal
import threading
import time

import torch
import torch.distributed as dist

from harness.flags import Settings
from harness.job import endings, heartbeats, terminal
from harness.job.world import new_group

LAUNCHER_PATIENCE = 1.0  # seconds between two checks that this rank's launcher is alive


class StopRequest:
    """On SIGTERM or SIGUSR1 to any rank all ranks save after the same step and leave with 143. A second signal, or one
    before the first step is done, ends the job at once; so does Ctrl-C at any time, with 130 and what to do next.

    A thread reads the signals: Python's own handlers run in the main thread, which may be inside a collective.
    """

    SIGNALS = terminal.STOP_SIGNALS
    EXIT_CODE = terminal.STOPPED
    SAME_REQUEST = 1.0  # seconds; a scheduler's signal reaches a rank directly and through torchrun as well

    def __init__(self, settings: Settings | None = None):
        self.settings = settings
        self.name = ""  # of the signal, or what else asked for the end
        self.can_save = False  # set by the loop, from when a step is done
        self.leaving = False  # set when the ranks have done all their work
        self.group: dist.ProcessGroup | None = None  # of the ranks that ask each other
        self.round: dist.Work | None = None  # the all-reduce of `flag` that was begun last
        self.flag = torch.tensor(0)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (*self.SIGNALS, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True).start()

    def _listen(self, read_end: int) -> None:
        first_request = math.inf  # when, on the monotonic clock
        signals = select.poll()  # select() takes no descriptor above 1,023
        signals.register(read_end, select.POLLIN)
        while True:
            while not signals.poll(1000 * LAUNCHER_PATIENCE):
                if terminal.lost_launcher() and not (self.name or self.leaving or endings.ENDING):
                    self.request("the end of its launcher")
            number, now = os.read(read_end, 1)[0], time.monotonic()
            if endings.ENDING:  # of a run that failed, SIGTERM comes from torchrun, as another rank has left
                is_done = endings.ENDING[0][0] == 0
                if number == signal.SIGINT or (number in self.SIGNALS and is_done):
                    endings.HURRY.set()
                continue
            if self.leaving and number in self.SIGNALS:
                continue
            if number == signal.SIGINT:
                text = ""
                if self.settings is not None and terminal.is_first_rank():
                    here = heartbeats.HERE
                    text = terminal.describe_interrupt(self.settings, here.step, here.phase, here.folder)
                terminal.exit_now(text)
            if number not in self.SIGNALS:  # another handler's, such as the data loader's SIGCHLD
                continue
            if now - first_request > self.SAME_REQUEST:
                terminal.exit_now("", self.EXIT_CODE)
            first_request = min(first_request, now)
            self.request(signal.Signals(number).name)

    def request(self, name: str) -> None:
        """Asks all ranks to save and leave because of `name`; called in any thread."""
        if not self.can_save:
            text = ""
            if terminal.is_first_rank() and heartbeats.HERE.phase != "failure":
                text = terminal.describe_stop(name, heartbeats.HERE.folder)
            terminal.exit_now(text, self.EXIT_CODE)
        self.name = name

    def agreed_by_all_ranks(self) -> bool:
        """Whether any rank had a request when this was last called; every rank calls it after every step.

        The answer is one step old, so that no rank waits for it: a small all-reduce on the host during the next step.
        """
        if dist.get_world_size() == 1:
            return bool(self.name)
        if self.group is None:
            self.group = new_group()
        if self.round:
            self.round.wait()
        answer, self.flag = bool(self.flag), torch.tensor(int(bool(self.name)))
        self.round = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, async_op=True)
        return answer
