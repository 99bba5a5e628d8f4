"""Planning: --plan: predicts the configuration as it is, searches for what fits or is faster, and prints both. Called
by the script, which hands over the functions that a plan drives. Independent of how a prediction is made."""

import contextlib
import dataclasses
import functools
import json
import math
import os

from harness.base.errors import UserError
from harness.base.gpu_table import find_gpu
from harness.flags.commands import given, without
from harness.flags.settings import Settings
from harness.model.configs import load_config
from harness.model.flops import known_flops
from harness.model.weights import on_meta
from harness.plan import search
from harness.plan.fitting import largest_batch
from harness.plan.gpus import (
    PUBLISHED_KINDS,
    PUBLISHED_MEMORY_SHARE,
    PUBLISHED_RUNS,
    PUBLISHED_SHARE,
    choose_rates,
    is_published_kind,
)
from harness.plan.predict import Prediction, Recipe, predict
from harness.plan.text import assumptions, describe_plan, describe_verdict


def price_of_run(settings: Settings, result: dict) -> dict:
    """Hours and, with --gpu-hour-usd, dollars of all the steps of a run."""
    steps = settings.num_steps
    if settings.num_tokens:
        steps = settings.steps_for(settings.num_tokens, result["gpus"])
    hours = steps * result["step_time_ms"] / 1000 / 3600
    run = {"steps": steps, "hours": hours}
    if settings.gpu_hour_usd:
        run["gpu_hour_usd"] = settings.gpu_hour_usd
        run["cost"] = hours * result["gpus"] * settings.gpu_hour_usd
    return run


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
    worlds = settings.plan_gpus or (settings.gpus_per_node,)
    settings = recipe.resolve(settings, config)
    model = on_meta(config, settings.attention)
    flops, counted = known_flops(model, settings.sequence_length, recipe.flops_per_token)
    timed = clock.timed(predict)
    predicted = functools.cache(lambda settings, world: timed(settings, recipe, config, world, rates, flops))

    def planned(world: int = worlds[0], **changed) -> Prediction:  # of `settings` as they are when it is called
        return predicted(dataclasses.replace(settings, **changed), world)

    seconds = settings.plan_seconds
    is_auto = settings.batch_size == "auto"
    step = settings.batch_step()
    largest = None
    if is_auto:
        largest = largest_batch(planned, rates.memory_gib, step)
        batch_size = largest or step
        argv = (*without(settings.argv, "batch_size"), "--batch-size", str(batch_size))
        settings = dataclasses.replace(settings, batch_size=batch_size, argv=argv)
    result = {"model": settings.model, "gpu": rates.device, "flops": counted} | planned().to_json()
    finished = None
    if seconds or (is_auto and not result["fits"]):
        plan_of_first = functools.partial(planned, worlds[0])
        finished = search.search(settings, config, plan_of_first, worlds[0], clock, is_auto)
        result |= finished.result()
    if seconds and not is_auto:
        with contextlib.suppress(TimeoutError):
            largest = largest_batch(planned, rates.memory_gib, step, clock.check)
    if largest is not None:
        result["largest_batch_size"] = largest
    if len(worlds) > 1:
        result["scaling"] = search.scaling(settings, config, planned, worlds, finished if seconds else None, clock)
    if finished:
        result["search"] |= {
            "seconds": clock.elapsed(),
            "seconds_allowed": seconds * (1 + (len(worlds) - 1) / 3),
            "plan_seconds": seconds,
        }
    if result["fits"] and settings.num_steps and given(settings.argv) & {"num_steps", "num_tokens"}:
        result["run"] = price_of_run(settings, result)
    assumed = not rates.sections and find_gpu(rates.device)
    is_known = is_published_kind(rates.device, config)
    result["published_share"] = PUBLISHED_SHARE if assumed and is_known else None
    result["published_runs"] = f"{PUBLISHED_RUNS} ({PUBLISHED_KINDS})" if assumed and is_known else None
    result["published_memory_share"] = PUBLISHED_MEMORY_SHARE if is_known else None
    result["rates_assumed"] = bool(assumed)
    result["verdict_text"] = describe_verdict(settings, result)
    result["assumptions"] = assumptions(settings, config, rates, result["time_sources"])
    print(json.dumps(without_infinities(result), indent=2) if settings.json else describe_plan(settings, result))
