"""Predict: the memory, traffic, time and cost of one configuration, from recorded steps and a GPU's rates. Called by
`planning`. Independent of how a step is recorded (`recorder`) and where the rates are from (`gpus`)."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from harness.base import CONTEXT_GIB, GIB, NCCL_GIB, UserError, first_line
from harness.base.torch_internals import ERRORS_WITHOUT_DATA
from harness.flags import Settings
from harness.model.weights import layer_period
from harness.plan.gpus import FRAGMENTATION, verdict_of
from harness.plan.operators import KINDS
from harness.plan.rates import PHASES, Operator, Rates, predict_time

Peaks = dict[tuple, np.ndarray]  # (microbatch, phase, and in a pass the layer): bytes by kind, in the order of KINDS

# The pair's own functions, which a plan drives.
Recipe = collections.namedtuple(
    "Recipe", "resolve build_mesh build_model build_optimizer train_step make_tracker estimate_mfu flops_per_token"
)


@dataclasses.dataclass
class Prediction:
    """What a configuration needs and gives. The fields are keys of --json."""

    gpus: int
    parameters: int
    flops_per_token: int | None  # None where they are not known; there is no MFU then
    memory_gib: dict[str, float]  # each kind at its own worst moment of a step, and total, reserved, host
    held_by_streams_gib: list[float]
    beside_tensors_gib: dict[str, float]  # what the process holds of the card beyond the tensors' peak
    at_peak_gib: dict[str, float]  # each kind at the moment that holds most
    peak_at: str  # phase of that moment
    peaks_gib: dict[str, dict[str, float]]  # of each phase each kind, at the moment of the phase that holds most
    capacity_gib: float
    fits: bool
    verdict: str
    communication_gib_per_step: float
    collectives: list[dict]
    flops_executed: float
    step_time_ms: float
    time_ms: dict[str, float]
    time_sources: dict[str, float]  # the shares of the time that are measured, scaled and assumed
    exposed_communication_percent: float
    tokens_per_sec: float
    tokens_per_sec_per_gpu: float
    mfu_percent: float | None
    hours_per_billion_tokens: float
    cost_per_billion_tokens: float | None  # in dollars; None, and no key of --json, without --gpu-hour-usd

    def to_json(self) -> dict[str, Any]:
        result = dataclasses.asdict(self)
        if self.cost_per_billion_tokens is None:
            del result["cost_per_billion_tokens"]
        return result


@dataclasses.dataclass
class Step:
    """One optimizer step of the model at its full depth, as rank 0 takes it."""

    peaks: Peaks
    stream_peaks: list[Peaks]  # of what was allocated in each CUDA stream, the default one first
    counts: dict[tuple, float]
    operators: dict[tuple[str, Operator], float]  # (phase, operator): how often it runs
    parts: dict[Operator, collections.Counter]  # of a compiled region


@dataclasses.dataclass
class Memory:
    """GiB of the fullest GPU; of dicts by kind see the fields of `Prediction`."""

    kinds: dict[str, float]
    at_peak: dict[str, float]
    peak_at: str
    phases: dict[str, dict[str, float]]
    total: float
    streams: list[float]
    beside_tensors: dict[str, float]
    reserved: float


def predict(settings: Settings, recipe: Recipe, config, world: int, rates: Rates, flops: int) -> Prediction:
    """What this configuration needs and gives on `world` GPUs; `flops` are those of a token, 0 where they are not
    known.

    Raises:
        UserError: the model reads its data to decide what it computes, or a collective was not measured.
    """
    model, period = layer_period(config)
    step = record_whole_step(settings, recipe, config, world, period, rates.on_gpu)
    host = move_states_to_host(step, settings) if settings.cpu_offload else np.zeros(len(KINDS))
    collectives = list_collectives(step.counts)
    memory = find_memory(step, collectives)
    rates_of_node = rates.with_ranks(min(world, settings.gpus_per_node))
    seconds = predict_time(step.counts, step.operators, step.parts, rates_of_node)
    tokens = settings.tokens_per_step(world)
    speed = recipe.estimate_mfu(flops, tokens, seconds["step"], world, rates.peak_tflops or 0)
    hours = 1e9 / speed["tokens_per_sec"] / 3600
    cost = hours * world * settings.gpu_hour_usd if settings.gpu_hour_usd else None
    return Prediction(
        gpus=world,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops_per_token=flops or None,
        memory_gib=memory.kinds | {"total": memory.total, "reserved": memory.reserved, "host": float(host.sum()) / GIB},
        held_by_streams_gib=memory.streams,
        beside_tensors_gib=memory.beside_tensors,
        at_peak_gib=memory.at_peak,
        peak_at=memory.peak_at,
        peaks_gib=memory.phases,
        capacity_gib=rates.memory_gib,
        fits=memory.reserved <= rates.memory_gib,
        verdict=verdict_of(memory.reserved, rates.memory_gib),
        communication_gib_per_step=sum(entry["gib"] for entry in collectives),
        collectives=collectives,
        flops_executed=sum(operator.flops * times for (_, operator), times in step.operators.items()),
        step_time_ms=1000 * seconds["step"],
        time_ms={name: 1000 * value for name, value in seconds.items() if name not in ("step", "sources")},
        time_sources=seconds["sources"],
        exposed_communication_percent=100 * seconds["exposed"] / seconds["step"],
        tokens_per_sec=speed["tokens_per_sec"],
        tokens_per_sec_per_gpu=speed["tokens_per_sec"] / world,
        mfu_percent=speed.get("mfu_percent") if flops else None,
        hours_per_billion_tokens=hours,
        cost_per_billion_tokens=cost,
    )


def record_whole_step(settings: Settings, recipe: Recipe, config, world: int, period: int, on_gpu: bool = True) -> Step:
    """A step at the full depth. Two shallow models, one `period` of layers apart, are recorded and extrapolated, which
    is exact where layers are alike: memory and counts are linear in depth, and a maximum over layers lies at the first
    or the last of a kind. A model that is not deeper than these is recorded as it is."""
    from harness.plan.recorder import record_step  # loads what only a plan needs

    layers = config.get_text_config().num_hidden_layers
    edge = max(period, 2)  # layers at each end whose peaks are kept apart
    shallow = 2 * edge + (layers - 2 * edge) % period
    depths = [shallow, shallow + period] if shallow + period < layers else [layers]
    try:
        records = [record_step(settings, recipe, config, world, depth, edge, on_gpu) for depth in depths]
    except ERRORS_WITHOUT_DATA as error:
        why = f"{config.model_type} reads its data to decide what it computes, and a plan has none"
        raise UserError(f"--plan: {why} ({first_line(error)})") from error
    few, many = records[0], records[-1]
    periods = (layers - depths[-1]) / period if len(depths) == 2 else 0

    operators = extrapolate(few.operators, many.operators, periods)
    for key, times in many.operators.items():
        if key not in few.operators:  # its shape depends on the depth, so it runs once
            operators[key] = times
    streams = range(max(many.pools) + 1)
    return Step(
        peaks=extrapolate(few.peaks(), many.peaks(), periods),
        stream_peaks=[extrapolate(few.peaks(stream), many.peaks(stream), periods) for stream in streams],
        counts=extrapolate(few.counts, many.counts, periods),
        operators=operators,
        parts=many.parts,
    )


def extrapolate(few: dict, many: dict, periods: float) -> dict:
    """What both dicts have, `periods` times as far beyond `many` as `many` is beyond `few`."""
    return {key: value + periods * (value - few[key]) for key, value in many.items() if key in few}


def move_states_to_host(step: Step, settings: Settings) -> np.ndarray:
    """--cpu-offload: parameters, gradients and states leave the GPU's peaks of `step`, the optimizer runs in the host's
    memory, and copies cross the link between both. Returns the most bytes that the host holds, by kind."""
    is_on_gpu = np.array([kind in ("activations", "communication") for kind in KINDS])
    host = max((peak * ~is_on_gpu for peak in step.peaks.values()), key=np.sum)
    for peaks in (step.peaks, *step.stream_peaks):
        for key in peaks:
            peaks[key] = peaks[key] * is_on_gpu
    shards = host[KINDS.index("parameters")]
    copies = 3 if settings.zero_stage == 3 else 2  # the gathers of a microbatch's passes, and its gradients back
    step.counts["host_link_bytes", "backward"] = shards * copies * settings.gradient_accumulation_steps
    step.counts["host_link_bytes", "optimizer"] = step.counts.get(("shard_bytes", "optimizer"), 0)

    moved = 0.0
    for phase, operator in list(step.operators):
        if phase == "optimizer" and not operator.flops:  # matrix products stay on the GPU
            moved += step.operators.pop((phase, operator)) * operator.nbytes
    moved += sum(size for key, size in step.counts.items() if key[:2] == ("list_bytes", "optimizer"))
    step.counts["host_bytes", "optimizer"] = moved
    return host


def find_memory(step: Step, collectives: list[dict]) -> Memory:
    """GiB of a GPU. A stream's memory serves no other stream, so each keeps what it held at its own peak."""
    key, peak = max(step.peaks.items(), key=lambda item: item[1].sum())
    total = float(peak.sum()) / GIB
    streams = [float(largest(peaks.values()).sum()) / GIB for peaks in step.stream_peaks]
    communicators = len({(entry["ranks"], entry["per_node"]) for entry in collectives})
    beside_tensors = {
        "other streams": sum(streams) - total,
        "fragmentation": sum(streams) * FRAGMENTATION,
        "CUDA and NCCL": CONTEXT_GIB + communicators * NCCL_GIB,
    }
    phases = {}
    for phase in ("build", "forward", "head", "backward", "optimizer"):
        peaks = [of_phase for (_, name, *_), of_phase in step.peaks.items() if name == phase]
        if peaks:
            phases[phase] = by_kind(largest(peaks))
    after_build = [of_phase for (_, name, *_), of_phase in step.peaks.items() if name != "build"]
    return Memory(
        kinds=by_kind(np.max(after_build, axis=0)),
        at_peak=by_kind(peak),
        peak_at=key[1],
        phases=phases,
        total=total,
        streams=streams,
        beside_tensors=beside_tensors,
        reserved=sum(streams) * (1 + FRAGMENTATION) + CONTEXT_GIB + communicators * NCCL_GIB,
    )


