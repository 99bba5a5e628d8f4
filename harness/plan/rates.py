"""Rates: how long a device takes for the operators, compiled regions and collectives of a step. Measured on it, in the
file that `measure` writes, else assumed by `gpus`. Called by `predict`. Independent of how a step was recorded."""

import dataclasses
import itertools
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from harness.base import UserError, find_gpu, first_line

LINK_HOP, NETWORK_HOP = 1.9e-6, 4.0e-6  # seconds for each step of a ring: NCCL's tuning model (tuning.cc, LL128)
# Of the time of a collective that runs beside computation, the share by which it slows that down: NCCL takes
# multiprocessors, memory bandwidth and power. One number for the runs on several GPUs in the first table of published
# runs in docs/PLAN.md.
CONTENTION = 0.8
HOST_LINK, HOST_MEMORY = 25.0, 100.0  # GB/s, for --cpu-offload: pinned copies over PCIe, Adam in host memory; assumed
# Grouped matmuls of experts, of the rate of other matmuls: of torch's on an H100 with 128 experts of 2048 x 768, 8 of
# them for each of 32,768 tokens, the whole forward pass takes 10.2 ms (ByteDance-Seed/VeOmni#460). Less the 3.3 ms in
# which 10 GB of permuted rows are moved, that is 0.56 of what a plan takes for other matmuls there.
GROUPED_SHARE = 0.56
PHASES = ("forward", "backward", "optimizer")  # of a step
DIVIDES_WORK = ("all_to_all", "all_gather")  # what an optimizer moves while it computes something else
LIST = "a list"  # shape of an operator over many tensors, whose time is in proportion to their bytes


class Operator(NamedTuple):
    """A piece of work of a step. Those of one kind take time in proportion to their size."""

    kind: str  # operator and dtypes, `region` and a hash of its operators, `fused` for a kernel of no known region
    shape: str  # of its tensors
    flops: float  # that it executes
    nbytes: float  # that it reads and writes

    @property
    def unit(self) -> str:
        """Which rate bounds it: matmul, fp8, attention or memory."""
        if self.kind.startswith("attention"):
            return "attention"
        if not self.flops:
            return "memory"
        return "fp8" if "scaled_mm" in self.kind else "matmul"


class Time(NamedTuple):
    """Seconds, and their source: measured at that size, scaled from another, or assumed."""

    seconds: float
    source: str


