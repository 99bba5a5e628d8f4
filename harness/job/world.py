"""The world: its ranks meet in a store, train, and leave; one of them prints why the job failed."""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from harness import base
from harness.base import UserError, first_line, torch_internals
from harness.job import endings, heartbeats, terminal

STORE_PATIENCE = 15  # seconds until a line about a store that does not answer
AFTER_HEARTBEATS = timedelta(minutes=1)  # that collectives wait longer than --timeout-minutes


def open_store(timeout_minutes: float = 10) -> dist.Store:
    """The job's store, in which its ranks find each other: torchrun's or rank 0's, or in a world of one its own.

    Raises:
        UserError: the store is not reached; restarts that torchrun promises cannot work.
    """
    env = os.environ
    if "RANK" not in env:
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    check_restarts(env)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    reach_store(address, port, timeout_minutes)
    try:
        store = dist.TCPStore(
            address,
            port,
            int(env["WORLD_SIZE"]),
            is_master=not of_launcher(env) and env["RANK"] == "0",
            timeout=timedelta(minutes=timeout_minutes),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = f"MASTER_ADDR {address}, MASTER_PORT {port}"
        raise UserError(f"{where}: rank 0's store does not answer ({first_line(error)})", 1) from None
    if of_launcher(env) and env["GROUP_WORLD_SIZE"] == "1":
        # torchrun's store outlives a restart and keeps the dead ranks' addresses (pytorch issue 135712). The count
        # tells restarts apart on one node only, see docs/CHECKPOINTS.md
        store = dist.PrefixStore(f"restart-{env['TORCHELASTIC_RESTART_COUNT']}", store)
    return store


def of_launcher(env: Mapping[str, str]) -> bool:
    """Whether the job's store is torchrun's, which listens before any rank is started, and not rank 0's."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_processes(timeout_minutes: float = 10, store: dist.Store | None = None) -> torch.device:
    """Joins the world that torchrun or accelerate made, or makes a world of one; returns this rank's device.

    Collectives give up a minute after `timeout_minutes`: by then the heartbeats have named the rank that did not come.

    Raises:
        UserError: there is no GPU for this rank, or the store is not reached.
    """
    env, cuda = os.environ, torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device, gpus = torch.device("cuda", int(env.get("LOCAL_RANK", 0))), torch.cuda.device_count()
        if device.index >= gpus:
            raise UserError(f"--nproc_per_node: rank {device.index} of this node has no GPU, only {gpus} are seen")
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that NCCL's flight recorder remembers
        limit = timedelta(minutes=timeout_minutes) + AFTER_HEARTBEATS
        # torch's own patience with its watchdog is 480 s, after which it aborts without a word about any rank
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(480 + math.ceil(limit.total_seconds())))
        dist.init_process_group(
            # gloo beside NCCL carries Python objects and, with --cpu-offload, the norms of gradients on the host
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            device_id=device if cuda else None,
            store=store or open_store(timeout_minutes),
            rank=int(env.get("RANK", 0)),
            world_size=int(env.get("WORLD_SIZE", 1)),
            timeout=limit,
        )
    heartbeats.enter_phase("preparation")
    return device


def limit_waiting(*groups: dist.ProcessGroup) -> None:
    """Gives these groups the timeout of the default group; torch's own default is 30 minutes."""
    timeout = torch_internals.gloo_timeout()
    if timeout is not None:  # a plan's group has no gloo, and nobody waits in it
        for group in groups:
            torch_internals.set_group_timeout(group, timeout)


def new_group() -> dist.ProcessGroup:
    """Another group of all ranks, for Python objects and tensors on the host; every rank calls this."""
    group = dist.new_group(backend="gloo")
    limit_waiting(group)
    return group


def check_restarts(env: Mapping[str, str]) -> None:
    """Raises a UserError for --max-restarts on several nodes with torchrun's own store: the store keeps the addresses
    of dead ranks, and nothing tells one restart from another."""
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if of_launcher(env) and restarts != "0" and env["GROUP_WORLD_SIZE"] != "1":
        needed = "torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        raise UserError(f"--max-restarts {restarts}: on several nodes no restart would succeed; {needed}")


def reach_store(address: str, port: int, timeout_minutes: float) -> None:
    """Waits until the job's store answers; after 15 s without an answer one line names what this rank waits for. torch
    would warn for minutes and name no cause.

    Raises:
        UserError: the address cannot be resolved, rank 0 is not reached under it, its port is taken, or the store does
            not answer for `timeout_minutes`.
    """
    where = f"MASTER_ADDR {address}, MASTER_PORT {port}"
    start, own_store, has_warned = time.monotonic(), None, False
    if int(os.environ["RANK"]) == 0 and not of_launcher(os.environ):
        try:
            own_store = socket.create_server(("", port))  # where torch is going to listen
        except OSError as error:
            raise UserError(f"{where}: rank 0 cannot listen there ({error.strerror}); choose another port", 1) from None
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            break
        except OSError as error:
            waited = time.monotonic() - start
            if waited > STORE_PATIENCE and (own_store or isinstance(error, socket.gaierror)):
                problem = "rank 0 is not reached at its own address" if own_store else "no such host"
                raise UserError(f"{where}: {problem} ({error.strerror or error}); name the host of rank 0", 1) from None
            if waited > STORE_PATIENCE and of_launcher(os.environ) and isinstance(error, ConnectionRefusedError):
                raise UserError(f"{where}: torchrun is gone, and its store with it; start it again", 1) from None
            if waited > 60 * timeout_minutes:
                raise UserError(f"{where}: rank 0's store does not answer ({error.strerror or error})", 1) from None
            if waited > STORE_PATIENCE and not has_warned:
                terminal.print_error(f"train_fsdp.py: waiting for rank 0 at {where} ({error.strerror or error})")
                has_warned = True
            time.sleep(0.5)
    if own_store:
        own_store.close()


def stop_processes(stop=None) -> None:
    """Leaves the world, after a barrier: a gloo rank that leaves before the others are done can abort them. `stop` is
    the run's `StopRequest`."""
    heartbeats.enter_phase("end")
    if stop and stop.round:
        stop.round.wait()
    dist.barrier()
    dist.destroy_process_group()
    if stop:
        stop.leaving = True  # torchrun sends SIGTERM to ranks that leave a moment after the first one


def end_process(exit_code: int) -> None:
    """Ends this rank, whose work is done and written, without the interpreter's clean-up, in which the thread of a
    library can abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    endings.announce(exit_code)
    os._exit(exit_code)


def fail(message: str, exit_code: int, patience: float = 3, as_json: bool = False) -> None:
    """Ends this rank after its message, which one rank of all prints, with `as_json` also as an object on stdout.

    It is rank 0 that prints, if it fails within `patience` seconds too. The errors of other ranks are most often
    echoes: collectives that broke as one rank had left.
    """
    speaks, happened = terminal.is_first_rank(), time.time()
    heartbeats.HERE.phase = "failure"
    if not speaks:
        time.sleep(patience)  # if rank 0 has failed too, it prints meanwhile, and the launcher ends this rank
    with contextlib.suppress(RuntimeError):  # the store is gone, with the rank or the launcher that served it
        speaks = heartbeats.speaks_first(heartbeats.HERE.store)
    sys.stdout.flush()
    if speaks:
        base.record_error(message, happened)
        terminal.print_error(message)
        if as_json:
            base.tell_json(message)
    endings.announce(exit_code, patience=5)
    os._exit(exit_code)  # no clean-up, which would wait for ranks and workers that answer no more
