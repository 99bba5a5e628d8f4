"""The header: model, sharding, precision, batch and data of a run before its first step."""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh

from harness import base, data, flags, job
from harness import model as models
from harness import state as states


def describe_setup(
    *,
    settings: flags.Settings,
    state: states.TrainState,
    mesh: DeviceMesh,
    train_set: data.TrainingData,
    flops: str,
    peak: float | None,
    verified: str,
    checkpoint: states.Checkpoint | None,
    changed: str,
) -> str:
    """The lines of the header.

    Args:
        flops: FLOPs per token and how they were counted, in words.
        peak: peak TFLOPS of the device, None if unknown.
        verified: the checks of the sharding that passed, in words.
        checkpoint: the one that the run resumes from, None for a new run.
        changed: the flags that differ from the checkpoint's, in words.
    """
    world_size, shards, device_type = dist.get_world_size(), mesh["shard"].size(), mesh.device_type
    model = state.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sharding = f"ZeRO-{settings.zero_stage} on {world_size} x {device_name(device_type)}, "
    sharding += f"replicas x shards {world_size // shards} x {shards}"
    if settings.cpu_offload:
        sharding += ", offloaded to the host"
    padded = " with padding" if train_set.has_padding else ""
    if settings.document_mask or padded:
        flops += f" in a document of {settings.sequence_length:,}, fewer in shorter ones (MFU counts each)"
    optimizer = models.find_optimizer(settings.optimizer)
    sync_note = f"the host waits for each gradient norm, as {settings.optimizer} cannot skip on the device"
    steps = ", ".join(filter(None, [base.counted(settings.num_steps, "step"), settings.describe_epochs()]))
    lines = {
        "model": f"{settings.model} ({type(model).__name__.removeprefix('FSDP')}), {settings.init} weights, "
        f"{parameters:,} parameters, {flops}, {describe_peak(peak, device_type)}",
        "adapters": models.describe_adapters(settings, model),
        "sharding": sharding,
        "verified": verified,
        "precision": describe_precision(settings, device_type, checkpoint),
        "float8": models.describe_float8(models.decoder_layers(model)) if settings.precision == "fp8" else "",
        "technique": describe_techniques(settings, model, device_type),
        "optimizer": f"{settings.optimizer} on {optimizer.describe(model)}" if optimizer.describe else "",
        "experts": models.describe_routing(model),
        "skipping": "" if models.skips_on_device(state.optimizer) else sync_note,
        "batch": f"{settings.describe_batch(world_size)}{padded}, {steps}",
        "lr": describe_lr(settings, checkpoint),
        **train_set.header,
        "resumed": f"{checkpoint.path} at step {state.step:,}" if checkpoint else "",
        "its flags": flags.as_flags({name: settings.explicit[name] for name in settings.inherited}),
        "changed": changed,
    }
    return job.columns({name: words for name, words in lines.items() if words})


def device_name(device_type: str) -> str:
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU with {base.counted(torch.get_num_threads(), 'thread')}"


def describe_peak(peak: float | None, device_type: str) -> str:
    """The peak TFLOPS for MFU, or the reason for having no MFU."""
    if peak:
        return f"{peak:,.4g} TFLOPS peak per {'GPU' if device_type == 'cuda' else 'rank'}"
    if device_type == "cuda":
        return (
            f"no MFU: {device_name(device_type)} is not in assets/gpus.csv; give its dense bf16 peak with --peak-tflops"
        )
    return "no MFU on a CPU"


def describe_precision(settings: flags.Settings, device_type: str, checkpoint: states.Checkpoint | None) -> str:
    """The precision of each part, and whether it comes from a flag, the checkpoint or a default."""
    words = {
        "bf16": "bf16 compute and all-gather, fp32 master weights and gradient reduction",
        "fp8": f"float8 linears ({settings.fp8_recipe}), bf16 elsewhere, fp32 master weights and gradient reduction",
        "fp32": "fp32 throughout",
        "bf16-pure": "bf16 throughout, optimizer included",
    }[settings.precision]
    if settings.fp8_emulate:
        words = f"emulated {words}"
    if "precision" in settings.explicit:
        return f"{words}; by --precision"
    if checkpoint:
        return f"{words}; as in the checkpoint"
    return f"{words}; the default on a {'GPU' if device_type == 'cuda' else 'CPU'}"


def describe_lr(settings: flags.Settings, checkpoint: states.Checkpoint | None) -> str:
    """The peak learning rate and its schedule, and the origin of the peak."""
    _, origin = flags.choose_lr(settings, checkpoint.manifest if checkpoint else None)
    warmup = f" after {base.counted(settings.warmup_steps, 'step')} of warmup" if settings.warmup_steps else ""
    return f"{settings.lr:g} at its peak, {settings.lr_scheduler}{warmup}; {origin}"


def describe_techniques(settings: flags.Settings, model: transformers.PreTrainedModel, device_type: str) -> str:
    mode = "compiled" if settings.compile else "eager"
    attention = models.describe_attention(settings, model.config, device_type)
    if settings.document_mask:
        attention += " inside documents"
    loss = f"fused loss ({mode} chunks)" if settings.fused_loss else "loss from full logits"
    level = settings.activation_checkpointing
    activations = f"{level.replace('none', 'no')} activation checkpointing"
    if level == "offload":
        activations = "full activation checkpointing with layer inputs in host memory"
    return f"{attention}, {mode} layers, {loss}, {activations}, {settings.optimizer}"
