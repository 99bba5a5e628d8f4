"""Preflight: what would end a run late is looked for before it trains, for all ranks together: memory, shared memory,
disk, versions that differ, a GPU that others use. Each finding is a line with what to do: an error where the run cannot
succeed, else a warning."""

import collections
import dataclasses
import hashlib
import math
import os
import pathlib
import shutil
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh

from harness import base, flags
from harness.job import host, terminal

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFETCHED_BATCHES = 2  # that a data worker reads ahead
PREFETCHED_BATCHES_STREAMING = 16
BATCHES_IN_USE = 2  # that the training holds beside them
FOREIGN_MEMORY = base.GIB  # bytes of a GPU that other processes may hold without a warning
MAX_NAMES = 4  # ranks that a line names
PAGE = 4096  # bytes


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """Bytes that one parameter of a model takes, by what is kept of it."""

    weight: int
    states: float  # of the optimizer, in memory; an average where parameters differ
    saved_states: float  # of the optimizer, in a checkpoint
    average: int = 0  # with --ema, in memory and in a checkpoint

    @property
    def at_rest(self) -> float:
        """In memory: the parameter, its gradient, its optimizer states and its average."""
        return 2 * self.weight + self.states + self.average

    @property
    def in_checkpoint(self) -> float:
        return self.weight + self.saved_states + self.average


def check_machine(
    settings: flags.Settings,
    parameters: int,
    each: ParameterBytes,
    mesh: DeviceMesh,
    device: torch.device,
    folder: pathlib.Path,
    step: int,
) -> flags.Settings:
    """Runs all checks once, before the model is made; every rank calls this, rank 0 judges and warns.

    Args:
        parameters: how many the model has.
        each: bytes that one of them takes.
        step: of the checkpoint from which the run goes on; a run that is done saves nothing.

    Returns the settings, with what a disk or a host's memory has no room for.

    Raises:
        UserError: the run cannot succeed; on every rank.
    """
    shards = mesh["shard"].size()
    on_host = device.type == "cpu" or settings.cpu_offload
    if on_host:
        check_memory(settings, parameters, each, shards)
    described = base.of_all_ranks(describe(device))

    def look() -> flags.Settings:
        warnings = [*check_versions(described), *check_taken(described)]
        check_shared_memory(settings, described)
        decided = settings
        if step < settings.num_steps:
            at_rest = each.at_rest * parameters / shards if on_host else 0
            staging = [*check_staging(settings, each.in_checkpoint * parameters / shards, at_rest, described)]
            disk, lacks_disk = check_disk(settings, parameters, each, folder)
            warnings += [*staging, *disk]
            decided = dataclasses.replace(settings, lacks_memory=bool(staging), lacks_disk=lacks_disk)
        for warning in warnings:
            terminal.warn(warning)
        return decided

    return base.on_main_rank(look)


# ---- What a rank reports of itself -----------------------------------------------------------------------------------


def describe(device: torch.device) -> dict[str, Any]:
    """This rank's machine and GPU, below 1 kB when pickled, as each of a thousand ranks gets those of all."""
    about = {
        "node": socket.gethostname(),
        "pid": os.getpid(),
        "versions": base.package_versions() | {"program": checksum()},
        "shared": free_bytes(SHARED_MEMORY),
        "host_memory": host.memory(),
        "resident": psutil.Process().memory_info().rss,
    }
    if device.type == "cuda":
        about["versions"] |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cuda": torch.version.cuda}
        about |= {"memory": torch.cuda.get_device_properties(device).total_memory, "holders": holders_of_gpu()}
    return about


