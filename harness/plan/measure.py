"""Measure: --measure: the rates of this device, in some seconds, and whether all ranks and links are as fast as the
others. Called by the script. Independent of how a plan is made of them."""

import collections
import datetime
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import base, flags, job
from harness import model as models
from harness.plan.rates import Rates, file_of
from harness.plan.recorder import StepRecorder
from harness.plan.resolving import resolve

PATIENCE = 1.0  # seconds for what is timed again and again
MAX_CPU_FLOPS, MAX_GPU_FLOPS = 1e10, 1e13  # of one product, forward and backward
MAX_SLOWDOWN = 0.1  # by which a rank may be slower than the median
MIN_LINK_SHARE = 0.75  # of the median of the links; one below it is named


def measure_device(settings: flags.Settings, recipe, world: job.World) -> None:
    """--measure: times what steps of `settings` are made of, on all ranks at once, and writes the rates that plans of
    this kind of GPU, or of this processor, read."""
    began = time.monotonic()
    config = models.load_config(settings.model)
    settings = resolve(settings, config)
    device = world.meet()
    torch.manual_seed(0)
    model = models.on_meta(config)
    calls = (
        products(settings, model, device),
        attentions(settings, config, device),
        memory_bound(settings, config, device),
        small_step(recipe, device),
    )
    seconds, works = zip(*(median_and_work(call) for call in calls), strict=True)
    of_ranks = base.of_all_ranks(seconds)
    matmul_s, attention_s, memory_s, host_s = (statistics.median(of_call) for of_call in zip(*of_ranks, strict=True))
    matmul, attention, memory, host = works
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
    else:
        capacity = psutil.virtual_memory().total / local
    rates = {
        "memory_gib": capacity / base.GIB,
        "matmul_tflops": matmul["flops"] / matmul_s / 1e12,
        "attention_tflops": attention["flops"] / attention_s / 1e12,
        "memory_gb_per_s": memory["bytes"] / memory_s / 1e9,
        "host_us": 1e6 * host_s / host["dispatches"],
    }
    slow = slow_ranks([sum(of_rank[:3]) for of_rank in of_ranks])
    if dist.get_world_size() > 1:
        layer = sum(parameter.numel() for parameter in models.decoder_layers(model)[0].parameters())
        rates |= link_rates(device, local, layer)
        slow += slow_links(time_links(device))
    write(settings, rates, device)
    for name, rate in rates.items():
        job.say(job.columns({"measured": f"{name} {rate:,.4g}"}))
    for line in slow:
        job.say(job.columns({"slow": line}))
    job.say(job.columns({"done": f"{time.monotonic() - began:.0f} s"}))


def write(settings: flags.Settings, rates: dict[str, float], device: torch.device) -> None:
    """Writes the file of this kind of device, on rank 0."""
    if dist.get_rank():
        return
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = file_of(name, settings.cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        job.replace_file(path, json.dumps({"device": name, "date": date, "torch": torch.__version__} | rates, indent=1))
    except OSError as error:
        raise base.UserError(f"--cache-dir: {path} cannot be written ({error.strerror})", 1) from error
    job.say(job.columns({"written": f"{path}, which --plan{' --plan-gpu cpu' if name == 'cpu' else ''} reads"}))


# ---- What is timed ---------------------------------------------------------------------------------------------------


def median_and_work(call: Callable[[], None]) -> tuple[float, dict[str, float]]:
    """(median seconds of a call, beside those of all ranks; its flops, bytes and dispatches, as a plan counts them)."""
    job.enter_phase("measure")
    with StepRecorder(1, Rates("", 0, None, {"memory_gb_per_s": 1, "matmul_tflops": 1}, {})) as recorder:
        recorder.start_microbatch(0, 1, 1)
        call()
    work: dict[str, float] = collections.defaultdict(float)
    for (name, *_), count in recorder.counts.items():
        work[name] += count
    dist.barrier()
    seconds: list[float] = []
    while len(seconds) < 4 or sum(seconds) < PATIENCE:
        base.wait_for_device()
        began = time.perf_counter()
        call()
        base.wait_for_device()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]), work


def dtype_of(settings: flags.Settings) -> torch.dtype:
    return torch.float32 if settings.precision == "fp32" else torch.bfloat16


def products(settings: flags.Settings, model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Forward and backward of one linear of each shape in the first decoder layer."""
    shapes = {
        module.weight.shape for module in models.decoder_layers(model)[0].modules() if isinstance(module, nn.Linear)
    }
    tokens = int(settings.batch_size) * settings.sequence_length
    most = MAX_GPU_FLOPS if device.type == "cuda" else MAX_CPU_FLOPS
    cases = []
    for shape in sorted(shapes):
        rows = max(16, min(tokens, int(most / 6 / shape.numel())))
        weight, given = (
            torch.randn(size, dtype=dtype_of(settings), device=device) for size in (shape, (rows, shape[1]))
        )
        cases.append((weight.requires_grad_(), given.requires_grad_(), torch.randn_like(given @ weight.T)))

    def call() -> None:
        for weight, given, gradient in cases:
            torch.autograd.grad(F.linear(given, weight), (weight, given), gradient)

    return call


def attentions(settings: flags.Settings, config, device: torch.device) -> Callable[[], None]:
    """Forward and backward of one causal attention, of fewer tokens on a processor."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    length = min(settings.sequence_length, 16384 if device.type == "cuda" else 1024)
    inputs = []
    for count in (heads, key_heads, key_heads):
        shape = int(settings.batch_size), count, length, head_dim
        inputs.append(torch.randn(shape, dtype=dtype_of(settings), device=device, requires_grad=True))
    query, key, value = inputs
    gradient = torch.randn_like(query)

    def call() -> None:
        with models.any_attention_kernel():
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)
        torch.autograd.grad(output, inputs, gradient)

    return call


