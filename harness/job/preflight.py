"""Preflight: what would end a run late is looked for before it trains: memory, shared memory, disk, versions that
differ, a GPU that others use. Every rank looks at its own machine. Each finding is a line with what to do: an error
where the run cannot succeed, else a warning."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import shutil
import socket
from typing import TYPE_CHECKING

import psutil

from harness import base, flags
from harness.job import host, terminal

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFETCHED_BATCHES = 2  # that a data worker reads ahead
BATCHES_IN_USE = 2  # that the training holds beside them
FOREIGN_MEMORY = base.GIB  # bytes of a GPU that other processes may hold without a warning


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """Bytes that one parameter of a model takes, by what is kept of it."""

    weight: int
    states: float  # of the optimizer, in memory; an average where parameters differ
    saved_states: float  # of the optimizer, in a checkpoint

    @property
    def at_rest(self) -> float:
        """In memory: the parameter, its gradient and its optimizer states."""
        return 2 * self.weight + self.states

    @property
    def in_checkpoint(self) -> float:
        return self.weight + self.saved_states


@dataclasses.dataclass
class Findings:
    """What a rank found on its machine; below 1 kB when pickled, as each of a thousand ranks gets those of all."""

    name: str  # of the rank, such as `rank 3 (node-b, pid 411)`
    node: str
    versions: dict[str, str]
    error: base.UserError | None = None
    taken_gpu: str = ""  # a warning
    lacks_memory: bool = False  # there is no room for copies of what it saves


def check_machine(
    settings: flags.Settings,
    parameters: int,
    each: ParameterBytes,
    mesh: DeviceMesh,
    device: torch.device,
    folder: pathlib.Path,
    step: int,
) -> flags.Settings:
    """Runs all checks once, before the model is made; every rank calls this, rank 0 warns.

    Args:
        parameters: how many the model has.
        each: bytes that one of them takes.
        step: of the checkpoint from which the run goes on; a run that is done saves nothing.

    Returns the settings, without the last state or copies where the disk or a host's memory has no room for them.

    Raises:
        UserError: the run cannot succeed; on every rank.
    """
    own, trains, of_rank = describe(device), step < settings.num_steps, parameters / mesh["shard"].size()
    at_rest = of_rank * each.at_rest if device.type == "cpu" or settings.cpu_offload else 0.0
    try:
        check_memory(settings, parameters, each, at_rest)
        check_shared_memory(settings)
    except base.UserError as error:
        own.error = error
    if trains and settings.saves_beside():
        of_process = psutil.Process().memory_info().rss + at_rest + of_rank * each.in_checkpoint
        own.lacks_memory = host.ranks_here() * of_process > host.memory()
    everyone: list[Findings] = base.of_all_ranks(own)
    for findings in everyone:
        if findings.error:
            raise findings.error
    warnings = compare_versions(everyone) + [findings.taken_gpu for findings in everyone if findings.taken_gpu]
    if spread := describe_spread(settings, mesh):
        warnings.append(spread)
    changes = {}
    lacks_memory = [findings.name for findings in everyone if findings.lacks_memory]
    if lacks_memory:
        problem = f"{lacks_memory[0]} has no host memory for copies of a checkpoint: the run waits for each save"
        warnings.append(f"--async-checkpoint: {problem}; give the job more to save beside the training")
        changes["async_checkpoint"] = False
    if trains:
        of_disk, has_room = base.on_main_rank(lambda: check_disk(settings, parameters, each, folder))
        warnings += of_disk
        if not has_room:
            changes["final_checkpoint"] = False
    for warning in warnings:
        terminal.warn(warning)
    return dataclasses.replace(settings, **changes)


# ---- Versions, and the GPU -------------------------------------------------------------------------------------------


def describe(device: torch.device) -> Findings:
    """This rank, the versions of what it runs, and whether others use its GPU."""
    import torch

    node = socket.gethostname()
    name = f"rank {os.environ.get('RANK', 0)} ({node}, pid {os.getpid()})"
    found = Findings(name, node, base.package_versions() | {"program": checksum()})
    if device.type == "cuda":
        found.versions |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cuda": torch.version.cuda or ""}
        found.taken_gpu = describe_taken(name, holders_of_gpu())
    return found


def checksum() -> str:
    """Checksum of this program's own files, to tell whether all ranks run the same."""
    digest = hashlib.sha256()
    for path in (base.ROOT / "train_fsdp.py", base.ROOT / "utils.py", *sorted((base.ROOT / "harness").rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def compare_versions(everyone: list[Findings]) -> list[str]:
    """A line for each version that is another than rank 0's, by the first rank of each node that has it."""
    first = everyone[0]
    lines: dict[tuple, str] = {}
    for other in everyone[1:]:
        for name in first.versions | other.versions:
            version, usual = (findings.versions.get(name) or "missing" for findings in (other, first))
            if version != usual:
                line = f"{other.name}: {name} {version}, but {usual} on {first.name}; give all ranks the same"
                lines.setdefault((other.node, name, version), line)
    return [*lines.values()]


def describe_spread(settings: flags.Settings, mesh: DeviceMesh) -> str:
    """The warning of a shard group that spans several nodes of several ranks, by what the launcher says; empty for any
    other, and where --dp-replicate-size was given."""
    shards, of_node = mesh["shard"].size(), host.ranks_here()
    if of_node == 1 or shards <= of_node or "dp_replicate_size" in settings.given:
        return ""
    nodes = shards // of_node
    problem = f"the shards are spread over {nodes} nodes, so every all-gather crosses the network between them"
    advice = f"{nodes} keeps them inside a node, where its {of_node} ranks hold the model; 1 says that they do not"
    return f"--dp-replicate-size: {problem}; {advice}"


def holders_of_gpu() -> dict[int, int]:
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


def describe_taken(name: str, holders: dict[int, int]) -> str:
    """The warning of a rank on whose GPU other processes hold memory; empty where it is little."""
    taken = sum(holders.values())
    if taken <= FOREIGN_MEMORY:
        return ""
    held = f"{taken / base.GIB:.1f} GiB of its GPU are held by others (pid {', '.join(map(str, [*holders][:4]))})"
    return f"{name}: {held}; end them, or leave this GPU out by CUDA_VISIBLE_DEVICES"


# ---- Memory ----------------------------------------------------------------------------------------------------------


def amount(size: float) -> str:
    """Bytes as GB or MB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def check_memory(settings: flags.Settings, parameters: int, each: ParameterBytes, at_rest: float) -> None:
    """Raises a UserError where the parameters, gradients, and optimizer states of the ranks here, `at_rest`
    bytes each, are more than this host can hold: a lower bound of what training takes."""
    need, available = at_rest * host.ranks_here(), host.memory()
    if need > available:
        what = f"{parameters:,} parameters x {each.at_rest:.4g} bytes with their gradients and optimizer states"
        needs = f"training on the host takes {need / base.GIB:,.1f} GiB and more ({what})"
        has = f"it has {available / base.GIB:,.1f}"
        raise base.UserError(
            f"--model {settings.model}: {needs}, {has}; try --demo, or look for GPUs that hold it by --plan"
        )


def batch_bytes(settings: flags.Settings) -> int:
    """Bytes of one microbatch in shared memory: int64 tokens and labels, with --document-mask positions too."""
    tensors = 3 if settings.document_mask else 2
    return tensors * 8 * int(settings.batch_size) * settings.sequence_length


def check_shared_memory(settings: flags.Settings) -> None:
    """Raises a UserError where the batches that this node's data workers read ahead have no room in its shared memory:
    the workers would die of SIGBUS."""
    workers = settings.num_workers * host.ranks_here()
    if not workers:
        return
    batches = workers * PREFETCHED_BATCHES + BATCHES_IN_USE * host.ranks_here()
    need, free = batches * batch_bytes(settings), free_bytes(SHARED_MEMORY)
    if need > free:
        what = f"{amount(free)} free, what {workers} data workers read ahead takes {amount(need)}"
        advice = "give the container more (docker run --shm-size=1g), or --num-workers 0"
        where = f"{SHARED_MEMORY} of {socket.gethostname()}"
        raise base.UserError(f"--num-workers {settings.num_workers}: {where}: {what}; {advice}", 1)


# ---- The disk --------------------------------------------------------------------------------------------------------


def free_bytes(path: pathlib.Path) -> int:
    """Free bytes of the file system in which a path is, or would be."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(part for part in (path, *path.parents) if part.exists())).free


def check_disk(
    settings: flags.Settings, parameters: int, each: ParameterBytes, folder: pathlib.Path
) -> tuple[list[str], bool]:
    """(warnings of a disk without room for the checkpoints that are kept or for the state after the last step, whether
    it has room for one checkpoint).

    Raises:
        UserError: a flag asks for checkpoints and not even one has room, or the export has none.
    """
    # what a killed save left is removed before the first save
    left_over = sum(file.stat().st_size for part in base.unfinished_checkpoints(folder) for file in part.glob("*"))
    free, checkpoint = free_bytes(folder) + left_over, parameters * each.in_checkpoint
    missing = max(0, settings.keep_checkpoints + 1 - len(base.complete_checkpoints(folder)))
    have = f"a checkpoint takes {amount(checkpoint)} ({parameters:,} parameters), {folder} has {amount(free)} free"
    warnings, has_room = [], checkpoint <= free
    if not has_room and (settings.checkpoint_interval or settings.final_checkpoint):
        raise base.UserError(f"--output-dir: {have}; name another disk, or make room", 1)
    if settings.checkpoint_interval and missing * checkpoint > free:
        what = f"{settings.keep_checkpoints} that are kept and the next one take {amount(missing * checkpoint)}"
        warnings.append(f"--output-dir: {have}: {what}; make room, or give a smaller --keep-checkpoints")
    elif not has_room and settings.keeps_last():
        warnings.append(f"--output-dir: {have}: the last state will not be kept; make room")
    if settings.export:
        weights, room = parameters * each.weight, free_bytes(pathlib.Path(settings.export))
        if weights > room:
            problem = f"it takes {amount(weights)}, there are {amount(room)} free"
            raise base.UserError(f"--export {settings.export}: {problem}; name another disk, or make room", 1)
    return warnings, has_room