def checksum() -> str:
    """Checksum of this program's own files, to tell whether all ranks run the same."""
    digest = hashlib.sha256()
    for path in (base.ROOT / "train_fsdp.py", base.ROOT / "utils.py", *sorted((base.ROOT / "harness").rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def holders_of_gpu() -> list[tuple[int, int]]:
    """(pid, bytes) of the other processes that hold memory on this process's GPU, by NVIDIA's driver; none where it
    does not say: without the package nvidia-ml-py, on ROCm, WSL or a part of a GPU (MIG), in a container."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        used = {process.pid: process.usedGpuMemory or 0 for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    except Exception:  # driver, library and package come in any combination of versions; a diagnosis never ends a run
        return []
    if os.getpid() not in used:  # a container: these are pids of the host
        return []
    del used[os.getpid()]
    return sorted(used.items(), key=lambda holder: -holder[1])


def free_bytes(path: pathlib.Path) -> int:
    """Free bytes of the file system in which a path is, or would be."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(part for part in (path, *path.parents) if part.exists())).free


# ---- The checks, by what all ranks reported --------------------------------------------------------------------------


def names(ranks: list[int], described: list[dict]) -> str:
    """`rank 3 (node-b, pid 411)`; of many ranks the first ones, and how many more there are."""
    first = [f"rank {rank} ({described[rank]['node']}, pid {described[rank]['pid']})" for rank in ranks[:MAX_NAMES]]
    text = ", ".join(first)
    if len(ranks) > MAX_NAMES:
        text += f" and {len(ranks) - MAX_NAMES} more"
    return text


def amount(size: float) -> str:
    """Bytes as GB or MB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def group(values: Iterable) -> list[tuple[Any, list[int]]]:
    """(value, the ranks that have it) for each value, the most frequent first."""
    ranks = collections.defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return sorted(ranks.items(), key=lambda item: -len(item[1]))


def check_memory(settings: flags.Settings, parameters: int, each: ParameterBytes, shards: int) -> None:
    """Raises a UserError where the parameters, gradients, optimizer states and averages of the ranks here are more than
    this host can hold: a lower bound of what training takes. `shards` is the number of ranks that share one replica."""
    need, available = parameters * each.at_rest * host.ranks_here() / shards, host.memory()
    if need > available:
        beside = "gradients, optimizer states and average" if each.average else "gradients and optimizer states"
        what = f"{parameters:,} parameters x {each.at_rest:.4g} bytes with their {beside}"
        needs = f"training on the host takes {need / base.GIB:,.1f} GiB and more ({what})"
        has = f"it has {available / base.GIB:,.1f}"
        raise base.UserError(
            f"--model {settings.model}: {needs}, {has}; try --demo, or look for GPUs that hold it by --plan"
        )


def check_versions(described: list[dict]) -> Iterator[str]:
    """Ranks whose program or packages are of another version than most ranks'."""
    for name in dict.fromkeys(name for about in described for name in about["versions"]):
        (usual, most), *others = group(about["versions"].get(name) for about in described)
        for version, ranks in others:
            has = f"{names(ranks, described)}: {name} {version or 'missing'}"
            usually = f"{usual or 'missing'} on {names(most[:1], described)}"
            if len(most) > 1:
                usually += f" and {len(most) - 1} more"
            advice = "start all ranks from the same files" if name == "program" else "install the same on every node"
            yield f"{has}, but {usually}; {advice}"


def check_taken(described: list[dict]) -> Iterator[str]:
    """GPUs of which other processes hold memory, by the driver's list of them."""
    for rank, about in enumerate(described):
        holders = about.get("holders", [])
        taken = sum(size for _, size in holders)
        if taken > FOREIGN_MEMORY:
            pids = ", ".join(str(pid) for pid, _ in holders[:MAX_NAMES])
            gib = f"{taken / base.GIB:.1f} of {about['memory'] / base.GIB:.1f} GiB"
            held = f"{gib} of its GPU are held by others (pid {pids})"
            yield f"{names([rank], described)}: {held}; end them, or leave this GPU out by CUDA_VISIBLE_DEVICES"


def batch_bytes(settings: flags.Settings) -> int:
    """Bytes of one microbatch in shared memory: int64 tokens and labels, with --document-mask positions too."""
    tensors = 3 if settings.document_mask else 2
    tokens = int(settings.batch_size) * settings.sequence_length
    return tensors * math.ceil(8 * tokens / PAGE) * PAGE


def check_shared_memory(settings: flags.Settings, described: list[dict]) -> None:
    """Raises a UserError where the batches that a node's data workers read ahead have no room in its shared memory: the
    workers would die of SIGBUS."""
    workers = settings.num_workers
    if not workers:
        return
    prefetched = PREFETCHED_BATCHES_STREAMING if settings.streaming else PREFETCHED_BATCHES
    of_rank = (workers * prefetched + BATCHES_IN_USE) * batch_bytes(settings)
    for node, ranks in group(about["node"] for about in described):
        need, free = len(ranks) * of_rank, described[ranks[0]]["shared"]
        if need > free:
            what = f"{amount(free)} free, what {len(ranks) * workers} data workers read ahead takes {amount(need)}"
            advice = "give the container more (docker run --shm-size=1g), or --num-workers 0"
            raise base.UserError(f"--num-workers {workers}: {SHARED_MEMORY} of {node}: {what}; {advice}", 1)


def check_staging(settings: flags.Settings, staged: float, at_rest: float, described: list[dict]) -> Iterator[str]:
    """The node that lacks most host memory for the copies from which its ranks save in the background: `staged` bytes a
    rank, beside what the ranks hold now and the `at_rest` bytes that each will hold of model and optimizer. Without
    --checkpoint-interval there is no copy, as the run waits for all other saves."""
    if not settings.saves_beside():
        return
    nodes = []
    for node, ranks in group(about["node"] for about in described):
        held = sum(described[rank]["resident"] + at_rest for rank in ranks)
        allowed = min(described[rank]["host_memory"] for rank in ranks)
        nodes.append((allowed - held - len(ranks) * staged, node, len(ranks), held, allowed))
    missing, node, count, held, allowed = min(nodes)
    if missing < 0:
        need = f"the copies of {base.counted(count, 'rank')} on {node} take {amount(count * staged)}"
        what = f"{need}, with {amount(held)} for all else there are {amount(allowed)}: the run waits for each save"
        yield f"--async-checkpoint: {what}; give the job more host memory to save beside the training"


def check_disk(
    settings: flags.Settings, parameters: int, each: ParameterBytes, folder: pathlib.Path
) -> tuple[list[str], bool]:
    """(warnings, whether the state after the last step has no room): of a disk without room for the checkpoints that
    are kept, for the last state, or for one that a signal asks for.

    Raises:
        UserError: a flag asks for checkpoints and not even one has room, or the export has none.
    """
    # what a killed save left is removed before the first save
    left_over = sum(file.stat().st_size for part in base.unfinished_checkpoints(folder) for file in part.glob("*"))
    free, checkpoint = free_bytes(folder) + left_over, parameters * each.in_checkpoint
    missing = max(0, settings.keep_checkpoints + 1 - len(base.complete_checkpoints(folder)))
    have = f"a checkpoint takes {amount(checkpoint)} ({parameters:,} parameters), {folder} has {amount(free)} free"
    warnings, lacks_disk = [], False
    if checkpoint > free and (settings.checkpoint_interval or settings.final_checkpoint):
        raise base.UserError(f"--output-dir: {have}; name another disk, or make room", 1)
    if settings.checkpoint_interval and missing * checkpoint > free:
        what = f"{settings.keep_checkpoints} that are kept and the next one take {amount(missing * checkpoint)}"
        warnings.append(f"--output-dir: {have}: {what}; make room, or give a smaller --keep-checkpoints")
    elif checkpoint > free and settings.keeps_last():
        lacks_disk = True
        warnings.append(f"--output-dir: {have}: the last state will not be kept; make room")
    elif checkpoint > free:
        warnings.append(f"--output-dir: {have}: SIGTERM would end this run without saving; make room")
    if settings.export:
        weights, room = parameters * each.weight, free_bytes(pathlib.Path(settings.export))
        if weights > room:
            problem = f"it takes {amount(weights)}, there are {amount(room)} free"
            raise base.UserError(f"--export {settings.export}: {problem}; name another disk, or make room", 1)
    return warnings, lacks_disk
