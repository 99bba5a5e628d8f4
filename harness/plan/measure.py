"""Measure: --measure: a device's own rates, by running what a step of this configuration runs, and whether all ranks
and links are as fast as the others. Called by the script. Independent of how a plan is made of it."""

import dataclasses
import datetime
import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness import job
from harness.base.devices import GIB, wait_for_device
from harness.base.errors import UserError
from harness.base.gpu_table import find_gpu
from harness.base.ranks import of_all_ranks
from harness.base.text import first_line
from harness.flags.settings import Settings
from harness.job import columns, replace_file, say
from harness.model import collectives
from harness.model.attention import any_attention_kernel
from harness.model.configs import load_config
from harness.model.weights import layer_period
from harness.plan.calls import make_call, time_call
from harness.plan.gpus import LINK_SHARE, NETWORK_SHARE, name_of
from harness.plan.rates import LIST, Rates, file_of, merge, predict_time, sum_of, summarize
from harness.plan.recorder import StepRecorder, at_depth, record_step

PATIENCE = 20.0  # seconds for all operators of a step
MAX_SLOWDOWN = 0.1  # by which a rank may be slower than the median
MIN_LINK_SHARE = 0.75  # of what a link should give; below it a link is named


def time_operators(record: StepRecorder, device: torch.device, seconds: float) -> tuple[dict, dict]:
    """({operator: (median seconds, least, bytes)} of everything that a step runs, in about `seconds`; {operator: why it
    could not be run})."""
    timed, failed = {}, {}
    working_set = max(peak.sum() for key, peak in record.peaks().items() if "build" not in key)
    torch.manual_seed(0)
    with torch.no_grad():
        for operator, example in record.examples.items():
            job.enter_phase("measure")
            try:
                call = make_call(operator, *example, device, working_set)
                median, least = time_call(call, device, seconds / len(record.examples))
                timed[operator] = median, least, call.nbytes
            except (RuntimeError, NotImplementedError, IndexError) as error:  # torch.OutOfMemoryError is a RuntimeError
                failed[operator] = first_line(error)
    return timed, failed


def time_together(call: Callable, device: torch.device, repeats: int = 7) -> float:
    """Median seconds of a call on the slowest rank, after two calls for warmup."""
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        begin = time.perf_counter()
        call()
        wait_for_device()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return statistics.median(seconds[2:])


