"""Preflight: the checks before a run trains, of all ranks together: their versions and GPUs, memory that others hold,
the links and nodes of a shard group, threads, shared memory, the disk. Called by the script. Each finding is a
line with what to do: an error where the run cannot succeed, else a warning. Independent of the training loop."""

import collections
import dataclasses
import hashlib
import itertools
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

from harness.base import GIB, ROOT, UserError, counted, of_all_ranks, on_main_rank, package_versions, saved
from harness.flags import Settings, as_flags
from harness.job import driver, host, terminal
from harness.job.host import ParameterBytes

SHARED_MEMORY = "/dev/shm"
# Of each rank of a node, where GPUs reach each other through shared memory: NCCL's segments of 9,637,888 bytes
# (NVIDIA/nccl#342), one for each of two channels (NVIDIA/nccl#1518).
NCCL_SHARED = 2 * 9_637_888
PREFETCHED_BATCHES = 2  # that a data worker reads ahead
PREFETCHED_BATCHES_STREAMING = 16
BATCHES_IN_USE = 2  # that the training holds beside them
FOREIGN_MEMORY = GIB  # bytes of a GPU that other processes may hold without a warning
MIN_OPEN_FILES = 1024  # the soft limit of most systems, whose hard limit is far higher
MAX_SHARE_AT_REST = 0.6  # of a GPU's memory, for weights, gradients and optimizer; activations need the rest
MAX_NAMES = 4  # ranks that a line names
PAGE = 4096  # bytes


# ---- What a rank reports of itself -----------------------------------------------------------------------------------


def describe(device: torch.device) -> dict[str, Any]:
    """This rank's machine and GPU, below 1 kB when pickled, as each of a thousand ranks gets those of all."""
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id")  # two hosts may have the same name
    node = socket.gethostname(), boot_id.read_text()[:8] if boot_id.exists() else ""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    about = {
        "node": node,
        "pid": os.getpid(),
        "versions": package_versions() | {"program": checksum()},
        "threads": torch.get_num_threads(),
        "cores": host.cores(),
        "affinity": f"{affinity[0]}-{affinity[-1]}/{len(affinity)}",
        "shared": free_bytes(SHARED_MEMORY),
        "files": host.raise_file_limit(),
        "host_memory": host.memory(),
        "resident": psutil.Process().memory_info().rss,
    }
    if device.type == "cuda":
        properties, known = torch.cuda.get_device_properties(device), driver.describe()
        about["versions"] |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cuda": torch.version.cuda}
        if "driver" in known:
            about["versions"]["driver"] = known.pop("driver")
        holders = known.pop("holders", [])
        taken = sum(size for _, size in holders)
        about |= {"taken": taken, "holders": [pid for pid, _ in holders][:MAX_NAMES]} | known
        about |= {"gpu": properties.name, "memory": properties.total_memory}
    return about


