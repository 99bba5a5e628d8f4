"""Measure: --measure: the rates of this device, in some seconds, and whether all ranks and links are as fast as the
others. Called by the script. Independent of how a plan is made of them."""

import collections
import datetime
import functools
import itertools
import json
import os
import shlex
import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import base, flags, job, resolving
from harness import model as models
from harness.plan.rates import Rates, file_of
from harness.plan.recorder import StepRecorder

PATIENCE = 1.0  # seconds for what is timed again and again
MAX_CPU_FLOPS, MAX_GPU_FLOPS = 1e10, 1e13  # of one product, forward and backward
MAX_SLOWDOWN = 0.1  # by which a rank may be slower than the median
MIN_LINK_SHARE = 0.75  # of the median of the links; one below it is named


def measure_device(settings: flags.Settings, recipe, world: job.World) -> None:
    """--measure: times what steps of `settings` are made of, on all ranks at once, and writes the rates that plans of
    this kind of GPU, or of this processor, read."""
    began = time.monotonic()
    config = models.load_config(settings.model)
    settings = resolving.resolve(settings, config, flags.Settings.batch_step)
    device = world.meet()
    torch.manual_seed(0)
    layer = models.decoder_layers(models.on_meta(config))[0]
    calls = [*kinds_of_work(settings, config, layer, device), small_step(recipe, device)]
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
        rates |= link_rates(device, local, sum(parameter.numel() for parameter in layer.parameters()))
        slow += slow_links(time_links(device))
    if dist.get_rank() == 0:
        write(settings, rates, torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    for name, rate in rates.items():
        job.say(job.columns({"measured": f"{name} {rate:,.4g}"}))
    for line in slow:
        job.say(job.columns({"slow": line}))
    job.say(job.columns({"done": f"{time.monotonic() - began:.0f} s"}))


def write(settings: flags.Settings, rates: dict[str, float], device: str) -> None:
    """Writes the file of this kind of device."""
    path = file_of(device, settings.cache_dir)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = {"device": device, "date": date, "torch": torch.__version__} | rates
        job.replace_file(path, json.dumps(contents, indent=1))
    except OSError as error:
        raise base.UserError(f"--cache-dir: {path} cannot be written ({error.strerror})", 1) from error
    job.say(job.columns({"written": f"{path}, which --plan --plan-gpu {shlex.quote(device)} reads"}))


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


def kinds_of_work(settings: flags.Resolved, config, layer: nn.Module, device: torch.device) -> list[Callable[[], None]]:
    """Three calls, each of a forward and backward, of fewer tokens on a processor: one linear of each shape in a
    decoder layer; one causal attention; a norm, a gate and a residual, eager, and AdamW's step."""
    text, on_gpu, batch_size = config.get_text_config(), device.type == "cuda", int(settings.batch_size)
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    tokens = batch_size * settings.sequence_length
    both_passes = functools.partial(forward_and_backward, dtype=dtype, device=device)

    linears = []
    for shape in sorted({module.weight.shape for module in layer.modules() if isinstance(module, nn.Linear)}):
        rows = int((MAX_GPU_FLOPS if on_gpu else MAX_CPU_FLOPS) / 6 / shape.numel())
        linears.append(both_passes(F.linear, (max(16, min(tokens, rows)), shape[1]), shape))

    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    length = min(settings.sequence_length, 16384 if on_gpu else 1024)

    def attend(query, key, value):
        with models.any_attention_kernel():
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)

    attention = both_passes(attend, *((batch_size, count, length, head_dim) for count in (heads, key_heads, key_heads)))

    def gate_and_add(gate, up):
        normed = gate.float() * torch.rsqrt(gate.float().square().mean(-1, keepdim=True) + 1e-6)
        return F.silu(normed.to(dtype)) * up + gate

    size = min(tokens, 8192 if on_gpu else 1024), 4 * text.hidden_size
    gate = both_passes(gate_and_add, size, size)
    weights = nn.Parameter(torch.randn(size, device=device))
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)

    def products() -> None:
        for linear in linears:
            linear()

    def memory_bound() -> None:
        gate()
        optimizer.step()

    return [products, attention, memory_bound]


def forward_and_backward(function: Callable[..., torch.Tensor], *shapes, dtype, device) -> Callable[[], None]:
    """A call of a function of random tensors of these shapes, and its backward."""
    inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]

    def call() -> None:
        output = function(*inputs)
        torch.autograd.grad(output, inputs, output.detach())

    return call


def small_step(recipe, device: torch.device) -> Callable[[], None]:
    """A step of the demo model on so few tokens that it is hardly more than what the host does for it."""
    config = models.load_config("demo")
    words = "--measure --model demo --sequence-length 16 --attention sdpa --no-compile"
    settings = resolving.resolve(flags.parse_args(words.split()), config, flags.Settings.batch_step)
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
    lines = []
    for kind in ("in a node", "between nodes"):
        links = {}
        for rank, speed in enumerate(speeds):
            receiver = (rank + 1) % len(speeds)
            is_in_node = job.RANKS[rank][0] == job.RANKS[receiver][0]
            if is_in_node == (kind == "in a node"):
                links[f"{job.rank_name(rank)} to {job.rank_name(receiver)}"] = speed
        for ends, speed in links.items():
            median = statistics.median_high(links.values())
            if speed < MIN_LINK_SHARE * median:
                lines.append(f"link from {ends}: {speed:.3g} GB/s, {median:.3g} is the median of those {kind}")
    return lines