def time_collectives(record: StepRecorder, mesh: DeviceMesh) -> dict[str, list[tuple[float, float]]]:
    """Of each collective, number of ranks and of those on a node [(bytes of the whole buffer, seconds)], at the sizes
    of a step."""
    timed: dict[str, list] = {}
    world = dist.get_world_size()
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    for kind, ranks, per_node, nbytes in sorted({(*key[1:4], key[5]) for key in record.collectives}):
        if ranks == world:
            group = dist.group.WORLD
        else:
            among_replicas = kind == "all_reduce" or mesh["shard"].size() != ranks
            group = mesh["replicate" if among_replicas else "shard"].get_group()
        count = max(ranks, int(nbytes) // 4 // ranks * ranks)  # of float32
        whole, part = torch.ones(count, device=device), torch.ones(count // ranks, device=device)
        if kind == "all_gather":
            call = functools.partial(collectives.all_gather, whole, part, group)
        elif kind == "reduce_scatter":
            call = functools.partial(collectives.reduce_scatter, part, whole, group, dist.ReduceOp.SUM)
        elif kind == "all_reduce":
            call = functools.partial(dist.all_reduce, whole, group=group)
        elif kind == "all_to_all":
            call = functools.partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
        else:
            continue
        timed.setdefault(f"{kind} {ranks} {per_node}", []).append((nbytes, time_together(call, device)))
    return timed


def time_step(settings: Settings, recipe, config, mesh: DeviceMesh, steps: int = 5) -> float:
    """Median seconds of a real optimizer step on random tokens, on the slowest rank, after two for warmup."""
    device = torch.device(mesh.device_type)
    model = recipe.build_model(settings, config, mesh)
    optimizer = recipe.build_optimizer(settings, model)
    shape = settings.batch_size, settings.sequence_length
    tokens = torch.randint(config.get_text_config().vocab_size, shape, device=device)
    batches = itertools.repeat({"input_ids": tokens, "labels": tokens})
    tracker = recipe.make_tracker(0, dist.get_world_size(), 0)
    step = functools.partial(recipe.train_step, settings, model, optimizer, batches, tracker)
    return time_together(step, device, steps)


def small(settings: Settings) -> Settings:
    """The demo model on so few tokens that a step is hardly more than what the host does for it."""
    plain = {"model": "demo", "sequence_length": 16, "batch_size": 1, "gradient_accumulation_steps": 1}
    plain |= {"compile": False, "activation_checkpointing": "none", "activation_memory_budget": None, "zero_stage": 3}
    plain |= {"precision": "bf16", "fp8_recipe": None, "optimizer": "adamw", "attention": "sdpa", "fused_loss": True}
    return dataclasses.replace(settings, **plain, dp_replicate_size=1, cpu_offload=False, document_mask=False)


def seconds_of(record: StepRecorder, timed: dict) -> float:
    """Seconds of a recorded step's operators, one after the other."""
    total = 0.0
    for (phase, operator), times in record.operators.items():
        if operator in timed:
            median, _, nbytes = timed[operator]
            if operator.shape == LIST:
                times = record.counts["list_bytes", phase, operator.kind] / nbytes
            total += median * times
    return total


def time_host(record: StepRecorder, settings: Settings, recipe, mesh: DeviceMesh) -> float:
    """Seconds that the host needs for an operator: on a CPU beside the operator itself, for modules, autograd and
    FSDP's hooks; on a GPU all that it needs, as its launches run ahead. From steps of the `small` model."""
    device = torch.device(mesh.device_type)
    operators = 0.0
    if device.type == "cpu":
        timed, _ = time_operators(record, device, 3.0)
        operators = seconds_of(record, timed)
    with any_attention_kernel():  # the run's own may not take so short a sequence
        step = time_step(settings, recipe, load_config("demo"), mesh, steps=15)
    return max(0.0, step - operators) / sum_of(record.counts, "dispatches")


def slow_ranks(seconds: list[float], ranks: list[tuple[str, int]]) -> list[str]:
    """A line for each rank that is slower than the median by more than MAX_SLOWDOWN, with host and pid."""
    median = statistics.median(seconds)
    lines = []
    for rank, (host, pid) in enumerate(ranks):
        slowdown = seconds[rank] / median - 1
        if seconds[rank] > (1 + MAX_SLOWDOWN) * median:
            lines.append(f"rank {rank} ({host}, pid {pid}): {100 * slowdown:.0f} % slower than the median of the ranks")
    return lines


def time_links(device: torch.device) -> list[float]:
    """GB/s from each rank to the next one in the ring, one link after the other so that none shares anything."""
    world, rank, speeds = dist.get_world_size(), dist.get_rank(), []
    message = torch.ones((2**26 if device.type == "cuda" else 2**22) // 4, device=device)
    for sender in range(world):
        receiver = (sender + 1) % world

        def send(sender=sender, receiver=receiver):
            if rank == sender:
                dist.send(message, receiver)
            elif rank == receiver:
                dist.recv(message, sender)

        speeds.append(message.nbytes / time_together(send, device, 5) / 1e9)
    return speeds


def slow_links(speeds: list[float], ranks: list[tuple[str, int]], expected: dict[str, float]) -> list[str]:
    """A line for each link far under what it should give: `expected` for links within a node and between nodes, in
    GB/s, where it is known, else the median of the links of the kind."""
    world = len(ranks)
    lines: list[str] = []
    kinds: dict[str, list[tuple[int, float]]] = {}
    for sender, speed in enumerate(speeds):
        host, next_host = ranks[sender][0], ranks[(sender + 1) % world][0]
        kind = "in a node" if host == next_host else "between nodes"
        kinds.setdefault(kind, []).append((sender, speed))
    for kind, links in kinds.items():
        should = expected.get(kind) or statistics.median(speed for _, speed in links)
        for sender, speed in links:
            if speed < MIN_LINK_SHARE * should:
                receiver = (sender + 1) % world
                (host, pid), (next_host, next_pid) = ranks[sender], ranks[receiver]
                ends = f"rank {sender} ({host}, pid {pid}) to rank {receiver} ({next_host}, pid {next_pid})"
                lines.append(f"link from {ends}: {speed:.3g} GB/s, {should:.3g} expected of a link {kind}")
    return lines


def expected_speeds(device: str) -> dict[str, float]:
    """GB/s that links of this GPU should give; empty where they are not known."""
    gpu = find_gpu(device)
    if not gpu:
        return {}
    return {"in a node": gpu.link * LINK_SHARE, "between nodes": gpu.network * NETWORK_SHARE}


def describe_device(device: torch.device, local_ranks: int) -> dict:
    """What a rates file says of where its figures are from."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
    else:
        memory = psutil.virtual_memory().total / GIB / local_ranks
    return {
        "device": name_of(device),
        "memory_gib": memory,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "threads": None if is_cuda else torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def make_section(of_ranks: list[tuple[float, float, dict]], timed: dict, of_collectives: dict) -> dict:
    """A section of a rates file: of each operator the median of the ranks. `of_ranks` has of each rank the seconds of
    all operators, those of the host for one, and what `time_operators` found; `timed` is what this rank found."""
    operators: dict[str, list] = {}
    for operator, (_, _, nbytes) in timed.items():
        medians = [of_rank[operator][0] for *_, of_rank in of_ranks if operator in of_rank]
        point = [operator.shape, operator.flops, nbytes, statistics.median(medians)]
        operators.setdefault(operator.kind, []).append(point)
    least = min(seconds for points in operators.values() for *_, seconds in points)
    return {
        "operators": operators,
        "collectives": of_collectives,
        "rates": summarize(
            (operator._replace(nbytes=nbytes), median) for operator, (median, _, nbytes) in timed.items()
        ),
        "host_us": 1e6 * statistics.median(host for _, host, _ in of_ranks),
        "launch_us": 1e6 * least,
        "wait_us": 0.0,
    }


def measure(settings: Settings, recipe, ranks) -> None:
    """--measure: times this device with what a step of `settings` runs, and writes the file that a plan reads. The
    figures of a file that is there by the same versions stay, but for those that are measured again."""
    began, world = time.monotonic(), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    config = load_config(settings.model)
    settings = dataclasses.replace(recipe.resolve(settings, config), gpus_per_node=local)
    depth = min(layer_period(config)[1] + 1, config.get_text_config().num_hidden_layers)
    # fake process groups, before the real one is there
    on_gpu = torch.cuda.is_available()
    record = record_step(settings, recipe, config, world, depth, 1, on_gpu)
    tiny, demo = small(settings), load_config("demo")
    tiny_record = record_step(tiny, recipe, demo, 1, demo.num_hidden_layers, 1, on_gpu)

    device = ranks.meet()
    mesh = recipe.build_mesh(settings, device)
    about = describe_device(device, local)
    say(columns({"measure": f"{len(record.examples)} operators of {settings.model} on {world} x {about['device']}"}))
    timed, failed = time_operators(record, device, PATIENCE)
    mesh_of_one = init_device_mesh(device.type, (world, 1), mesh_dim_names=("world", "shard"))["shard"]
    host = time_host(tiny_record, tiny, recipe, mesh_of_one)
    of_collectives = time_collectives(record, mesh)
    step = time_step(settings, recipe, at_depth(config, depth), mesh, steps=3)
    links = time_links(device) if world > 1 else []
    of_ranks = of_all_ranks((sum(least for _, least, _ in timed.values()), host, timed))

    slow = slow_ranks([seconds for seconds, *_ in of_ranks], job.RANKS)
    expected = expected_speeds(about["device"]) if device.type == "cuda" else {}
    slow += slow_links(links, job.RANKS, expected)
    section = make_section(of_ranks, timed, of_collectives)
    rates = Rates(about["device"], 0, None, {}, device.type == "cuda", section)
    planned = predict_time(record.counts, record.operators, record.parts, rates)["step"]
    if world > 1 and not rates.on_gpu:  # what a real step takes beyond its parts, ranks spend on waiting
        section["wait_us"] = 1e6 * max(0.0, step - planned) / sum_of(record.counts, "calls")
    path = file_of(about["device"], settings.cache_dir)
    contents = merge(path, about | {"sections": {str(local): section}})
    if dist.get_rank() == 0:
        write(path, contents)
    say(columns(describe(section, links, failed, step, planned, depth) | {"written": f"{path}, which --plan reads"}))
    for line in slow:
        say(f"slow       {line}")
    say(f"done       {time.monotonic() - began:.0f} s")


def write(path: pathlib.Path, contents: dict) -> None:
    """Replaces a rates file at once; a UserError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(contents, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--cache-dir: {path} cannot be written ({error.strerror})", 1) from error


def describe(
    section: dict, links: list[float], failed: dict, step: float, planned: float, depth: int
) -> dict[str, str]:
    """What was measured, as lines of the console: title and text."""
    units = {"gb_per_s": "GB/s", "tflops": "TFLOPS"}
    rates = []
    for name, rate in section["rates"].items():
        unit_of_work, _, unit = name.partition("_")
        rates.append(f"{unit_of_work} {rate:,.3g} {units[unit]}")
    lines = {"rates": ", ".join(rates) + f", host {section['host_us']:.1f} us an operator"}
    for name, points in section["collectives"].items():
        kind, ranks, _ = name.split()
        speeds = (f"{nbytes / 1e6:,.3g} MB {1000 * seconds:.3g} ms" for nbytes, seconds in points)
        lines[kind.replace("_", "-")[:10]] = f"{ranks} ranks: {', '.join(speeds)}"
    if links:
        lines["links"] = f"{min(links):.3g} to {max(links):.3g} GB/s from rank to rank, one at a time"
    if failed:
        operator, why = next(iter(failed.items()))
        lines["not run"] = f"{len(failed)} operators, of them {operator.kind} {operator.shape} ({why})"
    difference = f"{1000 * planned:,.1f} ms by these rates ({100 * (planned / step - 1):+.0f} %)"
    if section["wait_us"] > 0:
        difference += ", the rest ranks wait for each other"
    return lines | {"check": f"a real step of {depth} layers took {1000 * step:,.1f} ms; {difference}"}
