"""Planning: from recorded steps to memory, time, cost and advice: --plan. Called by the script, which hands it the
functions that it drives. It does not know how a step is recorded (`recorder`) nor what a GPU gives (`gpus`)."""

import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
import textwrap
from importlib.util import find_spec

import numpy as np

import utils
from harness import models, page
from harness.gpus import CONTEXT_GIB, FRAGMENTATION, NCCL_GIB, choose_rates
from harness.loss import choose_loss
from harness.processes import columns
from harness.rates import Rates, predict_time
from harness.settings import Settings
from utils import UserError

# The script's own functions, which a plan drives.
Recipe = collections.namedtuple("Recipe", "resolve build_mesh build_model build_optimizer train_step")


def predict(settings: Settings, recipe: Recipe, config, world: int, rates: Rates, flops: int) -> dict:
    """What this configuration needs and gives on `world` GPUs, as the JSON object of --plan without its advice; `flops`
    are those of a token, 0 where they are not known: there is no MFU then.

    Two shallow models are recorded and extrapolated to the full depth, which is exact where layers are alike: memory
    and counts are linear in depth, and a maximum over layers lies at the first or the last of a kind.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    from harness.recorder import KINDS, PHASES, record_step  # loads what only a plan needs

    model, period = models.layer_period(config)
    layers, edge = config.get_text_config().num_hidden_layers, max(period, 2)
    depth = 2 * edge + (layers - 2 * edge) % period
    depths = [depth, depth + period] if depth + period < layers else [layers]
    try:
        records = [record_step(settings, recipe, config, world, depth, edge) for depth in depths]
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = f"{config.model_type} reads its data to decide what it computes, and a plan has none"
        raise UserError(f"--plan: {why} ({utils.first_line(error)})") from error
    few, many = records[0], records[-1]
    beyond = (layers - depths[-1]) / period if len(depths) == 2 else 0

    def at_full_depth(few: dict, many: dict) -> dict:
        return {key: value + beyond * (value - few[key]) for key, value in many.items() if key in few}

    peaks, counts = at_full_depth(few.peaks(), many.peaks()), at_full_depth(few.counts, many.counts)
    of_size = {key: value for key, value in many.operators.items() if key not in few.operators}  # of the depth: once
    operators = at_full_depth(few.operators, many.operators) | of_size

    pools = range(max(many.pools) + 1)
    of_pools = [at_full_depth(few.peaks(pool), many.peaks(pool)) for pool in pools]

    on_host = np.zeros(len(KINDS))
    if settings.cpu_offload:
        on_device = np.array([kind in ("activations", "communication") for kind in KINDS])
        on_host = max((peak * ~on_device for peak in peaks.values()), key=np.sum)
        peaks, *of_pools = [{key: peak * on_device for key, peak in one.items()} for one in (peaks, *of_pools)]
        shards = on_host[KINDS.index("parameters")]
        passes = 3 if settings.zero_stage == 3 else 2  # gathers, and gradients back
        counts["host_link_bytes", "backward"] = shards * passes * settings.gradient_accumulation_steps
        on_the_host = [key for key in operators if key[0] == "optimizer"]
        counts["host_bytes", "optimizer"] = sum(operators.pop(key) * key[1].nbytes for key in on_the_host)
        counts["host_bytes", "optimizer"] += sum(
            counts[key] for key in counts if key[:2] == ("list_bytes", "optimizer")
        )
    at, peak = max(peaks.items(), key=lambda item: item[1].sum())
    total = peak.sum() / utils.GIB
    groups = {key[2:] for key in counts if key[0] == "calls" and key[2:][1] > 1}
    communicators = len({key[1:] for key in groups})
    # a stream's memory serves no other stream: each keeps what it held at its own peak
    held = [max(peak.sum() for peak in one.values()) / utils.GIB for one in of_pools]
    reserved = sum(held) * (1 + FRAGMENTATION) + CONTEXT_GIB + communicators * NCCL_GIB
    of_the_step = np.max([found for key, found in peaks.items() if "build" not in key], axis=0) / utils.GIB
    memory = dict(zip(KINDS, of_the_step.tolist(), strict=True))
    collectives = []
    for group in sorted(groups):
        calls, sent = (sum(counts.get((of, phase, *group), 0) for phase in PHASES) for of in ("calls", "sent_bytes"))
        entry = dict(zip(("collective", "ranks", "per_node"), group, strict=True))
        entry |= {"calls": round(calls), "gib": sent / utils.GIB, "gib_between_nodes": 0.0}
        if entry["per_node"] < entry["ranks"]:  # of a ring's hops one in per_node leaves the node
            entry["gib_between_nodes"] = entry["gib"] / entry["per_node"]
        collectives.append(entry)
    seconds = predict_time(counts, operators, many.parts, rates.with_ranks(min(world, settings.gpus_per_node)))
    speed = utils.estimate_mfu(flops, settings.tokens_per_step(world), seconds["step"], world, rates.peak_tflops or 0)
    hours = 1e9 / speed["tokens_per_sec"] / 3600
    return {
        "gpus": world,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": flops or None,
        "memory_gib": memory | {"total": total, "reserved": reserved, "host": on_host.sum() / utils.GIB},
        "held_by_streams_gib": held,
        "at_peak_gib": dict(zip(KINDS, (peak / utils.GIB).tolist(), strict=True)),
        "peak_at": at[-2] if len(at) == 3 else at[-1],
        "peaks_gib": {
            phase: dict(zip(KINDS, max(found, key=np.sum) / utils.GIB, strict=True))
            for phase in ("build", "forward", "head", "backward", "optimizer")
            if (found := [peak for key, peak in peaks.items() if phase in key])
        },
        "capacity_gib": rates.memory_gib,
        "fits": bool(reserved <= rates.memory_gib),
        "communication_gib_per_step": sum(entry["gib"] for entry in collectives),
        "collectives": collectives,
        "flops_executed": sum(operator.flops * times for (_, operator), times in operators.items()),
        "step_time_ms": 1000 * seconds["step"],
        "time_ms": {name: 1000 * value for name, value in seconds.items() if name not in ("step", "sources")},
        "time_sources": seconds["sources"],
        "exposed_communication_percent": 100 * seconds["exposed"] / seconds["step"],
        "tokens_per_sec": speed["tokens_per_sec"],
        "tokens_per_sec_per_gpu": speed["tokens_per_sec"] / world,
        "mfu_percent": speed.get("mfu_percent") if flops else None,
        "hours_per_billion_tokens": hours,
    } | ({"cost_per_billion_tokens": hours * world * settings.gpu_hour_usd} if settings.gpu_hour_usd else {})


def plan(settings: Settings, recipe: Recipe) -> None:
    """--plan: prints what `settings` will need and give."""
    if int(os.environ.get("RANK", 0)):
        return
    rates = choose_rates(settings)
    if settings.precision == "fp8" and not (rates.assumed.get("fp8_tflops", 1) or settings.fp8_emulate):
        why = f"needs a GPU with float8 (Ada, Hopper or newer), {rates.device} has none"
        raise UserError(f"--precision fp8: {why}; use bf16")
    config = models.load_config(settings.model)
    settings, worlds = recipe.resolve(settings, config), settings.plan_gpus or (settings.gpus_per_node,)
    flops, counted = models.count_flops(models.on_meta(config, settings.attention), settings.sequence_length)
    predicted = functools.cache(lambda settings, world: predict(settings, recipe, config, world, rates, flops))

    def planned(world: int = worlds[0], **changed) -> dict:
        return predicted(dataclasses.replace(settings, **changed), world)

    batch = largest_batch(planned, rates)
    if settings.batch_size == "auto":
        settings = dataclasses.replace(settings, batch_size=batch or 1)
    result = (
        {"model": settings.model, "gpu": rates.device, "flops": counted} | planned() | {"largest_batch_size": batch}
    )
    if not result["fits"]:
        result["fits_with"] = what_fits(settings, config, planned)
    if len(worlds) > 1:
        result["scaling"] = scaling(settings, planned, worlds)
    result["assumptions"] = assumptions(settings, config, rates, result["time_sources"])
    if settings.html:
        page.write_plan(pathlib.Path(settings.html).expanduser(), result)
    print(json.dumps(result, indent=2) if settings.json else describe_plan(settings, result))


def largest_batch(planned, rates: Rates) -> int:
    """The largest --batch-size that fits (of more than 16, one within a sixteenth of it); 0 if none does.

    Memory grows evenly with it where activations are the peak, so two plans tell about where it lies, and the next
    ones make sure.
    """

    def left(size: int) -> float:
        return rates.memory_gib - planned(batch_size=size)["memory_gib"]["reserved"]

    fits, fails, probe = 0, math.inf, 1
    while fails - fits > 1 + fits // 16:
        if left(probe) >= 0:
            fits = probe
        else:
            fails = probe
        if fails < math.inf:
            probe = (fits + fails) // 2
        else:
            other = fits if fits > 1 else 2
            growth = max((left(1) - left(other)) / (other - 1), 1e-9)
            probe = min(max(fits + int(left(fits) / growth), fits + 1 + fits // 16), 64 * fits)
    return fits


def memory_savers(settings: Settings) -> list[dict]:
    """Changes that lower memory, the cheapest in speed first, less what is so already."""
    batch, checkpointing = settings.batch_size, settings.activation_checkpointing
    steps = settings.gradient_accumulation_steps * (1 if batch == "auto" else batch)
    ways = [
        ({"fused_loss": True}, settings.fused_loss is False),
        ({"zero_stage": 3}, settings.zero_stage < 3),
        ({"activation_checkpointing": "selective"}, checkpointing == "none"),
        ({"batch_size": 1, "gradient_accumulation_steps": steps}, batch != 1),
        ({"activation_checkpointing": "full"}, checkpointing != "full"),
        ({"optimizer": "adamw8bit"}, settings.optimizer != "adamw8bit" and find_spec("torchao")),
        ({"cpu_offload": True}, not settings.cpu_offload),
    ]
    return [changes for changes, possible in ways if possible]


def as_flags(changes: dict) -> str:
    return " ".join(f"--{name.replace('_', '-')}" + f" {v}" * (v is not True) for name, v in changes.items())


def what_fits(settings: Settings, config, planned) -> dict | None:
    """The flags that make it fit at the least cost in speed, by planning them; None where nothing does.

    They are tried one on top of the other, the cheapest in speed first, until it fits; then what is not needed is
    taken out again.
    """

    def with_all(chosen: list[dict]) -> dict:
        return planned(**{name: value for changes in chosen for name, value in changes.items()})

    chosen: list[dict] = []
    for changes in memory_savers(settings):
        if "fused_loss" in changes and not choose_loss(None, config):
            continue
        chosen = [one for one in chosen if one.keys() != changes.keys()] + [changes]  # full in place of selective
        if with_all(chosen)["fits"]:
            break
    else:
        return None
    for changes in chosen[:-1]:
        fewer = [one for one in chosen if one is not changes]
        if with_all(fewer)["fits"]:
            chosen = fewer
    result = with_all(chosen)
    flags, reserved = " ".join(map(as_flags, chosen)), result["memory_gib"]["reserved"]
    return {"flags": flags, "reserved_gib": reserved, "tokens_per_sec": result["tokens_per_sec"]}


def scaling(settings: Settings, planned, worlds: tuple[int, ...]) -> list[dict]:
    """Plans at each world size; where it spans nodes also with one shard group a node, if that was not decided."""
    speed = ("step_time_ms", "tokens_per_sec", "mfu_percent", "exposed_communication_percent")
    rows, told = [], ("fits", "communication_gib_per_step", *speed)
    for world in worlds:
        nodes = world // settings.gpus_per_node
        hybrid = [nodes] if nodes > 1 and not world % settings.gpus_per_node and settings.zero_stage else []
        for replicas in [settings.dp_replicate_size, *(hybrid if settings.dp_replicate_size == 1 else [])]:
            row = planned(world, dp_replicate_size=replicas)
            rows.append({"gpus": world, "dp_replicate_size": replicas} | {name: row[name] for name in told})
    return rows


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
