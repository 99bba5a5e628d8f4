"""Measuring: --measure: a device's own rates, by running what a step of this configuration runs, and a look at whether
all ranks and links give what the others give. Called by the script. It does not know how a plan is made of it."""

import collections
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from harness.base.devices import GIB, wait_for_device
from harness.base.errors import UserError
from harness.base.gpu_table import find_gpu
from harness.base.ranks import of_all_ranks
from harness.base.text import first_line
from harness.flags.settings import Settings
from harness.job import heartbeats
from harness.job.folders import replace_file
from harness.job.printing import columns, say
from harness.job.signals import StopRequest
from harness.job.world import open_store, start_processes, stop_processes
from harness.model import collectives
from harness.model.configs import load_config
from harness.model.weights import layer_period
from harness.plan.gpus import LINK_SHARE, NETWORK_SHARE, name_of
from harness.plan.operators import moved_bytes, tensors_in
from harness.plan.rates import LIST, Operator, Rates, file_of, merge, predict_time, summarize
from harness.plan.recorder import Layout, StepRecorder, at_depth, record_step

PATIENCE = 20.0  # seconds for all operators of a step
TOLERANCE = 0.1  # by which a rank may be slower than the median
FAR_UNDER = 0.75  # of what a link should give
LARGEST = 2**28  # bytes of the parameters that an optimizer is timed with
MOST_COPIES = 2**28  # bytes of all copies of an operator's arguments
BATCH = 3e-4  # seconds between two looks at the clock, at least


def make_tensor(layout: Layout, bound: int, device: torch.device) -> torch.Tensor:
    """Random numbers laid out like that: none negative, as squares have to be; of integers any below `bound`, so that
    they are good as indices."""
    size = 1 + sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    if layout.dtype.is_floating_point:
        storage = torch.rand(max(size, 1), device=device).to(layout.dtype)
    else:
        bound = 2 if layout.dtype == torch.bool else bound
        storage = torch.randint(0, bound, (max(size, 1),), device=device).to(layout.dtype)
    return storage.as_strided(layout.shape, layout.stride)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone().as_strided(tensor.size(), tensor.stride())


def no_attention(query, key, value, *_, **__) -> tuple[torch.Tensor, ...]:
    """In the place of attention's kernel in a compiled region, as that is timed by itself: memory, and no work."""
    return torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