@dataclasses.dataclass
class Rates:
    """What a plan computes with. A section of a rates file is what was measured with so many ranks on a node at once;
    `measured` is the one that is used, empty where nothing was measured."""

    device: str
    memory_gib: float
    peak_tflops: float | None
    assumed: dict[str, float]  # TFLOPS, GB/s and microseconds: the names of `gpus.find_rates`
    on_gpu: bool = True  # where collectives and launches run beside the computation
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""  # of what is not assumed, in words
    taken: str = ""  # what a name that fits several kinds was taken for
    sections: dict[str, dict] = dataclasses.field(default_factory=dict)

    def with_ranks(self, local_ranks: int) -> "Rates":
        """What was measured with as many ranks on a node, or the nearest number; the same object where nothing was."""
        if not self.sections:
            return self
        ranks = min(self.sections, key=lambda ranks: abs(math.log(int(ranks) / local_ranks)))
        return dataclasses.replace(self, measured=self.sections[ranks])

    def time_of(self, operator: Operator) -> Time | None:
        """Of one operator; None for a compiled region of which nothing is known. Of each kind a section has (shape,
        flops, bytes, seconds)."""
        points = self.measured.get("operators", {}).get(operator.kind)
        if points:
            return self.scale(operator, points)
        if operator.kind.startswith("region"):
            return None
        unit, rates = operator.unit, self.assumed | self.measured.get("rates", {})
        seconds = operator.nbytes / rates["memory_gb_per_s"] / 1e9
        if unit != "memory":  # a CPU that was measured without one of them does it as it multiplies matrices
            rate = rates.get(f"{unit}_tflops") or rates["matmul_tflops"]
            if "_grouped_mm" in operator.kind:
                rate *= GROUPED_SHARE
            seconds = max(seconds, operator.flops / rate / 1e12)
        name = "memory_gb_per_s" if unit == "memory" else f"{unit}_tflops"
        source = "scaled" if name in self.measured.get("rates", {}) else "assumed"
        least = self.measured["launch_us"] if self.measured else rates["kernel_us"]
        return Time(max(seconds, least / 1e6), source)

    def scale(self, operator: Operator, points: list[tuple]) -> Time:
        """Of an operator whose kind was measured: at its shape, else in proportion to the nearest size."""
        work = operator.flops or operator.nbytes

        def work_of(point: tuple) -> float:
            _, flops, nbytes, _ = point
            return max(flops if operator.flops else nbytes, 1)

        for point in points:
            if point[0] == operator.shape:
                return Time(point[3] * work / work_of(point), "measured")  # lists differ in size
        nearest = min(points, key=lambda point: abs(math.log(max(work, 1) / work_of(point))))
        seconds = nearest[3]
        least = min(self.measured["launch_us"] / 1e6, seconds)
        return Time(max(seconds * work / work_of(nearest), least), "scaled")

    def time_of_collective(self, kind: str, ranks: int, per_node: int, calls: float, sent: float, whole: float) -> Time:
        """Of `calls` of one kind over `ranks` GPUs, `per_node` of them on a node. In all of them together each GPU
        sends `sent` bytes of buffers of `whole` bytes.

        Raises:
            UserError: it was not measured, on a device of which nothing is assumed.
        """
        points = self.measured.get("collectives", {}).get(f"{kind} {ranks} {per_node}")
        if points and calls:
            return Time(calls * between(points, whole / calls), "measured")
        if ranks == 1 or not calls:
            return Time(0.0, "assumed")
        if not self.assumed:
            advice = f"torchrun --nproc_per_node={per_node} train_fsdp.py --measure and the same flags"
            raise UserError(f"--plan-gpus: {kind} over {ranks} ranks was not measured on {self.device}; {advice}")
        nodes = ranks // per_node
        rate = self.assumed["intra_node_gb_per_s"]
        if nodes > 1:  # every GPU of the node lends the ring its network card
            rate = min(rate, per_node * self.assumed["inter_node_gb_per_s"])
        steps = 2 * math.log2(ranks) / ranks if kind == "all_reduce" else 1  # a tree, not a ring
        latency = (ranks - nodes) * LINK_HOP + (nodes - 1) * NETWORK_HOP
        return Time(sent / rate / 1e9 + calls * latency * steps, "assumed")


def between(points: list[tuple[float, float]], nbytes: float) -> float:
    """Seconds at a size, by the two measured sizes around it; beyond them in proportion."""
    points = sorted(points)
    if nbytes <= points[0][0]:
        return points[0][1]
    for (small, fast), (large, slow) in itertools.pairwise(points):
        if nbytes <= large:
            return fast + (slow - fast) * (nbytes - small) / (large - small)
    return points[-1][1] * nbytes / points[-1][0]


