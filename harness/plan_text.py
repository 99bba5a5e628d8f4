"""Plan text: what --plan prints of a plan. Called by `planning`. It computes no figure that the JSON object does not
have."""

import math
import textwrap

from harness.gpus import CONTEXT_GIB, FRAGMENTATION, NCCL_GIB
from harness.processes import columns
from harness.rates import Rates
from harness.settings import Settings


def assumptions(settings: Settings, config, rates: Rates, sources: dict[str, float]) -> dict[str, str]:
    """What the plan takes for granted, in words."""
    layers, attention = "operator by operator", "the scores' matrix in memory"
    if settings.compile:
        layers = "partitioned as inductor does; a compiled region allocates what its kernels have to write"
    if settings.attention != "eager":
        attention = "kernel that saves a row's logsumexp and accumulates the query gradient in fp32"
    said = [", ".join(f"{name} {value:,.4g}" for name, value in rates.assumed.items())] if rates.assumed else []
    said += ["assumed are shares of the datasheets' figures, see docs/PLAN.md: the time is a bound"] if said else []
    if rates.sections:
        parts = ", ".join(f"{sources.get(name, 0):.0%} {name}" for name in ("measured", "scaled", "assumed"))
        said.insert(0, f"of the step's time {parts}; measured {rates.source}, scaled from other sizes measured there")
    elif rates.source:
        said.append(rates.source)
    beside = "collectives beside their pass's computation, but for the first gathers and the last reductions"
    return {
        "rates": "; ".join(said),
        "memory": f"rank 0, which holds most; {FRAGMENTATION:.0%} fragmentation, {CONTEXT_GIB} GiB for CUDA "
        f"and its libraries, {NCCL_GIB} GiB a communicator: assumed, not measured",
        "attention": attention,
        "layers": f"{layers}; shallow models, extrapolated to {config.get_text_config().num_hidden_layers} layers",
        "time": f"one operator after the other; {beside if rates.overlaps else 'nothing beside anything'}; "
        f"{'launches ahead of the GPU' if rates.overlaps else 'then what the host does'}; data always there",
    }


def describe_plan(settings: Settings, result: dict) -> str:
    """The plan as a table."""
    world, memory, time_ms = result["gpus"], result["memory_gib"], result["time_ms"]
    replicas = world if settings.zero_stage == 0 else settings.dp_replicate_size
    techniques = [
        settings.precision,
        "compiled" if settings.compile else "eager",
        f"{settings.activation_checkpointing.replace('none', 'no')} activation checkpointing",
        "fused loss" if settings.fused_loss else "loss from full logits",
        settings.optimizer + ", offloaded to the host" * settings.cpu_offload,
    ]
    setup = {
        "plan": f"{settings.model} on {world} x {result['gpu']}, ZeRO-{settings.zero_stage}, "
        f"replicas x shards {replicas} x {world // replicas}",
        "model": f"{result['parameters']:,} parameters, {result['flops']}",
        "technique": ", ".join(techniques),
        "batch": settings.describe_batch(world),
    }
    places = {"build": "while the model is built", "head": "in head and loss", "optimizer": "in the optimizer's step"}
    place = places.get(result["peak_at"], f"in {result['peak_at']}")
    place += f", {memory['host']:,.1f} GiB a GPU on the host" * settings.cpu_offload
    verdict = f"of {result['capacity_gib']:.1f}: " + ("fits" if result["fits"] else "DOES NOT FIT")
    verdict += f", largest --batch-size {result['largest_batch_size']}" * (result["largest_batch_size"] > 0)
    kinds = {"matmul": "matmul", "attention": "attention", "memory": "memory-bound", "optimizer": "optimizer"}
    lines = [
        columns(setup),
        f"\nmemory of the fullest GPU, GiB{'at most':>9}  {place}",
        *(f"  {kind:24}{memory[kind]:13,.2f}{gib:13,.2f}" for kind, gib in result["at_peak_gib"].items()),
        f"  {'total':24}{'':13}{memory['total']:13,.2f}",
        f"  {'reserved':24}{'':13}{memory['reserved']:13,.2f}   {verdict}",
        "\nsent by each GPU in a step, GiB",
        *(
            f"  {entry['collective'].replace('_', '-'):15}{'x ' + str(entry['calls']):9}{entry['gib']:9,.2f}   "
            + f"{entry['ranks']} ranks"
            + f", {entry['gib_between_nodes']:,.2f} of it between nodes" * (entry["gib_between_nodes"] > 0)
            for entry in result["collectives"]
        ),
        "\ntime of a step, ms",
        *(f"  {name:24}{time_ms[kind]:9,.1f}" for kind, name in kinds.items()),
        f"  {'exposed communication':24}{time_ms['exposed']:9,.1f}   of {time_ms['communication']:,.1f}",
        *[f"  {'contention':24}{time_ms['contention']:9,.1f}"] * (time_ms["contention"] >= 0.1),
        *[f"  {'waiting for the host':24}{time_ms['launches']:9,.1f}"] * (time_ms["launches"] >= 0.1),
        f"  {'step':24}{result['step_time_ms']:9,.1f}   {result['tokens_per_sec']:,.0f} tok/s, "
        f"{result['tokens_per_sec_per_gpu']:,.0f} a GPU, "
        + (f"MFU {result['mfu_percent']:.1f} %" if result["flops_per_token"] else "no MFU"),
        f"  {'a billion tokens':24}{result['hours_per_billion_tokens']:9,.2f} h"
        + (f", ${result['cost_per_billion_tokens']:,.0f}" if settings.gpu_hour_usd else ""),
    ]
    if fitting := result.get("fits_with"):
        reached = f"{fitting['reserved_gib']:.1f} GiB reserved, {fitting['tokens_per_sec']:,.0f} tok/s"
        lines.append(f"\nit fits with {fitting['flags']}\n  {reached}")
    elif not result["fits"]:
        lines.append("\nno set of flags makes it fit: more GPUs, a shorter --sequence-length or a smaller --model")
    if rows := result.get("scaling"):
        lines.append("\n    GPUs  replicas   GiB sent   ms a step          tok/s   MFU %   exposed %")
        lines += [
            f"{row['gpus']:8,}{row['dp_replicate_size']:10}{row['communication_gib_per_step']:11.2f}"
            f"{row['step_time_ms']:12,.1f}{row['tokens_per_sec']:15,.0f}{row['mfu_percent'] or math.nan:8.1f}"
            f"{row['exposed_communication_percent']:12.1f}" + "   does not fit" * (not row["fits"])
            for row in rows
        ]
    wrap = textwrap.TextWrapper(110, initial_indent="  ", subsequent_indent="    ")
    assumed = [wrap.fill(f"{name}: {text}") for name, text in result["assumptions"].items()]
    return "\n".join([*lines, "\nassumptions", *assumed])
