"""World: rendezvous of the ranks, process groups, and one line and an exit code for whatever ends a rank."""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from harness import base, flags
from harness.job import endings, heartbeats, signals, terminal

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

STORE_TIMEOUT = 15  # seconds until a line about a store that does not answer
A_DAY = timedelta(days=1)  # the timeout of collectives; heartbeats find ranks that stall


class World:
    """The job of this rank.

        with job.World(settings, out_of_memory_advice) as world:
            device = world.meet()
            world.exit_code = run(settings, device, world.stop)

    On exit, a process that has met the others ends with `exit_code`. An exception inside ends it too: one rank prints
    one line for a user's mistake, for a device without memory, or for a collective that broke as a rank is gone; a bug
    keeps its traceback. Signals end it through `stop`.
    """

    def __init__(self, settings: flags.Args, out_of_memory_advice: Callable[[], str]):
        """`out_of_memory_advice` is called if the device is out of memory."""
        self.settings, self.out_of_memory_advice = settings, out_of_memory_advice
        self.exit_code = 0
        self.stop = signals.listen(settings)
        self.watch: heartbeats.Heartbeats | None = None  # None before the job's store is reached

    def __enter__(self) -> World:
        if not gc.isenabled():  # since `begin`
            gc.freeze()  # objects of the imports stay and are not scanned again
            gc.enable()
        return self

    def meet(self) -> torch.device:
        """Wait for the other ranks and return this rank's device."""
        import torch.distributed as dist

        minutes = self.settings.timeout_minutes
        store = open_store(minutes)
        self.watch = heartbeats.Heartbeats(60 * minutes, store, self.stop)  # it names a rank that never starts
        device = start_processes(minutes, store)
        if dist.get_world_size() > 1:
            self.stop.group = new_gloo_group()  # its tensors are on the host
        return device

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self.watch:
            try:
                stop_processes(self.stop)
            except Exception as broken:
                error = broken
            else:
                endings.end(self.exit_code)
        if isinstance(error, Exception):
            self.fail(error)

    def fail(self, error: Exception) -> NoReturn:
        """End this rank. One rank of the job prints the message, with --json also as an object on stdout.

        Rank 0 prints if it also fails within 3 s: most errors of other ranks are collectives that broke as one rank
        had exited.
        """
        import torch

        happened, exit_code, timeout = time.time(), 1, 3
        heartbeats.PROGRESS.phase = "failure"  # a SIGTERM from now on is torchrun's, as another rank has ended
        if isinstance(error, base.UserError):
            message, exit_code = f"train_fsdp.py: error: {base.one_line(str(error))}", error.exit_code
        elif isinstance(error, torch.OutOfMemoryError):
            message = f"train_fsdp.py: error: {base.first_line(error)} {self.out_of_memory_advice()}".rstrip()
        elif lost_rank := self.watch.explain(error) if self.watch else "":
            message, timeout = f"train_fsdp.py: error: {lost_rank}", 0
        else:
            message = "".join(traceback.format_exception(error))
        if not terminal.is_first_rank():
            time.sleep(timeout)  # if rank 0 has failed too, it prints now, and the launcher ends this rank
        if self.watch is None or self.watch.is_first_to_print():
            base.record_error(message, happened)
            terminal.print_error(message)
            if self.settings.json:
                base.print_json(message)
        endings.end(exit_code, timeout=5)


# ---- The store -------------------------------------------------------------------------------------------------------