def no_attention_backward(_, query, key, value, *__, **___) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Call:
    """An operator with random arguments, laid out as it was recorded with; of long lists of parameters the first.

    In a step an operator's arguments are seldom in a cache, where a loop would find them, and its results go to memory
    that was not in use a moment ago: so there are as many copies as fill `working_set` bytes.
    """

    def __init__(self, operator: Operator, call, args, kwargs, device: torch.device, working_set: float):
        if operator.shape == LIST and operator.kind.startswith(("aten::_foreach", "aten::_fused")):
            sizes = [math.prod(layout.shape) * layout.dtype.itemsize for layout in args[0]]
            enough = sum(sum(sizes[:n]) < LARGEST for n in range(len(sizes)))
            args = [arg[:enough] if isinstance(arg, list | tuple) else arg for arg in args]
        self.call, self.nbytes, written = call, operator.nbytes, []
        if operator.unit == "attention":
            args, kwargs = self.choose_attention(call, args, kwargs)
        elif isinstance(call, torch.fx.GraphModule):
            for node in call.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = node.kwargs | {"device": device}
                if "scaled_dot_product" in str(node.target):
                    node.target = no_attention_backward if "backward" in str(node.target) else no_attention
            call.recompile()
            self.call = torch.compile(call, dynamic=False)
        else:
            arguments = enumerate(call._schema.arguments)
            written = [n for n, argument in arguments if argument.is_write and not argument.is_out]
        sizes = [n for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Layout) for n in leaf.shape if n > 1]

        def real(leaf):
            if isinstance(leaf, Layout):
                if "_grouped_mm" in operator.kind and not leaf.dtype.is_floating_point:  # where each expert's rows end
                    rows = args[0].shape[1 if len(args[1].shape) == 2 else 0]  # of a weight's gradient, those summed
                    ends = torch.arange(1, leaf.shape[0] + 1, device=device) * rows // leaf.shape[0]
                    return ends.to(leaf.dtype)
                return make_tensor(leaf, min(sizes, default=2), device)
            return device if isinstance(leaf, torch.device) else leaf

        first = tree_map(real, (tuple(args), kwargs))
        self.before = [copy_of(tensor) for n in written for tensor in tensors_in(first[0][n])]
        size = max(1, sum(tensor.nbytes for tensor in tensors_in(first)))
        count = max(1, min(32, math.ceil(working_set / size), int(MOST_COPIES / size)))
        self.copies = [first, *(tree_map_only(torch.Tensor, copy_of, first) for _ in range(count - 1))]
        if operator.kind.startswith("attention backward"):
            self.copies = [self.run_forward(*copy) for copy in self.copies]
        elif operator.shape == LIST:
            self.nbytes = moved_bytes(call, *first, tensors_in(self.call(*first[0], **first[1])))
        self.written, self.turn, self.results = written, 0, collections.deque(maxlen=count)

    def choose_attention(self, call, args, kwargs) -> tuple[list, dict]:
        """The device's own kernel in the place of the recorded one."""
        given = dict(zip((argument.name for argument in call._schema.arguments), args, strict=False)) | kwargs
        inputs = [given[name] for name in ("query", "key", "value")]
        options = {"is_causal": given["is_causal"], "enable_gqa": inputs[0].shape[1] != inputs[1].shape[1]}

        def forward(*inputs):
            with torch.enable_grad():
                inputs = [tensor.requires_grad_() for tensor in inputs]
                return F.scaled_dot_product_attention(*inputs, **options)

        def backward(output, inputs, gradient):
            return torch.autograd.grad(output, inputs, gradient, retain_graph=True)

        self.forward, self.call = forward, backward if "backward" in call.name() else forward
        return inputs, {}

    def run_forward(self, inputs, _) -> tuple[tuple, dict]:
        output = self.forward(*inputs)
        return (output, inputs, torch.rand_like(output)), {}

    def restore(self) -> None:
        """What the next call writes into is as it was: the exponential of an exponential is soon infinite."""
        if self.written:
            args, _ = self.copies[(self.turn + 1) % len(self.copies)]
            for tensor, before in zip(tensors_in([args[n] for n in self.written]), self.before, strict=True):
                tensor.copy_(before)

    def __call__(self) -> None:
        self.turn = (self.turn + 1) % len(self.copies)
        args, kwargs = self.copies[self.turn]
        self.results.append(self.call(*args, **kwargs))


def time_call(call: Call, device: torch.device, patience: float) -> tuple[float, float]:
    """(median, least) seconds of one call, of about `patience` seconds of calls, after a warmup."""
    cuda = device.type == "cuda"

    def batch(times: int) -> float:
        call.restore()
        if cuda:
            torch.cuda._sleep(1_000_000)  # so that the launches are ahead of the device
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        if not cuda:
            return (time.perf_counter() - begin) / times
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / times

    batch(1)
    once = max(batch(1), 1e-7)
    times = 1 if call.written else max(1, min(50, math.ceil(BATCH / once)))
    seconds = [batch(times) for _ in range(max(3, min(50, int(patience / (once * times)))))]
    return statistics.median(seconds), min(seconds)


