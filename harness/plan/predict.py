"""Predict: memory, traffic, time and cost of one configuration, from recorded steps and a GPU's rates."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch._subclasses import fake_tensor  # private: what fake tensors raise has no other name
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from harness import base, flags
from harness import model as models
from harness.plan.rates import HOST_MEMORY, Rates, price_step
from harness.plan.recipe import Recipe
from harness.plan.recorder import HOST, KINDS

# Errors of fake tensors if a model reads its data.
ERRORS_WITHOUT_DATA = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
# Share of the tensors' peak, with expandable segments. Measured on 13 runs of 3B and 8B on one GPU: below 0.01 in 11,
# 0.03 and 0.10 in two (benchmarks/results/plan_measured.json). Published runs took 1.06 times the plan (median).
FRAGMENTATION = 0.04
# Memory reserved by torch's allocator over its plan in these 13 runs, minimum and maximum. The maximum is Llama-3.1-8B
# with full checkpointing; the next is 0.993. A plan fits if the maximum fits, does not fit if the minimum does not, and
# is tight in between.
RESERVED_SHARE = (0.957, 1.055)
TIGHT, TOO_LARGE = 1 / RESERVED_SHARE[1], 1 / RESERVED_SHARE[0]  # shares of the capacity that the allocator has

# {(stream, phase, and in a pass microbatch and layer): bytes by kind} from `StepRecorder.peaks`, and
# `StepRecorder.counts`, of one step.
Peaks = dict[tuple, np.ndarray]
Counts = dict[tuple, float]


def predict(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, rates: Rates, flops: int
) -> dict[str, Any]:
    """Predict this configuration on `world` GPUs, with the keys of --json. `flops` is per token, 0 if unknown.

    Raises:
        UserError: the model's computation depends on its data.
    """
    settings = with_own_attention(settings, config)
    model = models.trained_on_meta(settings, config)
    period = models.layer_period(model)
    peaks, counts = record_whole_step(settings, recipe, config, world, period, rates)
    # layer inputs and, with --cpu-offload, states, each at its own peak: pinned memory of one does not serve the other
    host = np.max([peak for (stream, *_), peak in peaks.items() if stream == HOST], axis=0)
    if settings.cpu_offload:
        price_host_update(counts, float(host[KINDS.index("parameters")]), rates.values["host_link_gb_per_s"])
    collectives = list_collectives(counts)
    seconds = price_step(counts, rates)
    speed = recipe.estimate_mfu(flops, settings.tokens_per_step(world), seconds["step"], world, rates.peak_tflops)
    prediction = {
        "gpus": world,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_token": flops or None,
        **find_memory(peaks, counts, host, rates.memory_gib),
        "communication_gib_per_step": sum(entry["gib"] for entry in collectives),
        "collectives": collectives,
        "flops_executed": sum(count for (name, *_), count in counts.items() if name == "flops"),
        "step_time_ms": 1000 * seconds["step"],
        "time_ms": {name: 1000 * value for name, value in seconds.items() if name != "step"},
        "bound_by": "host" if seconds["launches"] else "device",
        "tokens_per_sec": speed["tokens_per_sec"],
        "tokens_per_sec_per_gpu": speed["tokens_per_sec"] / world,
        "mfu_percent": speed.get("mfu_percent") if flops else None,
    }
    if settings.gpu_hour_usd:
        hours = 1e9 / speed["tokens_per_sec"] / 3600
        prediction["cost_per_billion_tokens"] = hours * world * settings.gpu_hour_usd
    return prediction


def with_own_attention(settings: flags.Settings, config: PretrainedConfig) -> flags.Settings:
    """Return the settings with an attention kernel of torch's that runs on fake tensors without a GPU or a package.
    Kernels other than eager save and allocate the same.

    Raises:
        UserError: the family has none.
    """
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if settings.attention != "eager" and not family._supports_sdpa:  # private: transformers chooses by it
        problem = f"a plan has only eager attention for {config.model_type}"
        raise base.UserError(f"--attention {settings.attention}: {problem}; give --attention eager")
    return settings if settings.attention == "eager" else dataclasses.replace(settings, attention="sdpa")


def find_verdict(allocator: float, capacity: float) -> str:
    """Compare the GiB that torch's allocator is planned to reserve with those that CUDA and NCCL leave of the card."""
    if allocator > TOO_LARGE * capacity:
        return "does not fit"
    return "tight" if allocator > TIGHT * capacity else "fits"