def open_store(timeout_minutes: float) -> dist.Store:
    """Return the job's store for the rendezvous: torchrun's, rank 0's, or in a world of one this process's.

    Raises:
        UserError: the store cannot be reached, or torchrun's restarts cannot work (`check_restarts`).
    """
    import torch.distributed as dist

    env = os.environ
    if "RANK" not in env:
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    check_restarts(env)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    is_server = not is_torchrun(env) and env["RANK"] == "0"
    if not is_server:
        wait_for_store(address, port, timeout_minutes)
    timeout = timedelta(minutes=timeout_minutes)
    try:
        store: dist.Store = dist.TCPStore(
            address, port, int(env["WORLD_SIZE"]), is_server, timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        problem = "rank 0 cannot listen there" if is_server else "rank 0's store does not answer"
        problem = f"MASTER_ADDR {address}, MASTER_PORT {port}: {problem} ({base.first_line(error)})"
        raise base.UserError(f"{problem}; give the host of rank 0 and a free port", 1) from None
    if is_torchrun(env) and env["GROUP_WORLD_SIZE"] == "1":
        # torchrun's store outlives a restart and keeps addresses of dead ranks (pytorch issue 135712). The count
        # separates restarts on one node only, see docs/CHECKPOINTS.md
        store = dist.PrefixStore(f"restart-{env['TORCHELASTIC_RESTART_COUNT']}", store)
    return store


def is_torchrun(env: Mapping[str, str]) -> bool:
    """Return True if the job's store is torchrun's, which listens before any rank starts, and not rank 0's."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_restarts(env: Mapping[str, str]) -> None:
    """Raise UserError for --max-restarts on several nodes with torchrun's store: it keeps addresses of dead ranks, and
    nothing separates the restarts."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if is_torchrun(env) and restarts != "0" and env["GROUP_WORLD_SIZE"] != "1":
        needed = "torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        raise base.UserError(f"--max-restarts {restarts}: on several nodes no restart would succeed; {needed}")


def wait_for_store(address: str, port: int, timeout_minutes: float) -> None:
    """Wait until the address accepts connections; print one line after STORE_TIMEOUT. torch would wait without a line,
    even for an address that does not exist.

    Raises:
        UserError: nothing listens within `timeout_minutes`, or the address cannot be resolved.
    """
    where = f"MASTER_ADDR {address}, MASTER_PORT {port}"
    began, has_warned = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            waited, cause = time.monotonic() - began, error.strerror or str(error)
            if waited > 60 * timeout_minutes or (waited > STORE_TIMEOUT and isinstance(error, socket.gaierror)):
                raise base.UserError(
                    f"{where}: rank 0's store does not answer ({cause}); give the host of rank 0", 1
                ) from None
            if waited > STORE_TIMEOUT and not has_warned:
                terminal.print_error(f"train_fsdp.py: waiting for rank 0 at {where} ({cause})")
                has_warned = True
            time.sleep(0.5)


# ---- Processes -------------------------------------------------------------------------------------------------------


def start_processes(timeout_minutes: float = 10, store: dist.Store | None = None) -> torch.device:
    """Join the world of torchrun or accelerate, or make a world of one. Returns this rank's device.

    `timeout_minutes` is for the store. Collectives wait for a day, as heartbeats end a job that stalls.

    Raises:
        UserError: this rank has no GPU, or the store cannot be reached.
    """
    import torch
    import torch.distributed as dist

    env, cuda = os.environ, torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        if "LOCAL_RANK" not in env and env.get("WORLD_SIZE", "1") != "1":
            problem = (
                f"WORLD_SIZE={env['WORLD_SIZE']} is set, but not LOCAL_RANK, so all ranks of a node would take GPU 0"
            )
            raise base.UserError(f"{problem}; set it for each rank, or start the ranks by torchrun or accelerate")
        device, gpus = torch.device("cuda", int(env.get("LOCAL_RANK", 0))), torch.cuda.device_count()
        if device.index >= gpus:
            raise base.UserError(
                f"--nproc_per_node: rank {device.index} of this node has no GPU, there are only {gpus}"
            )
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives in NCCL's flight recorder
        # after this time torch aborts without a message if its NCCL watchdog hangs
        env.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{A_DAY.total_seconds():.0f}")
        dist.init_process_group(
            # gloo is for Python objects and, with --cpu-offload, gradient norms on the host
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            device_id=device if cuda else None,
            store=store or open_store(timeout_minutes),
            rank=int(env.get("RANK", 0)),
            world_size=int(env.get("WORLD_SIZE", 1)),
            timeout=A_DAY,
        )
    heartbeats.enter_phase("preparation")
    return device


def stop_processes(stop: signals.StopRequest | None = None) -> None:
    """Destroy the process groups after a barrier: a gloo rank that exits early can abort the others."""
    import torch.distributed as dist

    heartbeats.enter_phase("end")
    if stop and stop.round:
        stop.round.wait()
    dist.barrier()
    if stop:
        stop.has_finished = True
    dist.destroy_process_group()


def new_gloo_group() -> dist.ProcessGroup:
    """Return a group of all ranks for tensors on the host. Every rank calls this."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=A_DAY)


def lift_group_timeouts(*groups: dist.ProcessGroup) -> None:
    """Set these groups' timeout to A_DAY: torch's default is 30 minutes, and init_device_mesh takes no timeout."""
    import torch
    import torch.distributed as dist

    # private: no public name returns a group's backend or sets the timeout of an existing group
    is_plan = not isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    for group in () if is_plan else groups:
        dist.distributed_c10d._set_pg_timeout(A_DAY, group)  # private: see above