def largest(peaks: Iterable[np.ndarray]) -> np.ndarray:
    """The peak with the most bytes of all kinds together."""
    return max(peaks, key=np.sum)


def by_kind(peak: np.ndarray) -> dict[str, float]:
    """GiB of a peak's kinds; the average is among them with --ema only."""
    gib = dict(zip(KINDS, (peak / GIB).tolist(), strict=True))
    if not gib["average"]:
        del gib["average"]
    return gib


def list_collectives(counts: dict[tuple, float]) -> list[dict]:
    """Of each kind of collective, number of ranks and number of those on a node: how often it runs in a step, and the
    GiB that a GPU sends, in all and between nodes."""
    collectives = []
    groups = {key[2:] for key in counts if key[0] == "calls"}  # ("calls", phase, kind, ranks, per_node)
    for kind, ranks, per_node in sorted(groups):
        if ranks == 1:
            continue
        calls = sum(counts.get(("calls", phase, kind, ranks, per_node), 0) for phase in PHASES)
        sent = sum(counts.get(("sent_bytes", phase, kind, ranks, per_node), 0) for phase in PHASES) / GIB
        between_nodes = 0.0
        if per_node < ranks:  # of a ring's hops one in per_node leaves the node
            between_nodes = sent / per_node
        collectives.append(
            {
                "collective": kind,
                "ranks": ranks,
                "per_node": per_node,
                "calls": round(calls),
                "gib": sent,
                "gib_between_nodes": between_nodes,
            }
        )
    return collectives
