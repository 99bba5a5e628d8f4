"""The header: what will run, in figures that can be checked by hand."""

import pathlib

import torch
import torch.distributed as dist

from harness.base.text import counted
from harness.flags.settings import Settings
from harness.job.printing import columns
from harness.model.attention import describe_attention


def describe_setup(settings, model, mesh, train_set, flops: str, peak: float | None, verified: str) -> str:
    """The header: what will run, in figures that can be checked by hand."""
    world, shards = dist.get_world_size(), mesh["shard"].size()
    cuda = mesh.device_type == "cuda"
    where = torch.cuda.get_device_name() if cuda else f"CPU with {counted(torch.get_num_threads(), 'thread')}"
    master = ", fp32 master weights and gradient reduction"
    precision = {
        "bf16": "bf16 compute and all-gather" + master,
        "fp8": f"{'emulated ' * settings.fp8_emulate}float8 linears ({settings.fp8_recipe}), bf16 elsewhere" + master,
        "fp32": "fp32 throughout",
        "bf16-pure": "bf16 throughout, optimizer included",
    }
    run = "compiled" if settings.compile else "eager"
    techniques = [
        describe_attention(settings, model.config, mesh.device_type)
        + " inside documents (FLOPs counted as if across them)" * settings.document_mask,
        f"{run} layers",
        f"fused loss ({run} chunks)" if settings.fused_loss else "loss from full logits",
        f"{settings.activation_checkpointing.replace('none', 'no')} activation checkpointing"
        if settings.activation_memory_budget is None
        else f"activation memory budget {settings.activation_memory_budget:g}",
        settings.optimizer,
    ]
    mfu = f"{significant(peak)} TFLOPS peak a {'GPU' if cuda else 'rank'}" if peak else "no MFU on a CPU"
    if not peak and cuda:
        mfu = f"no MFU: {where} is not in the table; give its dense bf16 peak with --peak-tflops"
    lines = {}
    if settings.demo and settings.dataset != "demo":
        lines["demo"] = f"the embedded model and its sizes, but on {settings.dataset} in place of the embedded stories"
    lines |= {
        "model": f"{settings.model} ({type(model).__name__.removeprefix('FSDP')}), {settings.init} weights, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {flops}, {mfu}",
        "sharding": f"ZeRO-{settings.zero_stage} on {world} x {where}, replicas x shards {world // shards} x {shards}"
        + ", offloaded to the host" * settings.cpu_offload,
        "verified": verified,
        "precision": precision[settings.precision],
        "technique": ", ".join(techniques),
        "batch": f"{settings.describe_batch(world)}, {settings.num_steps:,} steps",
    }
    lines |= train_set.header
    return columns(lines, wrap=True)


def significant(figure: float) -> str:
    """A positive figure to three digits, from 100 on to whole ones."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def watching(settings: Settings, folder: pathlib.Path) -> dict[str, str]:
    """Where to watch a run while it goes on: by command, address or file, what there is of each."""
    places = {}
    if settings.metrics_port:
        places["metrics"] = f"http://{settings.metrics_host}:{settings.metrics_port}/metrics"
    if settings.profile:
        places["profile"] = str(folder / "profile" / "rank-0.json")
    return places