def predict_time(
    counts: dict[tuple, float], operators: dict[tuple, float], parts: dict[Operator, Counter], rates: Rates
) -> dict[str, Any]:
    """Seconds of one optimizer step: of each (phase, operator) its time as often as it runs, one after the other.

    On a GPU collectives run beside the computation of their pass, which they slow down. Exposed is what does not fit
    beside it, and the ends: the first gathers of a step before there is anything to compute, the last reductions after
    everything is computed. An optimizer's are exposed, but those by which it divides its work. Launches run ahead of
    the GPU: the step takes what all kernels take or what all launches take, whichever is more. On a CPU nothing runs
    beside anything, and ranks wait for each other in each collective.
    """
    times = StepTimes()
    add_operators(times, counts, operators, parts, rates)
    add_collectives(times, counts, rates)
    add_host_memory(times, counts)
    host_us = rates.measured["host_us"] if rates.measured else rates.assumed["host_us"]
    host = sum_of(counts, "dispatches") * host_us / 1e6
    compute = {phase: times.compute[phase] for phase in PHASES}
    communication = sum(times.communication.values())
    if rates.on_gpu:
        exposed = times.communication["optimizer"] - times.divides_work
        beside = dict(times.communication) | {"optimizer": times.divides_work}
        for phase in PHASES:
            ends = times.ends[phase]
            exposed += ends + max(0.0, beside.get(phase, 0.0) - ends - compute[phase])
        contention = CONTENTION * (communication - exposed)
        launches = max(0.0, host - sum(compute.values()) - exposed - contention)
    else:
        communication += sum_of(counts, "calls") * rates.measured["wait_us"] / 1e6
        exposed, contention, launches = communication, 0.0, host
        times.sources["measured" if rates.measured else "assumed"] += host
    in_all = max(sum(times.sources.values()), 1e-12)
    return {
        "matmul": times.units["matmul"],
        "attention": times.units["attention"],
        "memory": times.units["memory"],
        "optimizer": times.units["optimizer"],
        "launches": launches,
        "communication": communication,
        "exposed": exposed,
        "contention": contention,
        "step": sum(compute.values()) + exposed + contention + launches,
        "sources": {source: seconds / in_all for source, seconds in times.sources.items()},
    }


class StepTimes:
    """Seconds of a step's parts, while they are added up."""

    def __init__(self):
        self.units = Counter()  # matmul, attention, memory, and the optimizer's step as a whole
        self.compute = Counter()  # of each phase
        self.communication = Counter()  # of each phase
        self.divides_work = 0.0  # of the optimizer's communication what runs beside its computation
        self.ends = Counter()  # of that what lies at the ends of the step, by phase
        self.sources = Counter()  # measured, scaled, assumed

    def add(self, phase: str, unit: str, time: Time, times: float = 1) -> None:
        self.units["optimizer" if phase == "optimizer" else unit] += time.seconds * times
        self.compute[phase] += time.seconds * times
        self.sources[time.source] += time.seconds * times


def add_operators(times: StepTimes, counts: dict, operators: dict, parts: dict, rates: Rates) -> None:
    """Each operator as often as it runs. A compiled region's time is divided as its parts would take it; where it is
    not known it is the sum of theirs."""
    for (phase, operator), runs in operators.items():
        if operator.shape == LIST:
            operator = operator._replace(nbytes=counts["list_bytes", phase, operator.kind] / runs)
        time = rates.time_of(operator)
        inside = parts.get(operator) or {operator: 1}
        alone = {part: rates.time_of(part) for part in inside}
        total = sum(alone[part].seconds * n for part, n in inside.items())
        for part, n in inside.items():
            unit = "matmul" if part.unit == "fp8" else part.unit
            if time:
                share = Time(time.seconds * alone[part].seconds * n / total, time.source)
                times.add(phase, unit, share, runs)
            else:
                times.add(phase, unit, alone[part], runs * n)


def add_collectives(times: StepTimes, counts: dict, rates: Rates) -> None:
    groups = {key[1:] for key in counts if key[0] in ("calls", "end_calls")}
    for key in sorted(groups):
        phase, *group = key
        calls, sent, whole = (counts.get((name, *key), 0) for name in ("calls", "sent_bytes", "whole_bytes"))
        time = rates.time_of_collective(*group, calls, sent, whole)
        times.communication[phase] += time.seconds
        if phase == "optimizer" and group[0] in DIVIDES_WORK:
            times.divides_work += time.seconds
        times.sources[time.source] += time.seconds
        calls, sent, whole = (counts.get((name, *key), 0) for name in ("end_calls", "end_bytes", "end_whole_bytes"))
        end = rates.time_of_collective(*group, calls, sent, whole)
        times.ends[phase] += end.seconds
        times.sources[end.source] += 0.0  # listed as a source; its time is part of the above