def record_whole_step(
    settings: flags.Settings, recipe: Recipe, config: PretrainedConfig, world: int, period: int, rates: Rates
) -> tuple[Peaks, Counts]:
    """Return (peaks, counts) of one optimizer step of the full model on rank 0.

    Two shallow models, which differ by one `period` of layers, are recorded and extrapolated. This is exact for equal
    layers: memory and counts are linear in depth, and a maximum over layers is at the first or last of its kind. A
    model that is not deeper is recorded directly. The update of an optimizer that distributes matrices is recorded on
    the full model."""
    from harness.plan import fake_step  # imports what only a plan needs

    layers = config.get_text_config().num_hidden_layers
    end_layers = 2 * max(period, 2)  # layers with extrapolated peaks, half of them at each end
    shallow = end_layers + (layers - end_layers) % period
    depths = [shallow, shallow + period] if shallow + period < layers else [layers]
    try:
        records = [fake_step.record_step(settings, recipe, config, world, depth, rates) for depth in depths]
    except ERRORS_WITHOUT_DATA as error:
        why = f"the computation of {config.model_type} depends on its data, and a plan has none"
        raise base.UserError(f"--plan: {why} ({base.first_line(error)})") from error
    few, many = records[0], records[-1]
    periods = (layers - depths[-1]) / period
    peaks, counts = extrapolate(few.peaks(), many.peaks(), periods), extrapolate(few.counts, many.counts, periods)
    if periods and many.counts["flops", "update", "matmul"]:
        whole = fake_step.record_update(settings, recipe, config, world, rates)
        counts = {key: count for key, count in counts.items() if key[1] != "update"}
        counts |= {key: count for key, count in whole.counts.items() if key[1] == "update"}
        peaks |= {key: peak for key, peak in whole.peaks().items() if key[1] == "optimizer"}
    return peaks, counts


def extrapolate(few: dict, many: dict, periods: float) -> dict:
    """Extrapolate linearly from `few` to `many` and `periods` times further, for the keys of both."""
    return {key: value + periods * (value - few[key]) for key, value in many.items() if key in few}


def price_host_update(counts: Counts, shards: float, link: float) -> None:
    """Apply --cpu-offload to `counts`: the optimizer works in host memory, at HOST_MEMORY, and its matmuls on the GPU
    need copies of the `shards`, bytes of parameters, at `link` GB/s."""
    in_memory = 0.0
    for phase in ("optimizer", "update"):
        counts.pop(("seconds", phase, "memory"), None)
        in_memory += counts.get(("bytes", phase, "memory"), 0)
    counts["seconds", "optimizer", "memory"] = in_memory / HOST_MEMORY / 1e9
    if counts.get(("flops", "update", "matmul")):  # in bf16: half of the fp32 shards, both ways
        counts["seconds", "update", "memory"] = shards / link / 1e9


def find_memory(peaks: Peaks, counts: Counts, host: np.ndarray, capacity: float) -> dict[str, Any]:
    """Return a plan's keys about memory, in GiB of the fullest GPU, and the verdict for `capacity`. Streams share no
    memory, so each keeps its own peak."""
    by_stream: dict[int | None, list[np.ndarray]] = {}
    by_phase: dict[str, list[np.ndarray]] = {}
    for (stream, phase, *_), peak in peaks.items():
        by_stream.setdefault(stream, []).append(peak)
        if stream is None:
            by_phase.setdefault(phase, []).append(peak)
    together = by_stream.pop(None)
    by_stream.pop(HOST)
    worst = largest(together)
    total = float(worst.sum()) / base.GIB
    streams = [float(largest(stream_peaks).sum()) / base.GIB for stream_peaks in by_stream.values()]
    beside_tensors = {
        "other streams": sum(streams) - total,
        "fragmentation": sum(streams) * FRAGMENTATION,
        "CUDA and NCCL": base.CONTEXT_GIB + counts["communicators", "run"] * base.NCCL_GIB,
    }
    reserved = total + sum(beside_tensors.values())
    allocator = reserved - beside_tensors["CUDA and NCCL"]
    verdict = find_verdict(allocator, capacity - beside_tensors["CUDA and NCCL"])
    in_all = {"total": total, "allocator": allocator, "reserved": reserved, "host": float(host.sum()) / base.GIB}
    return {
        "memory_gib": by_kind(np.max(together, axis=0)) | in_all,  # each kind at its own peak
        "held_by_streams_gib": streams,
        "beside_tensors_gib": beside_tensors,
        "at_peak_gib": by_kind(worst),  # at the peak of the total
        "peak_at": next(phase for phase, phase_peaks in by_phase.items() if any(peak is worst for peak in phase_peaks)),
        "peaks_gib": {phase: by_kind(largest(phase_peaks)) for phase, phase_peaks in by_phase.items()},
        "capacity_gib": capacity,
        "fits": verdict != "does not fit",
        "verdict": verdict,
    }


def largest(peaks: Iterable[np.ndarray]) -> np.ndarray:
    """Return the peak with the most bytes over all kinds."""
    return max(peaks, key=np.sum)


def by_kind(peak: np.ndarray) -> dict[str, float]:
    """Return a peak's GiB by kind."""
    return dict(zip(KINDS, (peak / base.GIB).tolist(), strict=True))


def list_collectives(counts: Counts) -> list[dict]:
    """Return, for each kind of collective and group size, its calls per step and the GiB that a GPU sends."""
    totals: dict[tuple, float] = collections.defaultdict(float)
    for (name, _, *group), count in counts.items():
        if name in ("calls", "sent_bytes"):
            totals[name, *group] += count
    collectives = []
    for name, kind, ranks, nodes, ranks_per_node in sorted(totals):
        if name == "calls" and ranks > 1:
            sent = totals["sent_bytes", kind, ranks, nodes, ranks_per_node] / base.GIB
            entry = {"collective": kind, "ranks": ranks, "nodes": nodes, "gib": sent}
            entry["calls"] = round(totals[name, kind, ranks, nodes, ranks_per_node])
            collectives.append(entry)
    return collectives