def checksum() -> str:
    """Checksum of this program's own files, to tell whether all ranks run the same."""
    digest = hashlib.sha256()
    for path in (ROOT / "train_fsdp.py", ROOT / "utils.py", *sorted((ROOT / "harness").rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def free_bytes(path: str | pathlib.Path) -> int | None:
    """Free bytes of the file system in which a path is, or would be; None where that is not known."""
    try:
        return shutil.disk_usage(existing_part(pathlib.Path(path))).free
    except OSError:
        return None


def existing_part(path: pathlib.Path) -> pathlib.Path:
    """A path, or the nearest of its parents that exists."""
    path = path.absolute()
    for part in (path, *path.parents):
        if part.exists():
            return part
    return path


# ---- The checks: each yields lines, by what all ranks reported -------------------------------------------------------


def names(ranks: Iterable[int], described: list[dict]) -> str:
    """`rank 3 (node-b, pid 411)`; of many ranks the first ones, and how many more there are."""
    ranks = [*ranks]
    first = [f"rank {rank} ({described[rank]['node'][0]}, pid {described[rank]['pid']})" for rank in ranks[:MAX_NAMES]]
    text = ", ".join(first)
    if len(ranks) > MAX_NAMES:
        text += f" and {len(ranks) - MAX_NAMES} more"
    return text


def amount(size: float) -> str:
    """Bytes as GB or MB."""
    return f"{size / 1e9:,.3g} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"


def gib(size: float) -> str:
    """Bytes as GiB or MiB."""
    return f"{size / GIB:,.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:,.3g} MiB"


def group(values: Iterable) -> list[tuple[Any, list[int]]]:
    """(value, the ranks that have it) for each value, the most frequent first."""
    ranks = collections.defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return sorted(ranks.items(), key=lambda item: -len(item[1]))


def check_versions(described: list[dict]) -> Iterator[str]:
    """Ranks whose program, packages or driver are of another version than most ranks'."""
    for name in dict.fromkeys(name for about in described for name in about["versions"]):
        (usual, most), *others = group(about["versions"].get(name) for about in described)
        for version, ranks in others:
            has = f"{names(ranks, described)}: {name} {version or 'missing'}"
            usually = f"{usual or 'missing'} on {names(most[:1], described)}"
            if len(most) > 1:
                usually += f" and {len(most) - 1} more"
            advice = "start all ranks from the same files" if name == "program" else "install the same on every node"
            yield f"{has}, but {usually}; {advice}"


def check_gpus(described: list[dict]) -> Iterator[str]:
    """GPUs of another kind, or of more than 2 % other memory."""
    kinds = [(about.get("gpu"), about.get("memory", 0)) for about in described]
    (usual, _), *_ = group(kinds)
    for (name, memory), ranks in group(kinds):
        if name != usual[0] or abs(memory - usual[1]) > 0.02 * usual[1]:
            what = f"{names(ranks, described)}: {name} with {memory / GIB:.1f} GiB, the others have {usual[0]} with"
            yield f"{what} {usual[1] / GIB:.1f}; the slowest sets the pace and the smallest the memory: leave it out"


def check_taken(described: list[dict]) -> Iterator[str]:
    """Memory that other processes hold, by the driver's list of them: a line for each of the fullest GPUs."""
    full = [rank for rank, about in enumerate(described) if about.get("taken", 0) > FOREIGN_MEMORY]
    full.sort(key=lambda rank: -described[rank]["taken"])
    for place, rank in enumerate(full[:MAX_NAMES], 1):
        about, others = described[rank], len(full) - MAX_NAMES
        pids = ", ".join(map(str, about["holders"]))
        held = f"{about['taken'] / GIB:.1f} of {about['memory'] / GIB:.1f} GiB of its GPU are held by others"
        advice = "end them, or leave this GPU out by CUDA_VISIBLE_DEVICES"
        if place == MAX_NAMES and others > 0:
            advice += f"; {others} more GPUs are like that"
        yield f"{names([rank], described)}: {held} (pid {pids}); {advice}"


def check_threads(settings: Settings, described: list[dict], computes: bool) -> Iterator[str]:
    """Nodes with more threads or processes than cores. `computes`: the CPU does the training, or the optimizer's part
    of it; one thread a rank is always allowed. On a GPU a rank needs a core, and one for each data worker."""
    first_ranks: dict[str, list[int]] = {}  # of the nodes with a problem, by the problem in words
    for _, ranks in group((about["node"], about["affinity"]) for about in described):
        cores, workers = described[ranks[0]]["cores"], settings.num_workers
        threads = sum(described[rank]["threads"] for rank in ranks)
        if computes and threads > max(cores, len(ranks)):
            what = f"{counted(len(ranks), 'rank')} with {threads} threads on {counted(cores, 'core')}"
            advice = f"leave OMP_NUM_THREADS unset, or set it to {max(1, cores // len(ranks))}"
            problem = f"{what}, which wait for each other; {advice}"
            first_ranks.setdefault(problem, []).append(ranks[0])
        elif not computes and len(ranks) * (1 + workers) > cores:
            what = f"{counted(len(ranks), 'rank')} and {len(ranks) * workers} data workers on {counted(cores, 'core')}"
            problem = f"{what}; give the job more of them, or fewer --num-workers"
            first_ranks.setdefault(problem, []).append(ranks[0])
    for problem, ranks in first_ranks.items():
        yield f"{names(ranks, described)}: {problem}"


def check_files(described: list[dict]) -> Iterator[str]:
    """The rank that may open the fewest files at a time, where that is less than most systems allow."""
    least, rank = min((about["files"], rank) for rank, about in enumerate(described))
    if least < MIN_OPEN_FILES:
        what = f"{names([rank], described)}: {least} open files are allowed, which data workers and shards may exceed"
        yield f"{what}; raise the hard limit (ulimit -Hn, docker run --ulimit nofile=65536)"


def batch_bytes(settings: Settings) -> int:
    """Bytes of one microbatch in shared memory: int64 tokens and labels, with --document-mask positions too."""
    tensors = 3 if settings.document_mask else 2
    tokens = settings.batch_size * settings.sequence_length
    pages = math.ceil(8 * tokens / PAGE)
    return tensors * pages * PAGE


def check_shared_memory(settings: Settings, described: list[dict]) -> Iterator[str]:
    """The node that has the least shared memory for its needs.

    Raises:
        UserError: the batches that data workers read ahead have no room; the workers would die of SIGBUS.
    """
    workers, nodes = settings.num_workers, []
    prefetched = PREFETCHED_BATCHES_STREAMING if settings.streaming else PREFETCHED_BATCHES
    for _, ranks in group(about["node"] for about in described):
        about, batches = described[ranks[0]], len(ranks) * (workers * prefetched + BATCHES_IN_USE)
        data = batches * batch_bytes(settings) if workers else 0
        nccl = len(ranks) * NCCL_SHARED if "gpu" in about and len(ranks) > 1 else 0
        if about["shared"] is not None:
            nodes.append((about["shared"] - data - nccl, len(ranks), about, data, nccl))
    short = [node for node in nodes if node[0] < 0]
    if not short:
        return
    _, count, about, data, nccl = min(short, key=lambda node: node[0])
    where = f"{SHARED_MEMORY} of {about['node'][0]}"
    if len(short) > 1:
        where += f" and {len(short) - 1} more nodes"
    where, advice = f"{where}: {amount(about['shared'])} free", "give the container more (docker run --shm-size=1g)"
    if data > about["shared"]:
        need = f"what {count * workers} data workers read ahead takes {amount(data)}"
        raise UserError(f"--num-workers {workers}: {where}, {need}; {advice}, or --num-workers 0", 1)
    need = f"{amount(data)} for data workers and {amount(nccl)} for NCCL where GPUs have no other way"
    yield f"{where}, {counted(count, 'rank')} may need {need}; {advice}"


def check_staging(settings: Settings, staged: float, at_rest: float, described: list[dict]) -> Iterator[str]:
    """The node that lacks most host memory for the copies from which its ranks save in the background: `staged` bytes a
    rank, beside what the ranks hold now and the `at_rest` bytes that each will hold of model and optimizer. Without
    --checkpoint-interval there is no copy, as the run waits for all other saves."""
    if not settings.saves_beside():
        return
    nodes = []
    for _, ranks in group(about["node"] for about in described):
        held = sum(described[rank]["resident"] + at_rest for rank in ranks)
        allowed = min(described[rank]["host_memory"] for rank in ranks)
        nodes.append((allowed - held - len(ranks) * staged, ranks, held, allowed))
    missing, ranks, held, allowed = min(nodes, key=lambda node: node[0])
    if missing < 0:
        node = described[ranks[0]]["node"][0]
        need = f"the copies of {counted(len(ranks), 'rank')} on {node} take {amount(len(ranks) * staged)}"
        have = f"with {amount(held)} for all else there are {amount(allowed)}"
        what = f"{need}, {have}: the run waits for each save"
        yield f"--async-checkpoint: {what}; give the job more host memory to save beside the training"


# ---- Nodes and links -------------------------------------------------------------------------------------------------


def check_nodes(settings: Settings, parameters: int, each: ParameterBytes, described: list[dict]) -> Iterator[str]:
    """A shard group across nodes where the GPUs of one node would hold a replica. Whether replicas are faster depends
    on the network, which a plan takes into account."""
    nodes = collections.Counter(about["node"] for about in described)
    world, per_node = len(described), min(nodes.values())
    replicas = world if settings.zero_stage == 0 else settings.dp_replicate_size
    shards = world // replicas
    if shards <= per_node or max(nodes.values()) != per_node:
        return
    at_rest = each.at_rest * parameters / per_node
    memory = min(about.get("memory", 0) for about in described)
    if memory and not settings.cpu_offload and at_rest > MAX_SHARE_AT_REST * memory:
        return
    what = f"a shard group spans {shards // per_node} nodes, and one node would hold a replica ({gib(at_rest)} a rank)"
    hybrid = {"plan": True, "plan_gpus": world, "gpus_per_node": per_node, "dp_replicate_size": len(nodes)}
    yield f"--dp-replicate-size {replicas}: {what}; {as_flags(hybrid)} and the other flags say what HSDP gains"


def check_links(described: list[dict], shards: int) -> Iterator[str]:
    """A shard group of which some GPUs have NVLink to each other, and reach the others only through the host."""
    if any("links" not in about for about in described):
        return
    places = {(about["node"], about["index"]): rank for rank, about in enumerate(described)}
    islands = {rank: {rank} for rank in range(len(described))}  # connected by NVLink
    for rank, about in enumerate(described):
        others = [places[about["node"], index] for index in about["links"] if (about["node"], index) in places]
        for other in others:
            if islands[other] is not islands[rank]:
                islands[rank] |= islands[other]
                islands |= dict.fromkeys(islands[other], islands[rank])
    for first in range(0, len(described), shards):
        node = [rank for rank, about in enumerate(described) if about["node"] == described[first]["node"]]
        inside = [rank for rank in node if rank in range(first, first + shards)]
        parts = sorted({tuple(sorted(islands[rank] & {*node})) for rank in node})
        if all(islands[rank] >= {*inside} for rank in inside) or all(len(part) == 1 for part in parts):
            continue
        size = min(len(part) for part in parts)
        linked = gpu_list([rank for part in parts for rank in part], described)
        now = gpu_list(node, described)
        advice = []
        if shards > size:
            advice.append(f"--dp-replicate-size {len(described) // size}")
        if linked != now:
            advice.append(f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={linked}")
        spans = " | ".join("+".join(map(str, part)) for part in parts)
        what = f"the shard group of {names([first], described)} leaves NVLink, which connects ranks {spans}"
        if advice:
            what += f"; with {' and '.join(advice)} a group stays on it"
        yield what
        return


def gpu_list(ranks: Iterable[int], described: list[dict]) -> str:
    """The numbers of these ranks' GPUs in their node, as CUDA_VISIBLE_DEVICES takes them."""
    return ",".join(str(described[rank]["index"]) for rank in ranks)


# ---- The disk --------------------------------------------------------------------------------------------------------


def check_disk(settings: Settings, parameters: int, each: ParameterBytes, folder: pathlib.Path) -> Iterator[str]:
    """A disk without room for the checkpoints that are kept, for the last state, or for one that a signal asks for.

    Raises:
        UserError: not even one checkpoint has room, or the export has none.
    """
    checkpoint, free, keep = parameters * each.in_checkpoint, free_bytes(folder), settings.keep_checkpoints
    complete = len(saved.complete(folder))
    weights = parameters * each.weight if settings.export else 0
    target = pathlib.Path(settings.export or folder).expanduser()
    same = weights > 0 and device_of(target) == device_of(folder)
    size = f"a checkpoint takes {amount(checkpoint)} ({parameters:,} parameters)"
    if free is not None:
        free += left_over_bytes(folder)
        have = f"{folder} has {amount(free)} free"
        wanted = max(0, keep + 1 - complete) * checkpoint + (weights if same else 0)
        if (settings.checkpoint_interval or settings.final_checkpoint) and checkpoint > free:
            raise UserError(f"--output-dir: {size}, {have}; name another disk, or make room", 1)
        if settings.checkpoint_interval and wanted > free:
            more = f" and the export of {amount(weights)}" if same else ""
            what = f"{size}, {have}: {keep} that are kept, the next one that is written{more} take {amount(wanted)}"
            yield f"--output-dir: {what}; make room, or give a smaller --keep-checkpoints"
        elif has_no_room_for_last(settings, parameters, each, folder):
            beside = f" beside the export of {amount(weights)}" if same and checkpoint <= free else ""
            yield f"--output-dir: {size}, {have}{beside}: the last state will not be kept; make room"
        elif not settings.checkpoint_interval and checkpoint > free:
            yield f"--output-dir: {size}, {have}: SIGTERM would end this run without saving; make room"
    room = free_bytes(target) if weights else None
    if room is not None and weights > room:
        problem = f"it takes {amount(weights)}, there are {amount(room)} free"
        raise UserError(f"--export {settings.export}: {problem}; name another disk, or make room", 1)


def has_no_room_for_last(settings: Settings, parameters: int, each: ParameterBytes, folder: pathlib.Path) -> bool:
    """Whether the state after the last step, which no flag asked for, has no room beside the export."""
    if settings.checkpoint_interval or settings.final_checkpoint is not None or not settings.keeps_last():
        return False
    need, free = parameters * each.in_checkpoint, free_bytes(folder)
    if settings.export and device_of(pathlib.Path(settings.export).expanduser()) == device_of(folder):
        need += parameters * each.weight
    return free is not None and need > free + left_over_bytes(folder)


def left_over_bytes(folder: pathlib.Path) -> int:
    """Bytes of what a killed save left, which is removed before the first save."""
    return sum(file.stat().st_size for leftover in saved.leftovers(folder) for file in leftover.glob("*"))


def device_of(path: pathlib.Path) -> int:
    """The number of the disk in which a path is, or would be."""
    return existing_part(path).stat().st_dev


# ---- All of them -----------------------------------------------------------------------------------------------------


def check(
    settings: Settings,
    parameters: int,
    each: ParameterBytes,
    mesh: DeviceMesh,
    device: torch.device,
    folder: pathlib.Path,
    step: int,
) -> Settings:
    """Runs all checks once, before the model is made; every rank calls this, rank 0 judges and warns.

    Args:
        parameters: of the model.
        each: bytes that one of them takes.
        step: of the checkpoint from which the run goes on; a run that is done saves nothing.

    Returns the settings, with what a disk or a host's memory has no room for.

    Raises:
        UserError: the run cannot succeed; on every rank.
    """
    if settings.num_workers:
        host.shorten_sockets()
    described = of_all_ranks(describe(device))

    def look() -> Settings:
        computes = device.type == "cpu" or settings.cpu_offload
        shards = mesh["shard"].size()
        checks = [
            check_versions(described),
            check_gpus(described),
            check_taken(described),
            check_nodes(settings, parameters, each, described),
            check_links(described, shards),
            check_threads(settings, described, computes),
            check_shared_memory(settings, described),
            check_files(described),
        ]
        decided = settings
        if step < settings.num_steps:
            at_rest = each.at_rest * parameters / shards if computes else 0
            staged = [*check_staging(settings, each.in_checkpoint * parameters / shards, at_rest, described)]
            checks += [staged, check_disk(settings, parameters, each, folder)]
            if staged:
                decided = dataclasses.replace(decided, lacks_memory=True)
            if has_no_room_for_last(settings, parameters, each, folder):
                decided = dataclasses.replace(decided, lacks_disk=True)
        for warning in itertools.chain(*checks):
            terminal.print_error(f"train_fsdp.py: warning: {warning}")
        return decided

    return on_main_rank(look)