def add_host_memory(times: StepTimes, counts: dict) -> None:
    """What --cpu-offload copies between host and GPU, and its optimizer's step in the host's memory."""
    for name, rate in (("host_link_bytes", HOST_LINK), ("host_bytes", HOST_MEMORY)):
        for phase in PHASES:
            amount = counts.get((name, phase))
            if amount:
                times.add(phase, "memory", Time(amount / rate / 1e9, "assumed"))


def sum_of(counts: dict[tuple, float], name: str) -> float:
    """The sum over all phases and groups of one of StepRecorder's counts."""
    return sum(amount for key, amount in counts.items() if key[0] == name)


# ---- The file --------------------------------------------------------------------------------------------------------


def folder_of_rates(cache_dir: str | None) -> pathlib.Path:
    return pathlib.Path(cache_dir or "~/.cache/train_fsdp").expanduser() / "rates"


def file_of(device: str, cache_dir: str | None) -> pathlib.Path:
    """Where --measure writes what it found on a device of that name."""
    return folder_of_rates(cache_dir) / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read_file(path: pathlib.Path) -> dict:
    """The contents of a rates file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--plan-rates {path}: {first_line(error)}") from error
    if isinstance(contents, dict) and "sections" in contents:
        try:
            check_sections(contents["sections"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"--plan-rates {path}: not as --measure writes it ({first_line(error)})") from error
    return contents


def check_sections(sections: dict[str, dict]) -> None:
    """Checks that sections of a rates file are as they were written.

    Raises:
        ValueError, or what Python raises for a missing key or another type.
    """
    for ranks, section in sections.items():
        numbers = [int(ranks), section["launch_us"], section["host_us"], section["wait_us"]]
        numbers += section["rates"].values()
        for points in (*section["operators"].values(), *section["collectives"].values()):
            for point in points:
                numbers += [number for number in point if not isinstance(number, str)]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a number is negative or not finite")


def find_file(device: str, cache_dir: str | None) -> pathlib.Path | None:
    """The newest file that --measure wrote on this kind of device.

    Raises:
        UserError: a rates file cannot be read.
    """
    kind = find_gpu(device)
    paths = []
    for path in folder_of_rates(cache_dir).glob("*.json"):
        contents = read_file(path)
        name = contents.get("device", "") if isinstance(contents, dict) else ""
        if name == device or (kind and find_gpu(name) is kind):
            paths.append(path)
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def merge(path: pathlib.Path, new: dict) -> dict:
    """`new` with the sections and operators that an earlier measurement by the same versions left in the file."""
    try:
        old = read_file(path) if path.exists() else {}
    except UserError:  # damaged: it is written anew
        old = {}
    if old.get("versions") != new["versions"] or old.get("device") != new["device"]:
        return new
    for ranks, section in new["sections"].items():
        before = old["sections"].get(ranks, {"operators": {}, "collectives": {}})
        for table in ("operators", "collectives"):
            for kind, points in before[table].items():
                known = {point[0] for point in section[table].get(kind, [])}
                section[table].setdefault(kind, []).extend(point for point in points if point[0] not in known)
    return new | {"sections": old["sections"] | new["sections"]}


def summarize(operators: Iterable[tuple[Operator, float]]) -> dict[str, float]:
    """The rates of measured operators by what bounds them: TFLOPS of matmul, fp8 and attention, GB/s of memory."""
    totals = Counter()
    for operator, seconds in operators:
        if not operator.kind.startswith("region"):
            totals[operator.unit] += operator.flops or operator.nbytes
            totals[operator.unit, "seconds"] += seconds
    rates = {}
    for unit in ("matmul", "fp8", "attention", "memory"):
        if totals[unit]:
            name, scale = ("memory_gb_per_s", 1e9) if unit == "memory" else (f"{unit}_tflops", 1e12)
            rates[name] = totals[unit] / totals[unit, "seconds"] / scale
    return rates
