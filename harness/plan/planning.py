"""Planning: --plan predicts the given configuration, searches for one that fits or is faster, and prints both. The
script passes its functions as a `Recipe`."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from harness import base, flags, report, resolving
from harness import model as models
from harness.plan import own_plan
from harness.plan.predict import predict, with_own_attention
from harness.plan.rates import choose_rates
from harness.plan.recipe import Recipe
from harness.plan.search import Search
from harness.plan.text import assumptions, describe_plan, measured_shares


def print_plan(settings: flags.Args, recipe: Recipe) -> None:
    """Print the plan of `settings` on rank 0, as text or with --json as JSON."""
    if int(os.environ.get("RANK", 0)):
        return
    own_plan.exit_with_parent()
    with report.keep_stdout_for_json(settings) as stdout:  # code of --import may print
        resolved, result = make_plan(settings, recipe)
    print(json.dumps(result, indent=2) if settings.json else describe_plan(resolved, result), file=stdout)


def make_plan(args: flags.Args, recipe: Recipe) -> tuple[flags.Settings, dict]:
    """Return (the resolved settings, the JSON object of their plan).

    Raises:
        UserError: the GPU is unknown or has no float8, or a number of GPUs is no multiple of the nodes' size.
    """
    began = time.monotonic()
    deadline = began + (args.plan_seconds or math.inf)
    rates = choose_rates(args)
    if args.precision == "fp8" and not (rates.values["fp8_tflops"] or args.fp8_emulate):
        why = f"needs a GPU with float8 (Ada, Hopper or newer), {rates.device} has none"
        raise base.UserError(f"--precision fp8: {why}; use bf16")
    worlds = args.plan_gpus or (args.gpus_per_node,)
    check_nodes(worlds, args.gpus_per_node)
    config = models.load_config(args.model)
    models.scale_rope(args, config, args.sequence_length)
    settings = resolving.resolve(args, config)
    resolving.refuse_contradictions(settings, args)

    @functools.cache
    def count_flops(rank: int, length: int) -> tuple[int, str]:
        counted = dataclasses.replace(with_own_attention(settings, config), lora_rank=rank, lora_alpha=2 * rank)
        model = models.trained_on_meta(counted, config)
        flops, text = models.flops_or_zeros(model, np.array([length]), recipe.get_flops_by_length)
        return round(float(flops[0])), text

    @functools.cache
    def plan(settings: flags.Settings, world: int) -> dict[str, Any]:
        flops, _ = count_flops(settings.lora_rank, settings.sequence_length)
        return predict(settings, recipe, config, world, rates, flops)

    has_float8 = bool(rates.values["fp8_tflops"]) and importlib.util.find_spec("torchao") is not None
    shared_by = models.most_ranks_per_sequence(settings, config, min(worlds[0], args.gpus_per_node))
    search = Search(settings, config, worlds, plan, rates.memory_gib, deadline, has_float8, shared_by)
    search.run()
    settings = dataclasses.replace(settings, **search.base_changes)
    result: dict[str, Any] = {
        "model": settings.model,
        "gpu": rates.device,
        "precision": settings.precision,
        "flops": count_flops(settings.lora_rank, settings.sequence_length)[1],
    }
    result |= plan(settings, worlds[0]) | search.result()
    result["positions"] = getattr(config.get_text_config(), "max_position_embeddings", None)
    result["search"] |= {"seconds": time.monotonic() - began, "plan_seconds": settings.plan_seconds}
    if settings.num_steps and settings.explicit.keys() & {"num_steps", "num_tokens"}:
        result["run"] = price_run(settings, result)
    elif settings.num_epochs:
        result["num_epochs"] = settings.num_epochs  # the number of steps depends on the data
    result["warning"] = "; ".join(find_warnings(settings, search.replicas(worlds[0])))
    result["imports"] = flags.describe_imports()
    result["rates"] = rates.values
    result["measured_share"], result["published_share"] = measured_shares(settings, config, result)
    result["assumptions"] = assumptions(rates)
    return settings, result


def check_nodes(worlds: tuple[int, ...], per_node: int) -> None:
    """Raise UserError if GPUs do not fill whole nodes, as a launcher starts the same number on each node."""
    for world in worlds:
        if world > per_node and world % per_node:
            nodes = f"{world / per_node:.3g} nodes of {per_node} GPUs"
            whole, divisor = -(-world // per_node) * per_node, math.gcd(world, per_node)
            advice = f"plan whole nodes, such as --plan-gpus {whole}, or give --gpus-per-node {divisor}"
            raise base.UserError(f"--plan-gpus {world}: that is {nodes}; {advice}")


def find_warnings(settings: flags.Settings, layouts: list[dict]) -> Iterator[str]:
    """Yield the warnings of a plan. `layouts` is `Search.replicas`, not empty if a shard group spans several nodes."""
    if layouts and "dp_replicate_size" not in settings.explicit:
        nodes = layouts[0]["dp_replicate_size"]
        yield f"one shard group over {nodes} nodes; compare --dp-replicate-size {nodes}, shards inside a node"
    if settings.document_mask or settings.packing == "none":
        flag = "--document-mask" if settings.document_mask else "--packing none"
        yield f"{flag}: a plan reads no data: time, tokens and MFU are of documents that fill sequences"
    if settings.precision == "fp32":
        yield "--precision fp32: time, cost and MFU are those of bf16 matmuls; fp32 takes many times as long"


def price_run(settings: flags.Settings, plan: dict) -> dict:
    """Return steps, tokens, hours and, with --gpu-hour-usd, dollars (`cost`) of the full run."""
    steps, world = settings.num_steps, plan["gpus"]
    if settings.num_tokens:
        steps = settings.steps_for(settings.num_tokens, world)
    hours = steps * plan["step_time_ms"] / 1000 / 3600
    run = {"steps": steps, "tokens": steps * settings.tokens_per_step(world), "hours": hours}
    if settings.gpu_hour_usd:
        run["cost"] = hours * world * settings.gpu_hour_usd
    return run
