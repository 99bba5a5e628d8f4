"""Processes: joining and leaving the world, signals, and the one line that a failing job says. Called by the script at
both ends of a run, and by everything that prints. It does not know what the processes do."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from utils import UserError, from_main_process


def start_processes() -> torch.device:
    """Joins the world that torchrun or accelerate made, or makes a world of one; returns this rank's device."""
    env, cuda, gpus = os.environ, torch.cuda.is_available(), torch.cuda.device_count()
    device = torch.device("cuda", int(env.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        if device.index >= gpus:
            raise UserError(f"--nproc_per_node: rank {device.index} of this node has no GPU, only {gpus} are seen")
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        world = {}
        if "RANK" not in env:
            world = {"store": dist.TCPStore("127.0.0.1", 0, 1, is_master=True), "rank": 0, "world_size": 1}
        elif env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env["GROUP_WORLD_SIZE"] == "1":
            # torchrun's store outlives a restart with the dead ranks' addresses in it (pytorch issue 135712); the
            # count tells restarts apart on one node only, see docs/CHECKPOINTS.md for more
            store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
            store = dist.PrefixStore(f"restart-{env['TORCHELASTIC_RESTART_COUNT']}", store)
            world = {"store": store, "rank": int(env["RANK"]), "world_size": int(env["WORLD_SIZE"])}
        # gloo beside NCCL carries Python objects and, with --cpu-offload, the norms of gradients on the host
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None, **world)
    return device


def stop_processes(stop: "StopRequest | None" = None) -> None:
    """Leaves the world; a gloo rank that leaves before the others are done can abort them, hence the barrier."""
    if stop and stop.round:
        stop.round.wait()
    dist.barrier()
    dist.destroy_process_group()
    for number in StopRequest.SIGNALS:  # torchrun sends them to the ranks that leave a moment after the first
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """SIGTERM or SIGUSR1 to any rank: all ranks save after the same step and leave with 143; a second one, or one
    before the first step is done, leaves at once.

    A thread reads the signals, as Python's own handlers wait for the main thread, which may be inside a collective.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
    EXIT_CODE = 143
    SAME_REQUEST = 1.0  # seconds; a scheduler's signal reaches a rank directly and through torchrun as well

    def __init__(self):
        self.name, self.can_save, self.group, self.round, self.flag = "", False, None, None, torch.tensor(0)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True).start()

    def _listen(self, read_end: int) -> None:
        first = float("inf")
        while True:
            number, now = os.read(read_end, 1)[0], time.monotonic()
            if number not in self.SIGNALS:  # another handler's, such as the data loader's SIGCHLD
                continue
            name, outside = signal.Signals(number).name, not self.can_save
            if outside and int(os.environ.get("RANK", 0)) == 0:
                print(f"train_fsdp.py: {name} outside training, nothing to save", file=sys.stderr, flush=True)
            if outside or now - first > self.SAME_REQUEST:
                os._exit(self.EXIT_CODE)
            first, self.name = min(first, now), name

    def agreed(self) -> bool:
        """Whether any rank had a request when this was last asked; every rank asks after every step.

        The answer is one step old, so that nobody waits for it: a small all-reduce on the host, beside the next step.
        """
        if dist.get_world_size() == 1:
            return bool(self.name)
        self.group = self.group or dist.new_group(backend="gloo")
        if self.round:
            self.round.wait()
        answer, self.flag = bool(self.flag), torch.tensor(int(bool(self.name)))
        self.round = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, async_op=True)
        return answer


def fail(message: str, exit_code: int) -> None:
    """Ends this rank. Of all ranks one prints its message, rank 0 if it fails too, so that one mistake is one line;
    the others' errors are most often an echo, a collective that broke because one rank had left."""
    first = int(os.environ.get("RANK", 0)) == 0
    if not first:
        time.sleep(3)  # what rank 0 found as well it says by now; then the launcher ends this rank here
    if dist.is_initialized():
        try:
            first = dist.distributed_c10d._get_default_store().add("train_fsdp/failed", 1) == 1
        except RuntimeError:  # the store went with the rank that kept it
            first = False
    if first:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(exit_code)  # no clean-up: it would wait for ranks and workers that do not answer any more


def on_main_rank(make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on every rank; what it raises, too."""
    return from_main_process(make, dist.get_rank() == 0)


def say(*message) -> None:
    """Prints on rank 0, above a progress bar if there is one."""
    if dist.get_rank() == 0:
        tqdm.write(" ".join(map(str, message)))
        sys.stdout.flush()


def columns(lines: dict[str, str]) -> str:
    return "\n".join(f"{name:10} {text}" for name, text in lines.items())
