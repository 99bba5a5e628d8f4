"""Rates: how long a device takes for the operators, compiled regions and collectives of a step. Measured on it, in the
file that `measuring` writes, else assumed by `gpus`. Called by `planning`. It does not know how a step was recorded."""

import dataclasses
import itertools
import json
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from harness.base.errors import UserError
from harness.base.gpu_table import find_gpu
from harness.base.text import first_line

LINK_HOP, NETWORK_HOP = 1.9e-6, 4.0e-6  # seconds for each step of a ring: NCCL's tuning model (tuning.cc, LL128)
# Of the time of a collective that runs beside computation, the share by which it slows that down: NCCL takes
# multiprocessors, memory bandwidth and power. One number for the published runs on several GPUs in docs/PLAN.md.
CONTENTION = 0.8
HOST_LINK, HOST_MEMORY = 25.0, 100.0  # GB/s, for --cpu-offload: pinned copies over PCIe, Adam in host memory; assumed
LIST = "a list"  # shape of an operator over many tensors, whose time goes with their bytes


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
        return ("fp8" if "scaled_mm" in self.kind else "matmul") if self.flops else "memory"


class Time(NamedTuple):
    """Seconds, and where they are from: measured at that size, scaled from another, or assumed."""

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
    overlaps: bool = True  # collectives and launches run beside the computation: a GPU
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
        if points := self.measured.get("operators", {}).get(operator.kind):
            work = operator.flops or operator.nbytes
            size = lambda point: max(point[1] if operator.flops else point[2], 1)  # noqa: E731
            if exact := next((point for point in points if point[0] == operator.shape), None):
                return Time(exact[3] * work / size(exact), "measured")  # lists differ in size
            near = min(points, key=lambda point: abs(math.log(max(work, 1) / size(point))))
            least = min(self.measured["launch_us"] / 1e6, near[3])
            return Time(max(near[3] * work / size(near), least), "scaled")
        if operator.kind.startswith("region"):
            return None
        unit, rates = operator.unit, self.assumed | self.measured.get("rates", {})
        seconds = operator.nbytes / rates["memory_gb_per_s"] / 1e9
        if unit != "memory":  # a processor that was measured without one of them does it as it multiplies matrices
            rate = rates.get(f"{unit}_tflops") or rates["matmul_tflops"]
            seconds = max(seconds, operator.flops / rate / 1e12)
        of_class = "memory_gb_per_s" if unit == "memory" else f"{unit}_tflops"
        source = "scaled" if of_class in self.measured.get("rates", {}) else "assumed"
        least = self.measured["launch_us"] if self.measured else rates["kernel_us"]
        return Time(max(seconds, least / 1e6), source)

    def time_of_collective(self, kind: str, ranks: int, near: int, calls: float, sent: float, whole: float) -> Time:
        """Of `calls` of one kind over `ranks` GPUs, `near` of them on a node: each sends `sent` bytes in all of buffers
        of `whole` bytes."""
        points = self.measured.get("collectives", {}).get(f"{kind} {ranks} {near}")
        if points and calls:
            return Time(calls * between(points, whole / calls), "measured")
        if ranks == 1 or not calls:
            return Time(0.0, "assumed")
        if not self.assumed:
            advice = f"torchrun --nproc_per_node={near} train_fsdp.py --measure and the same flags"
            raise UserError(f"--plan-gpus: {kind} over {ranks} ranks was not measured on {self.device}; {advice}")
        nodes = ranks // near
        rate = self.assumed["intra_node_gb_per_s"]
        if nodes > 1:  # every GPU of the node lends the ring its network card
            rate = min(rate, near * self.assumed["inter_node_gb_per_s"])
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
    everything is computed. Launches run ahead of the GPU: the step takes what all kernels take or what all launches
    take, whichever is more. On a CPU nothing runs beside anything, and ranks wait for each other in each collective.
    """
    seconds, communication, sources = Counter(), Counter(), Counter()

    def add(phase: str, name: str, time: Time, times: float) -> None:
        seconds["optimizer" if phase == "optimizer" else name] += time.seconds * times
        seconds[phase, "compute"] += time.seconds * times
        sources[time.source] += time.seconds * times

    for (phase, operator), times in operators.items():
        if operator.shape == LIST:
            operator = operator._replace(nbytes=counts["list_bytes", phase, operator.kind] / times)
        whole = rates.time_of(operator)
        inside = parts.get(operator) or {operator: 1}
        alone = {part: rates.time_of(part) for part in inside}
        total = sum(alone[part].seconds * n for part, n in inside.items())
        for part, n in inside.items():
            name = {"fp8": "matmul"}.get(part.unit, part.unit)
            if whole:  # a region's time, divided as its parts would take it
                add(phase, name, Time(whole.seconds * alone[part].seconds * n / total, whole.source), times)
            else:
                add(phase, name, alone[part], times * n)
    groups = {key[1:] for key in counts if key[0] in ("calls", "end_calls")}
    for phase, *group in sorted(groups):
        for part in ("", "end_"):
            names = ("calls", "bytes" if part else "sent_bytes", "whole_bytes")
            numbers = (counts.get((part + name, phase, *group), 0) for name in names)
            time = rates.time_of_collective(*group, *numbers)
            communication[part, phase] += time.seconds
            sources[time.source] += time.seconds * (not part)
    for what, rate in (("host_link_bytes", HOST_LINK), ("host_bytes", HOST_MEMORY)):
        for phase in ("forward", "backward", "optimizer"):
            if amount := counts.get((what, phase)):
                add(phase, "memory", Time(amount / rate / 1e9, "assumed"), 1)
    whole = sum(amount for (part, _), amount in communication.items() if not part)
    compute = {phase: seconds[phase, "compute"] for phase in ("forward", "backward", "optimizer")}
    host_us = rates.measured["host_us"] if rates.measured else rates.assumed["host_us"]
    host = sum(amount for (what, *_), amount in counts.items() if what == "dispatches") * host_us / 1e6
    sources["measured" if rates.measured else "assumed"] += 0 if rates.overlaps else host
    if rates.overlaps:
        exposed = communication["", "optimizer"]
        for phase in ("forward", "backward"):
            ends = communication["end_", phase]
            exposed += ends + max(0.0, communication["", phase] - ends - compute[phase])
        contention = CONTENTION * (whole - exposed)
        launches = max(0.0, host - sum(compute.values()) - exposed - contention)
    else:
        calls = sum(amount for (what, *_), amount in counts.items() if what == "calls")
        whole += calls * rates.measured["wait_us"] / 1e6
        exposed, contention, launches = whole, 0.0, host
    total = sum(compute.values()) + exposed + contention + launches
    named = {name: seconds[name] for name in ("matmul", "attention", "memory", "optimizer")}
    shares = {source: amount / max(sum(sources.values()), 1e-12) for source, amount in sources.items()}
    named |= {"launches": launches, "communication": whole, "exposed": exposed, "contention": contention}
    return named | {"step": total, "sources": shares}


# ---- The file --------------------------------------------------------------------------------------------------------


def folder_of_rates(cache_dir: str | None) -> pathlib.Path:
    return pathlib.Path(cache_dir or "~/.cache/train_fsdp").expanduser() / "rates"


def file_of(device: str, cache_dir: str | None) -> pathlib.Path:
    """Where --measure writes what it found on a device of that name."""
    return folder_of_rates(cache_dir) / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read_file(path: pathlib.Path) -> dict:
    """A rates file; a UserError where it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--plan-rates {path}: {first_line(error)}") from error
    if isinstance(found, dict) and "sections" in found:
        try:
            check_sections(found["sections"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"--plan-rates {path}: not as --measure writes it ({first_line(error)})") from error
    return found


def check_sections(sections: dict[str, dict]) -> None:
    """Raises ValueError, or what Python does, where sections of a rates file are not as they were written."""
    for ranks, section in sections.items():
        numbers = [int(ranks), *(section[f"{of}_us"] for of in ("launch", "host", "wait")), *section["rates"].values()]
        for points in (*section["operators"].values(), *section["collectives"].values()):
            numbers += [number for point in points for number in point if not isinstance(number, str)]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a number is negative or not finite")


def find_file(device: str, cache_dir: str | None) -> pathlib.Path | None:
    """The newest file that --measure wrote on this kind of device; a UserError for one that cannot be read."""
    kind, found = find_gpu(device), []
    for path in folder_of_rates(cache_dir).glob("*.json"):
        contents = read_file(path)
        name = contents.get("device", "") if isinstance(contents, dict) else ""
        if name == device or (kind and find_gpu(name) is kind):
            found.append(path)
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


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
