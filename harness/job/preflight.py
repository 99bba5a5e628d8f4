"""Preflight: checks before a run trains: shards over several nodes, other processes on a GPU, room on the disk.

An error if the run cannot succeed, else a warning.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
from typing import TYPE_CHECKING

from harness import base, flags
from harness.job import host, terminal

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

MAX_OTHER_BYTES = base.GIB  # memory of other processes on a GPU up to which there is no warning


def check_world(args: flags.Flags, world: int) -> None:
    """Raise a UserError if a number of ranks that share something does not divide the number of all ranks."""
    for flag, number in (
        ("--context-parallel", args.context_parallel),
        ("--dp-replicate-size", args.dp_replicate_size),
    ):
        if world % number:
            problem = f"does not divide the world of {base.counted(world, 'rank')}; give a divisor of it"
            raise base.UserError(f"{flag} {number}: {problem}")


def check_machine(settings: flags.Settings, mesh: DeviceMesh, device: torch.device) -> None:
    """Warn on rank 0 of other processes on a rank's GPU and of shards over several nodes. Every rank calls this."""
    taken = describe_other_processes(other_processes_on_gpu()) if device.type == "cuda" else ""
    for line in base.all_gather_objects(taken):
        if line:
            terminal.warn(line)
    if spread := describe_spread(settings, mesh["shard"].size(), host.local_world_size()):
        terminal.print0(spread)


# ---- Nodes and GPUs --------------------------------------------------------------------------------------------------


def describe_spread(settings: flags.Settings, shards: int, ranks_per_node: int) -> str:
    """Return the line about a shard group that spans several nodes of several ranks, "" otherwise or with
    --dp-replicate-size. Shards inside a node may be slower or may not fit, so the line advises a plan."""
    if ranks_per_node == 1 or shards <= ranks_per_node or "dp_replicate_size" in settings.explicit:
        return ""
    nodes = shards // ranks_per_node
    return f"shards     over {nodes} nodes; --plan compares that with --dp-replicate-size {nodes}, shards inside a node"


def other_processes_on_gpu() -> dict[int, int]:
    """Return {pid: bytes} of the other processes with memory on this process's GPU, from NVIDIA's driver. Empty if it
    is not known: without the package nvidia-ml-py, on ROCm, WSL or MIG, or in a container."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        used = {process.pid: process.usedGpuMemory or 0 for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    except Exception:  # any combination of driver and library versions; a warning must not end a run
        return {}
    own = used.pop(os.getpid(), None)  # absent in a container, which sees pids of the host
    return {} if own is None else used


def describe_other_processes(holders: dict[int, int]) -> str:
    """Return this rank's warning about other processes on its GPU, "" if they hold little memory."""
    import torch.distributed as dist

    taken = sum(holders.values())
    if taken <= MAX_OTHER_BYTES:
        return ""
    name = f"rank {dist.get_rank()} ({socket.gethostname()}, pid {os.getpid()})"
    held = (
        f"{taken / base.GIB:.1f} GiB of its GPU are used by other processes (pid {', '.join(map(str, [*holders][:4]))})"
    )
    return f"{name}: {held}; end them, or exclude this GPU with CUDA_VISIBLE_DEVICES"


# ---- The disk --------------------------------------------------------------------------------------------------------


def amount(size: float) -> str:
    """Format bytes as GB or MB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def free_bytes(path: pathlib.Path) -> int:
    """Return the free bytes of the file system that has, or would have, this path."""
    path = path.expanduser().resolve()
    return shutil.disk_usage(next(part for part in (path, *path.parents) if part.exists())).free


def check_disk(settings: flags.Settings, checkpoint: int, weights: int, folder: pathlib.Path) -> bool:
    """Return True if the disk has room for one checkpoint. Rank 0 warns if not, or if the kept ones do not fit. Every
    rank calls this.

    Args:
        checkpoint: bytes of a checkpoint.
        weights: bytes of an export.

    Raises:
        UserError: a flag asks for checkpoints and none fits, or the export does not fit; on every rank.
    """
    warning, has_room = base.broadcast_from_rank_0(lambda: find_room(settings, checkpoint, weights, folder))
    if warning:
        terminal.warn(warning)
    return has_room


def find_room(settings: flags.Settings, checkpoint: int, weights: int, folder: pathlib.Path) -> tuple[str, bool]:
    """Return (warning or "", True if one checkpoint fits), as `check_disk` describes."""
    # leftovers of killed saves are removed before the first save
    left_over = sum(file.stat().st_size for part in base.unfinished_checkpoints(folder) for file in part.glob("*"))
    free, warning = free_bytes(folder) + left_over, ""
    kept = settings.keep_checkpoints + settings.keep_best
    missing = max(0, kept + 1 - len(base.complete_checkpoints(folder)))
    have = f"a checkpoint takes {amount(checkpoint)}, {folder} has {amount(free)} free"
    has_room = checkpoint <= free
    if not has_room and (settings.saves_during_training() or settings.explicit.get("final_checkpoint")):
        raise base.UserError(f"--output-dir: {have}; choose another disk, or make room", 1)
    if settings.saves_during_training() and missing * checkpoint > free:
        need = f"{kept} kept ones and the next take {amount(missing * checkpoint)}"
        warning = f"--output-dir: {have}: {need}; make room, or give a smaller --keep-checkpoints"
    elif not has_room and settings.final_checkpoint:
        warning = f"--output-dir: {have}: the last state will not be saved; make room"
    if settings.export:
        room = free_bytes(pathlib.Path(settings.export))
        if weights > room:
            problem = f"it takes {amount(weights)}, there are {amount(room)} free"
            raise base.UserError(f"--export {settings.export}: {problem}; choose another disk, or make room", 1)
    return warning, has_room
