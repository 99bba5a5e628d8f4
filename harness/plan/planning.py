"""Planning: from recorded steps to memory, time, cost and advice: --plan. Called by the script, which hands it the
functions that it drives. It does not know how a step is recorded (`recorder`) nor what a GPU gives (`gpus`)."""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib

import numpy as np

from harness.base.devices import GIB
from harness.base.errors import UserError
from harness.base.gpu_table import CONTEXT_GIB, NCCL_GIB, find_gpu
from harness.base.text import first_line
from harness.flags.commands import given, without
from harness.flags.settings import Settings
from harness.model.configs import load_config
from harness.model.flops import known_flops
from harness.model.weights import layer_period, on_meta
from harness.plan import search
from harness.plan.gpus import FRAGMENTATION, PUBLISHED_SHARE, choose_rates, verdict_of
from harness.plan.rates import Rates, predict_time
from harness.plan.text import assumptions, describe_plan, describe_verdict
from harness.report import page

# The pair's own functions, which a plan drives.
Recipe = collections.namedtuple(
    "Recipe", "resolve build_mesh build_model build_optimizer train_step make_tracker estimate_mfu"
)


def predict(settings: Settings, recipe: Recipe, config, world: int, rates: Rates, flops: int) -> dict:
    """What this configuration needs and gives on `world` GPUs, as the JSON object of --plan without its advice; `flops`
    are those of a token, 0 where they are not known: there is no MFU then.

    Two shallow models are recorded and extrapolated to the full depth, which is exact where layers are alike: memory
    and counts are linear in depth, and a maximum over layers lies at the first or the last of a kind.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    from harness.plan.recorder import (
        KINDS,
        PHASES,
        record_step,  # loads what only a plan needs
    )

    model, period = layer_period(config)
    layers, edge = config.get_text_config().num_hidden_layers, max(period, 2)
    depth = 2 * edge + (layers - 2 * edge) % period
    depths = [depth, depth + period] if depth + period < layers else [layers]
    try:
        records = [record_step(settings, recipe, config, world, depth, edge) for depth in depths]
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = f"{config.model_type} reads its data to decide what it computes, and a plan has none"
        raise UserError(f"--plan: {why} ({first_line(error)})") from error
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
    total = peak.sum() / GIB
    groups = {key[2:] for key in counts if key[0] == "calls" and key[2:][1] > 1}
    communicators = len({key[1:] for key in groups})
    # a stream's memory serves no other stream: each keeps what it held at its own peak
    held = [max(peak.sum() for peak in one.values()) / GIB for one in of_pools]
    reserved = sum(held) * (1 + FRAGMENTATION) + CONTEXT_GIB + communicators * NCCL_GIB
    of_the_step = np.max([found for key, found in peaks.items() if "build" not in key], axis=0) / GIB
    memory = dict(zip(KINDS, of_the_step.tolist(), strict=True))
    collectives = []
    for group in sorted(groups):
        calls, sent = (sum(counts.get((of, phase, *group), 0) for phase in PHASES) for of in ("calls", "sent_bytes"))
        entry = dict(zip(("collective", "ranks", "per_node"), group, strict=True))
        entry |= {"calls": round(calls), "gib": sent / GIB, "gib_between_nodes": 0.0}
        if entry["per_node"] < entry["ranks"]:  # of a ring's hops one in per_node leaves the node
            entry["gib_between_nodes"] = entry["gib"] / entry["per_node"]
        collectives.append(entry)
    seconds = predict_time(counts, operators, many.parts, rates.with_ranks(min(world, settings.gpus_per_node)))
    speed = recipe.estimate_mfu(flops, settings.tokens_per_step(world), seconds["step"], world, rates.peak_tflops or 0)
    hours = 1e9 / speed["tokens_per_sec"] / 3600
    return {
        "gpus": world,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": flops or None,
        "memory_gib": memory | {"total": total, "reserved": reserved, "host": float(on_host.sum()) / GIB},
        "held_by_streams_gib": held,
        "beside_tensors_gib": {  # what the process holds of the card beyond the tensors' peak
            "other streams": sum(held) - total,
            "fragmentation": sum(held) * FRAGMENTATION,
            "CUDA and NCCL": CONTEXT_GIB + communicators * NCCL_GIB,
        },
        "at_peak_gib": dict(zip(KINDS, (peak / GIB).tolist(), strict=True)),
        "peak_at": at[-2] if len(at) == 3 else at[-1],
        "peaks_gib": {
            phase: dict(zip(KINDS, max(found, key=np.sum) / GIB, strict=True))
            for phase in ("build", "forward", "head", "backward", "optimizer")
            if (found := [peak for key, peak in peaks.items() if phase in key])
        },
        "capacity_gib": rates.memory_gib,
        "fits": bool(reserved <= rates.memory_gib),
        "verdict": verdict_of(reserved, rates.memory_gib),
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


def price_of_run(settings: Settings, result: dict) -> dict:
    """Hours and, with --gpu-hour-usd, dollars of all the steps of a run."""
    hours = settings.num_steps * result["step_time_ms"] / 1000 / 3600
    run = {"steps": settings.num_steps, "hours": hours}
    price = settings.gpu_hour_usd
    return run | ({"gpu_hour_usd": price, "cost": hours * result["gpus"] * price} if price else {})


def without_infinities(tree):
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(tree, dict):
        return {key: without_infinities(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_infinities(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def plan(settings: Settings, recipe: Recipe) -> None:
    """--plan: prints what `settings` will need and give, and what else would fit or be faster."""
    if int(os.environ.get("RANK", 0)):
        return
    clock = search.Clock(settings.plan_seconds)
    rates = choose_rates(settings)
    if settings.precision == "fp8" and not (rates.assumed.get("fp8_tflops", 1) or settings.fp8_emulate):
        why = f"needs a GPU with float8 (Ada, Hopper or newer), {rates.device} has none"
        raise UserError(f"--precision fp8: {why}; use bf16")
    config = load_config(settings.model)
    settings, worlds = recipe.resolve(settings, config), settings.plan_gpus or (settings.gpus_per_node,)
    flops, counted = known_flops(on_meta(config, settings.attention), settings.sequence_length)
    timed = clock.timed(predict)
    predicted = functools.cache(lambda settings, world: timed(settings, recipe, config, world, rates, flops))

    def planned(world: int = worlds[0], **changed) -> dict:
        return predicted(dataclasses.replace(settings, **changed), world)

    seconds, auto, free = settings.plan_seconds, settings.batch_size == "auto", not search.keeps_batch(settings)
    largest, step = None, settings.batch_step()
    if auto:
        largest = search.largest_batch(planned, rates.memory_gib, step)
        argv = (*without(settings.argv, "batch_size"), "--batch-size", str(largest or step))
        settings = dataclasses.replace(settings, batch_size=largest or step, argv=argv)
    result = {"model": settings.model, "gpu": rates.device, "flops": counted} | planned()
    found = None
    if seconds or (auto and not result["fits"]):
        plan_here = functools.partial(planned, worlds[0])
        found = search.search(settings, config, plan_here, worlds[0], clock, free)
        result |= found.result()
    if seconds and not auto:
        with contextlib.suppress(TimeoutError):
            largest = search.largest_batch(planned, rates.memory_gib, step, clock.check)
    result |= {} if largest is None else {"largest_batch_size": largest}
    if len(worlds) > 1:
        result["scaling"] = search.scaling(settings, config, planned, worlds, found if seconds else None, clock)
    if found:
        result["search"] |= {
            "seconds": clock.elapsed(),
            "seconds_allowed": seconds * (1 + (len(worlds) - 1) / 3),
            "plan_seconds": seconds,
        }
    if result["fits"] and settings.num_steps and "num_steps" in given(settings.argv):
        result["run"] = price_of_run(settings, result)
    assumed = not rates.sections and find_gpu(rates.device)
    result["published_share"] = PUBLISHED_SHARE if assumed else None
    result["verdict_text"] = describe_verdict(settings, result)
    result["assumptions"] = assumptions(settings, config, rates, result["time_sources"])
    if settings.html:
        page.write_plan(pathlib.Path(settings.html).expanduser(), result)
    print(json.dumps(without_infinities(result), indent=2) if settings.json else describe_plan(settings, result))