def time_operators(record: StepRecorder, device: torch.device, seconds: float) -> tuple[dict, dict]:
    """({operator: (median seconds, least, bytes)} of everything that a step runs, in about `seconds`; {operator: why it
    could not be run})."""
    found, failed = {}, {}
    working_set = max(peak.sum() for key, peak in record.peaks().items() if "build" not in key)
    torch.manual_seed(0)
    with torch.no_grad():
        for operator, example in record.examples.items():
            heartbeats.at("measure")
            try:
                call = Call(operator, *example, device, working_set)
                found[operator] = *time_call(call, device, seconds / len(record.examples)), call.nbytes
            except (RuntimeError, NotImplementedError, IndexError) as error:  # torch.OutOfMemoryError is a RuntimeError
                failed[operator] = first_line(error)
    return found, failed


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
    found: dict[str, list] = {}
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    for kind, ranks, near, nbytes in sorted({(*key[1:4], key[5]) for key in record.collectives}):
        group = dist.group.WORLD if ranks == dist.get_world_size() else mesh["shard"].get_group()
        if kind == "all_reduce" and ranks < dist.get_world_size():
            group = mesh["replicate"].get_group()
        count = max(ranks, int(nbytes) // 4 // ranks * ranks)
        whole, part = torch.ones(count, device=device), torch.ones(count // ranks, device=device)
        call = {
            "all_gather": lambda: collectives.all_gather(whole, part, group),  # noqa: B023
            "reduce_scatter": lambda: collectives.reduce_scatter(part, whole, group, dist.ReduceOp.SUM),  # noqa: B023
            "all_reduce": lambda: dist.all_reduce(whole, group=group),  # noqa: B023
        }.get(kind)
        if call:
            found.setdefault(f"{kind} {ranks} {near}", []).append((nbytes, time_together(call, device)))
    return found


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


def seconds_of(record: StepRecorder, found: dict) -> float:
    """What the operators of a recorded step take, one after the other."""
    total = 0.0
    for (phase, operator), times in record.operators.items():
        if operator in found:
            median, _, nbytes = found[operator]
            share = record.counts["list_bytes", phase, operator.kind] / nbytes if operator.shape == LIST else times
            total += median * share
    return total


def time_host(record: StepRecorder, settings: Settings, recipe, mesh: DeviceMesh) -> float:
    """Seconds that the host needs for an operator: on a CPU beside the operator itself, for modules, autograd and
    FSDP's hooks; on a GPU all that it needs, as its launches run ahead. From steps of the `small` model."""
    dispatches = sum(times for (what, *_), times in record.counts.items() if what == "dispatches")
    device = torch.device(mesh.device_type)
    alone = seconds_of(record, time_operators(record, device, 3.0)[0]) if device.type == "cpu" else 0.0
    whole = time_step(settings, recipe, load_config("demo"), mesh, steps=15)
    return max(0.0, whole - alone) / dispatches


def slow_ranks(seconds: list[float], ranks: list[tuple[str, int]]) -> list[str]:
    """Those more than a tenth slower than the median, each with host and pid."""
    usual = statistics.median(seconds)
    return [
        f"rank {rank} ({host}, pid {pid}): {100 * (mine / usual - 1):.0f} % slower than the median of the ranks"
        for rank, (mine, (host, pid)) in enumerate(zip(seconds, ranks, strict=True))
        if mine > (1 + TOLERANCE) * usual
    ]


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
    """Links far under what they should give: `expected` for those within a node and between nodes, in GB/s, where it is
    known, else what most links of the kind give."""
    world, found, kinds = len(ranks), [], {}
    for sender, speed in enumerate(speeds):
        far = ranks[sender][0] != ranks[(sender + 1) % world][0]
        kinds.setdefault("between nodes" if far else "in a node", []).append((sender, speed))
    for kind, links in kinds.items():
        should = expected.get(kind) or statistics.median(speed for _, speed in links)
        for sender, speed in links:
            if speed < FAR_UNDER * should:
                (host, pid), (other, other_pid) = ranks[sender], ranks[(sender + 1) % world]
                ends = f"rank {sender} ({host}, pid {pid}) to rank {(sender + 1) % world} ({other}, pid {other_pid})"
                found.append(f"link from {ends}: {speed:.3g} GB/s, {should:.3g} expected of a link {kind}")
    return found


def describe_device(device: torch.device, local_ranks: int) -> dict:
    """What a rates file says of where its figures are from."""
    cuda = device.type == "cuda"
    whole = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
    return {
        "device": name_of(device),
        "memory_gib": whole / GIB / (1 if cuda else local_ranks),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "threads": None if cuda else torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def measure(settings: Settings, recipe) -> None:
    """--measure: times this device with what a step of `settings` runs, and writes the file that a plan reads. The
    figures of a file that is there by the same versions stay, but for those that are measured again."""
    began, world = time.monotonic(), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    config = load_config(settings.model)
    settings = dataclasses.replace(recipe.resolve(settings, config), gpus_per_node=local)
    depth = min(layer_period(config)[1] + 1, config.get_text_config().num_hidden_layers)
    # fake process groups, before the real one is there
    record = record_step(settings, recipe, config, world, depth, 1)
    tiny, demo = small(settings), load_config("demo")
    tiny_record = record_step(tiny, recipe, demo, 1, demo.num_hidden_layers, 1)

    store = open_store(settings.timeout_minutes)
    watch = heartbeats.Heartbeats(60 * settings.timeout_minutes, store)
    device, stop = start_processes(settings.timeout_minutes, store), StopRequest()
    watch.meet()
    mesh = recipe.build_mesh(settings, device)
    about = describe_device(device, local)
    say(columns({"measure": f"{len(record.examples)} operators of {settings.model} on {world} x {about['device']}"}))
    found, failed = time_operators(record, device, PATIENCE)
    alone = init_device_mesh(device.type, (world, 1), mesh_dim_names=("world", "shard"))["shard"]
    host = time_host(tiny_record, tiny, recipe, alone)
    by_size = time_collectives(record, mesh)
    step = time_step(settings, recipe, at_depth(config, depth), mesh, steps=3)
    links = time_links(device) if world > 1 else []
    of_ranks = of_all_ranks((sum(least for _, least, _ in found.values()), host, found))

    slow = slow_ranks([seconds for seconds, *_ in of_ranks], heartbeats.RANKS)
    gpu = find_gpu(about["device"]) if device.type == "cuda" else None
    expected = {"in a node": gpu.link * LINK_SHARE, "between nodes": gpu.network * NETWORK_SHARE} if gpu else {}
    slow += slow_links(links, heartbeats.RANKS, expected)
    operators: dict[str, list] = {}
    for operator, (_, _, nbytes) in found.items():
        seconds = statistics.median(others[operator][0] for *_, others in of_ranks if operator in others)
        operators.setdefault(operator.kind, []).append([operator.shape, operator.flops, nbytes, seconds])
    least = min(seconds for points in operators.values() for *_, seconds in points)
    section = {
        "operators": operators,
        "collectives": by_size,
        "rates": summarize((operator._replace(nbytes=n), median) for operator, (median, _, n) in found.items()),
        "host_us": 1e6 * statistics.median(host for _, host, _ in of_ranks),
        "launch_us": 1e6 * least,
        "wait_us": 0.0,
    }
    rates = Rates(about["device"], 0, None, {}, device.type == "cuda", section)
    planned = predict_time(record.counts, record.operators, record.parts, rates)["step"]
    calls = sum(times for (what, *_), times in record.counts.items() if what == "calls")
    if world > 1 and not rates.overlaps:  # what a real step takes beyond its parts, ranks spend on waiting
        section["wait_us"] = 1e6 * max(0.0, step - planned) / calls
    path = file_of(about["device"], settings.cache_dir)
    contents = merge(path, about | {"sections": {str(local): section}})
    if dist.get_rank() == 0:
        write(path, contents)
    say(columns(describe(section, links, failed, step, planned, depth) | {"written": f"{path}, which --plan reads"}))
    for line in slow:
        say(f"slow       {line}")
    say(f"done       {time.monotonic() - began:.0f} s")
    stop_processes(stop)


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
    """What was measured, in lines."""
    of, units = section["rates"], {"gb_per_s": "GB/s", "tflops": "TFLOPS"}
    said = (f"{name.partition('_')[0]} {of[name]:,.3g} {units[name.partition('_')[2]]}" for name in of)
    lines = {"rates": ", ".join(said) + f", host {section['host_us']:.1f} us an operator"}
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
    difference += ", the rest ranks wait for each other" * (section["wait_us"] > 0)
    return lines | {"check": f"a real step of {depth} layers took {1000 * step:,.1f} ms; {difference}"}
