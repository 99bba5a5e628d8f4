"""The header: what will run, in figures that can be checked by hand."""

import pathlib

import torch
import torch.distributed as dist

from harness import base, flags, job
from harness import model as models
from harness import state as states


def describe_setup(
    settings,
    model,
    optimizer,
    mesh,
    train_set,
    flops: str,
    peak: float | None,
    verified: str,
    average=None,
    manifest: dict | None = None,
) -> str:
    """The header's lines.

    Args:
        flops: the FLOPs of a token and how they were counted, in words.
        peak: TFLOPS of the device, None where it is not known.
        verified: what was verified of the sharding, in words.
        average: the `WeightAverage` of --ema, None without.
        manifest: that of the checkpoint that the run goes on from, if there is one.
    """
    world_size, shards = dist.get_world_size(), mesh["shard"].size()
    device = device_name(mesh.device_type)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sharding = f"ZeRO-{settings.zero_stage} on {world_size} x {device}, "
    sharding += f"replicas x shards {world_size // shards} x {shards}"
    if settings.cpu_offload:
        sharding += ", offloaded to the host"
    lines = {}
    if settings.demo and settings.dataset != "demo":
        data = settings.describe_dataset()
        lines["demo"] = f"the embedded model and its sizes, but on {data} in place of the embedded stories"
    lines["model"] = (
        f"{settings.model} ({type(model).__name__.removeprefix('FSDP')}), {settings.init} weights, "
        f"{parameters:,} parameters, {flops}, {describe_peak(peak, mesh.device_type)}"
    )
    lines["sharding"] = sharding
    lines["verified"] = verified
    why = f"the default on a {'GPU' if mesh.device_type == 'cuda' else 'CPU'}"
    if "precision" in settings.given:
        why = "by --precision"
    elif manifest:
        why = "as in the checkpoint"
    lines["precision"] = f"{describe_precision(settings)}; {why}"
    lines["technique"] = ", ".join(techniques(settings, model, mesh.device_type))
    kind = models.find_optimizer(settings.optimizer)
    if kind.describe:
        lines["optimizer"] = f"{settings.optimizer} on {kind.describe(model)}"
    routing = models.describe_routing(model)
    if routing:
        lines["experts"] = routing
    padded = " with padding" if train_set.has_padding else ""
    if average:
        lines["average"] = average.describe()
    if not models.skips_on_device(optimizer):
        lines["skipping"] = f"the host waits for each gradient norm, as {settings.optimizer} cannot skip on the device"
    lines["batch"] = f"{settings.describe_batch(world_size)}{padded}, {settings.num_steps:,} steps"
    lines |= train_set.header
    return job.columns(lines, wrap=True)


def device_name(device_type: str) -> str:
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU with {base.counted(torch.get_num_threads(), 'thread')}"


def describe_peak(peak: float | None, device_type: str) -> str:
    """The peak that MFU is measured against, in TFLOPS, or why there is no MFU."""
    if peak:
        return f"{significant(peak)} TFLOPS peak a {'GPU' if device_type == 'cuda' else 'rank'}"
    if device_type == "cuda":
        device = device_name(device_type)
        return f"no MFU: {device} is not in the table; give its dense bf16 peak with --peak-tflops"
    return "no MFU on a CPU"


def describe_precision(settings: flags.Settings) -> str:
    master = "fp32 master weights and gradient reduction"
    if settings.precision == "bf16":
        return f"bf16 compute and all-gather, {master}"
    if settings.precision == "fp8":
        emulated = "emulated " if settings.fp8_emulate else ""
        return f"{emulated}float8 linears ({settings.fp8_recipe}), bf16 elsewhere, {master}"
    if settings.precision == "fp32":
        return "fp32 throughout"
    return "bf16 throughout, optimizer included"


def techniques(settings: flags.Settings, model, device_type: str) -> list[str]:
    mode = "compiled" if settings.compile else "eager"
    attention = models.describe_attention(settings, model.config, device_type)
    if settings.document_mask:
        attention += " inside documents (FLOPs counted as if across them)"
    loss = f"fused loss ({mode} chunks)" if settings.fused_loss else "loss from full logits"
    if settings.activation_memory_budget is not None:
        activations = f"activation memory budget {settings.activation_memory_budget:g}"
    else:
        activations = f"{settings.activation_checkpointing.replace('none', 'no')} activation checkpointing"
    return [attention, f"{mode} layers", loss, activations, settings.optimizer]


def significant(figure: float) -> str:
    """A positive figure to three digits, from 100 on to whole ones."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def describe_start(state: states.TrainState, checkpoint: pathlib.Path | None, changed: str) -> str:
    """Where a run goes on from, and which flags are not those of its checkpoint; empty for a fresh one."""
    lines = {}
    if checkpoint:
        lines["resumed"] = f"{checkpoint} at step {state.step:,}"
    if changed:
        lines["changed"] = changed
    if state.branched_from:
        origin = state.branched_from
        lines["branched"] = f"from {origin['folder']} at step {origin['step']:,}"
    return job.columns(lines)
