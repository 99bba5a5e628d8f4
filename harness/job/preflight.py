"""Preflight: what would end a run late is looked for before it trains: shared memory, disk, a GPU that others use. Each
finding is a line with what to do: an error where the run cannot succeed, else a warning."""

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

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFETCHED_BATCHES = 2  # that a data worker reads ahead
BATCHES_IN_USE = 2  # that the training holds beside them
MAX_OTHER_BYTES = base.GIB  # bytes of a GPU that other processes may hold without a warning


def check_machine(settings: flags.Settings, mesh: DeviceMesh, device: torch.device) -> None:
    """Checks each node's shared memory and each rank's GPU, and says over how many nodes shards are; every rank calls
    this, rank 0 prints.

    Raises:
        UserError: the run cannot succeed; on every rank.
    """
    base.broadcast_from_node_main(lambda: check_shared_memory(settings), os.environ.get("LOCAL_RANK", "0") == "0")
    taken = describe_other_processes(other_processes_on_gpu()) if device.type == "cuda" else ""
    for line in base.all_gather_objects(taken):
        if line:
            terminal.warn(line)
    if spread := describe_spread(settings, mesh["shard"].size(), host.local_world_size()):
        terminal.print0(spread)


# ---- Nodes and GPUs --------------------------------------------------------------------------------------------------


def describe_spread(settings: flags.Settings, shards: int, ranks_per_node: int) -> str:
    """The line of a shard group that spans several nodes; empty for any other, for nodes of one rank, and where
    --dp-replicate-size was given. Replicas inside a node may be slower, and may not fit: a plan says which."""
    if ranks_per_node == 1 or shards <= ranks_per_node or "dp_replicate_size" in settings.explicit:
        return ""
    nodes = shards // ranks_per_node
    return f"shards     over {nodes} nodes; --plan compares that with --dp-replicate-size {nodes}, shards inside a node"


def other_processes_on_gpu() -> dict[int, int]:
    """{pid: bytes} of the other processes that hold memory on this process's GPU, by NVIDIA's driver; none where it
    does not say: without the package nvidia-ml-py, on ROCm, WSL or a part of a GPU (MIG), in a container."""
    import torch

    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        used = {process.pid: process.usedGpuMemory or 0 for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    except Exception:  # driver, library and package come in any combination of versions; a diagnosis never ends a run
        return {}
    own = used.pop(os.getpid(), None)  # without it: a container, and these are pids of the host
    return {} if own is None else used


def describe_other_processes(holders: dict[int, int]) -> str:
    """The warning of this rank where other processes hold memory on its GPU; empty where it is little."""
    import torch.distributed as dist

    taken = sum(holders.values())
    if taken <= MAX_OTHER_BYTES:
        return ""
    name = f"rank {dist.get_rank()} ({socket.gethostname()}, pid {os.getpid()})"
    held = f"{taken / base.GIB:.1f} GiB of its GPU are held by others (pid {', '.join(map(str, [*holders][:4]))})"
    return f"{name}: {held}; end them, or leave this GPU out by CUDA_VISIBLE_DEVICES"


# ---- Shared memory ---------------------------------------------------------------------------------------------------


def amount(size: float) -> str:
    """Bytes as GB or MB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def free_bytes(path: pathlib.Path) -> int:
    """Free bytes of the file system in which a path is, or would be."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(part for part in (path, *path.parents) if part.exists())).free


def batch_bytes(settings: flags.Settings) -> int:
    """Bytes of one microbatch in shared memory: int64 tokens and labels, with --document-mask positions too."""
    tensors = 3 if settings.document_mask else 2
    return tensors * 8 * int(settings.batch_size) * settings.sequence_length


def check_shared_memory(settings: flags.Settings) -> None:
    """Raises a UserError where the batches that this node's data workers read ahead have no room in its shared memory:
    the workers would die of SIGBUS."""
    workers = settings.num_workers * host.local_world_size()
    if not workers:
        return
    batches = workers * PREFETCHED_BATCHES + BATCHES_IN_USE * host.local_world_size()
    need, free = batches * batch_bytes(settings), free_bytes(SHARED_MEMORY)
    if need > free:
        what = f"{amount(free)} free, what {workers} data workers read ahead takes {amount(need)}"
        advice = "give the container more (docker run --shm-size=1g), or --num-workers 0"
        where = f"{SHARED_MEMORY} of {socket.gethostname()}"
        raise base.UserError(f"--num-workers {settings.num_workers}: {where}: {what}; {advice}", 1)


# ---- The disk --------------------------------------------------------------------------------------------------------


def check_disk(settings: flags.Settings, checkpoint: int, weights: int, folder: pathlib.Path) -> bool:
    """Whether the disk has room for one checkpoint. Rank 0 warns where it has none, and where it has none for all that
    are kept; every rank calls this.

    Args:
        checkpoint: bytes that one takes.
        weights: bytes that an export takes.

    Raises:
        UserError: a flag asks for checkpoints and not even one has room, or the export has none; on every rank.
    """
    warning, has_room = base.broadcast_from_rank_0(lambda: find_room(settings, checkpoint, weights, folder))
    if warning:
        terminal.warn(warning)
    return has_room


def find_room(settings: flags.Settings, checkpoint: int, weights: int, folder: pathlib.Path) -> tuple[str, bool]:
    """(a warning or an empty one, whether the disk has room for one checkpoint); the rest is as `check_disk` has it."""
    # what a killed save left is removed before the first save
    left_over = sum(file.stat().st_size for part in base.unfinished_checkpoints(folder) for file in part.glob("*"))
    free, warning = free_bytes(folder) + left_over, ""
    kept = settings.keep_checkpoints + settings.keep_best
    missing = max(0, kept + 1 - len(base.complete_checkpoints(folder)))
    have = f"a checkpoint takes {amount(checkpoint)}, {folder} has {amount(free)} free"
    has_room = checkpoint <= free
    if not has_room and (settings.saves_during_training() or settings.explicit.get("final_checkpoint")):
        raise base.UserError(f"--output-dir: {have}; name another disk, or make room", 1)
    if settings.saves_during_training() and missing * checkpoint > free:
        what = f"{kept} that are kept and the next one take {amount(missing * checkpoint)}"
        warning = f"--output-dir: {have}: {what}; make room, or give a smaller --keep-checkpoints"
    elif not has_room and settings.final_checkpoint:
        warning = f"--output-dir: {have}: the last state will not be kept; make room"
    if settings.export:
        room = free_bytes(pathlib.Path(settings.export))
        if weights > room:
            problem = f"it takes {amount(weights)}, there are {amount(room)} free"
            raise base.UserError(f"--export {settings.export}: {problem}; name another disk, or make room", 1)
    return warning, has_room