def memory_bound(settings: flags.Settings, config, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a norm, a gate and a residual, eager, and AdamW's step."""
    width, dtype = 4 * config.get_text_config().hidden_size, dtype_of(settings)
    rows = min(int(settings.batch_size) * settings.sequence_length, 8192 if device.type == "cuda" else 1024)
    gate, up = (torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    weights = nn.Parameter(torch.randn(rows, width, device=device))
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)

    def call() -> None:
        normed = gate.float() * torch.rsqrt(gate.float().square().mean(-1, keepdim=True) + 1e-6)
        output = F.silu(normed.to(dtype)) * up + gate
        torch.autograd.grad(output, (gate, up), output.detach())
        optimizer.step()

    return call


def small_step(recipe, device: torch.device) -> Callable[[], None]:
    """A step of the demo model on so few tokens that it is hardly more than what the host does for it."""
    config = models.load_config("demo")
    words = "--measure --model demo --sequence-length 16 --attention sdpa --no-compile"
    settings = resolve(flags.parse_args(words.split()), config)
    of_one = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("world", "shard"))["shard"]
    model = recipe.build_model(settings, config, of_one)
    optimizer, tracker = models.build_optimizer(settings, model), recipe.make_tracker(0, 1, 0)
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)

    def call() -> None:
        with models.any_attention_kernel():
            batches = itertools.repeat({"input_ids": tokens, "labels": tokens})
            recipe.train_step(settings, model, optimizer, batches, tracker)

    return call


# ---- Links and ranks -------------------------------------------------------------------------------------------------


def time_together(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call on the slowest rank."""
    seconds = []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        call()
        base.wait_for_device()
        slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    return statistics.median(seconds[1:])


def link_rates(device: torch.device, local: int, numbers: int) -> dict[str, float]:
    """GB/s that a rank sends in gathering and reducing a decoder layer of so many numbers: within a node and, of each
    rank's share of the node's network, between nodes."""
    rates, world = {}, dist.get_world_size()
    groups = {"intra_node_gb_per_s": (dist.new_subgroups(local)[0], local, 1)} if local > 1 else {}
    if local < world:
        groups["inter_node_gb_per_s"] = (dist.group.WORLD, world, local)
    for name, (group, ranks, sharing) in groups.items():
        part = torch.ones(-(-numbers // ranks), device=device)
        whole = part.new_empty(ranks * len(part))

        def call(group=group, part=part, whole=whole) -> None:
            dist.all_gather_into_tensor(whole, part, group=group)
            dist.reduce_scatter_tensor(part, whole, group=group)

        rates[name] = 2 * (ranks - 1) * part.nbytes / time_together(call, device) / 1e9 / sharing
    return rates


def time_links(device: torch.device) -> list[float]:
    """GB/s from each rank to the next one in the ring, one link after the other so that none shares anything."""
    world, rank, speeds = dist.get_world_size(), dist.get_rank(), []
    message = torch.ones((2**26 if device.type == "cuda" else 2**22) // 4, device=device)

    def send(sender: int, receiver: int) -> None:
        if rank == sender:
            dist.send(message, receiver)
        elif rank == receiver:
            dist.recv(message, sender)

    for sender in range(world):
        seconds = time_together(functools.partial(send, sender, (sender + 1) % world), device)
        speeds.append(message.nbytes / seconds / 1e9)
    return speeds


def slow_ranks(seconds: list[float]) -> list[str]:
    """A line for each rank that is slower than the median by more than MAX_SLOWDOWN, with host and pid."""
    median = statistics.median_low(seconds)
    return [
        f"{job.rank_name(rank)}: {100 * (of_rank / median - 1):.0f} % slower than the median of the ranks"
        for rank, of_rank in enumerate(seconds)
        if of_rank / median - 1 > MAX_SLOWDOWN
    ]


def slow_links(speeds: list[float]) -> list[str]:
    """A line for each link, from a rank to the next one, far under the median of those of its kind: within a node, or
    between nodes."""
    hosts = [host for host, _ in job.RANKS]
    kinds = ["in a node" if hosts[rank - 1] == host else "between nodes" for rank, host in enumerate(hosts)]
    kinds.append(kinds.pop(0))  # of the link that leaves a rank, not of that which reaches it
    lines = []
    for rank, (speed, kind) in enumerate(zip(speeds, kinds, strict=True)):
        median = statistics.median_high(other for other, its in zip(speeds, kinds, strict=True) if its == kind)
        if speed < MIN_LINK_SHARE * median:
            ends = f"{job.rank_name(rank)} to {job.rank_name((rank + 1) % len(hosts))}"
            lines.append(f"link from {ends}: {speed:.3g} GB/s, {median:.3g} is the median of those {kind}")
    return lines
