"""Mixtures: which source each sample of a run comes from, and which of that source's samples it is: a function of the
sample's number and of the mixture's history, which checkpoints record. Independent of what a source holds.

The history is a list of segments. From its first sample on, a segment has sources with weights, which divide samples by
a binary tree: of the first n samples of a node its left part takes floor(left weight / weight of both x n + 1/2). So
the source of any sample, and how many of its source come before it, follow from its number alone. With two or three
sources each is within one sample of its share at any time, with more within two.

A run that streams has N lanes: sample i is the (i // N)-th sample of lane i % N, and how many of a source come before
it in its lane must follow from its number too. There sample i is of the source whose part of [0, 1) has the fractional
part of i times an irrational number: such points lie evenly over all samples and over those of each lane, and sums of
`floor_sum` count them. Each source is within six samples of its share.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from harness import flags
from harness.data.permutation import permuted

MAX_WEIGHT = 2**30  # of all sources
UNIT = 2**64  # parts that [0, 1) is divided into
STEP = (5 * UNIT + math.isqrt(5 * UNIT * UNIT)) // 10  # (5 + sqrt 5) / 10: multiples of few batch sizes are near 1

# ----------------------------------------------------------------------------------------------------------------------
# Shares


@dataclass(frozen=True)
class Node:
    """Two parts of a mixture, each a node or the name of a source."""

    left: "Node | str"
    right: "Node | str"
    left_weight: int
    weight: int  # of both

    def count_left(self, samples: int) -> int:
        """How many of the first `samples` of this node go to the left."""
        return (2 * self.left_weight * samples + self.weight) // (2 * self.weight)


class TreeShares:
    """Sources that divide samples by their weights, in one lane, from a sample on."""

    def __init__(self, weights: dict[str, int], first: int):
        self.tree, self.first = build_tree(weights), first

    def source_of(self, sample: int) -> str:
        """The source of a sample of the run."""
        node, sample = self.tree, sample - self.first
        while isinstance(node, Node):
            before = node.count_left(sample)
            if node.count_left(sample + 1) > before:
                node, sample = node.left, before
            else:
                node, sample = node.right, sample - before
        return node

    def count(self, name: str, lane: int, turns: int) -> int:
        """How many samples of a source come before so many turns of the lane, since the first one here."""
        parts = [(self.tree, max(turns - self.first, 0))]
        while parts:
            node, samples = parts.pop()
            if isinstance(node, Node):
                left = node.count_left(samples)
                parts += [(node.left, left), (node.right, samples - left)]
            elif node == name:
                return samples
        return 0


class LaneShares:
    """Sources that divide samples by their weights, in several lanes."""

    def __init__(self, weights: dict[str, int], lanes: int):
        self.lanes, self.names, total = lanes, list(weights), sum(weights.values())
        borders = [UNIT * sum(list(weights.values())[:number]) // total for number in range(len(weights) + 1)]
        self.parts = dict(zip(self.names, itertools.pairwise(borders), strict=True))

    def source_of(self, sample: int) -> str:
        point = (sample * STEP + UNIT // 2) % UNIT
        return next(name for name, (first, end) in self.parts.items() if first <= point < end)

    def count(self, name: str, lane: int, turns: int) -> int:
        """How many of the first `turns` samples of a lane are of a source."""
        if name not in self.parts:
            return 0
        step, point = self.lanes * STEP, lane * STEP + UNIT // 2  # from turn to turn; at the first one
        first, end = self.parts[name]
        # a point is at or beyond a border where adding UNIT - border takes it over the next whole number
        return floor_sum(turns, UNIT, step, point + UNIT - first) - floor_sum(turns, UNIT, step, point + UNIT - end)


def floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """The sum of (start + i * step) // divisor for i from 0 to before `count`, by Euclid's algorithm (ACL)."""
    total = 0
    while count:
        total += (count - 1) * count // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        top = step * count + start
        count, start, divisor, step = top // divisor, top % divisor, step, divisor
    return total


def as_integers(weights: dict[str, Fraction]) -> dict[str, int]:
    """Weights above 0 as whole numbers of the same proportions, each at least 1; rounded where they would be huge."""
    weights = {name: weight for name, weight in weights.items() if weight > 0}
    common, total = math.lcm(*(weight.denominator for weight in weights.values())), sum(weights.values())
    if common * total > MAX_WEIGHT:
        return {name: max(1, round(weight / total * MAX_WEIGHT)) for name, weight in weights.items()}
    integers = {name: int(weight * common) for name, weight in weights.items()}
    divisor = math.gcd(*integers.values())
    return {name: integer // divisor for name, integer in integers.items()}


def build_tree(weights: dict[str, int]) -> Node | str:
    """Joins the two lightest parts until one is left, as Huffman's code does: roundings of heavy parts add up least."""
    parts: list = [(weight, order, name) for order, (name, weight) in enumerate(weights.items())]
    heapq.heapify(parts)
    order = len(parts)
    while len(parts) > 1:
        left_weight, _, left = heapq.heappop(parts)
        right_weight, _, right = heapq.heappop(parts)
        weight = left_weight + right_weight
        heapq.heappush(parts, (weight, order, Node(left, right, left_weight, weight)))
        order += 1
    return parts[0][2]


@dataclass(frozen=True)
class Segment:
    """What a run is mixed of from one sample on."""

    first: int  # global sample
    weights: dict[str, Fraction]  # shares of the tokens, up to a common factor
    per_sample: dict[str, Fraction]  # tokens in a sample of each source, on average

    def shares(self) -> dict[str, float]:
        """Each source's share of the tokens."""
        total = sum(self.weights.values())
        return {name: float(weight / total) for name, weight in self.weights.items()}

    def describe(self) -> str:
        """The sources with their shares: `web 70 %, code 30 %`."""
        return ", ".join(f"{name} {100 * share:.4g} %" for name, share in self.shares().items() if share)


class Mixture:
    """A history, and the order that follows from it."""

    def __init__(self, history: list[Segment], lanes: int = 1):
        self.history, self.lanes = history, lanes
        self.firsts = [segment.first for segment in history]
        self.names = list(dict.fromkeys(name for segment in history for name in segment.weights))
        self.shares: list[TreeShares | LaneShares] = []
        for segment in history:
            weights = as_integers({name: w / segment.per_sample[name] for name, w in segment.weights.items()})
            self.shares.append(TreeShares(weights, segment.first) if lanes == 1 else LaneShares(weights, lanes))

    def segment_of(self, sample: int) -> int:
        """The number of the segment that a sample is in."""
        return bisect.bisect_right(self.firsts, sample) - 1

    def locate(self, sample: int) -> tuple[str, int, int]:
        """(the source of a sample, its lane, how many samples of that source come before it in the lane)."""
        number, lane = self.segment_of(sample), sample % self.lanes
        name = self.shares[number].source_of(sample)
        return name, lane, self.count(name, lane, sample)

    def count(self, name: str, lane: int, samples: int) -> int:
        """How many of the first `samples` of the run are of a source and in a lane."""
        found = 0
        for number, first in enumerate(self.firsts):
            end = samples
            if number + 1 < len(self.firsts):
                end = min(samples, self.firsts[number + 1])
            if end <= first:
                break
            before, after = (self.shares[number].count(name, lane, self.turns(lane, edge)) for edge in (first, end))
            found += after - before
        return found

    def turns(self, lane: int, samples: int) -> int:
        """How many of the first `samples` of the run are in a lane."""
        return (samples - lane + self.lanes - 1) // self.lanes

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` of the run are of each source."""
        lanes = range(self.lanes)
        return {name: sum(self.count(name, lane, samples) for lane in lanes) for name in self.names}

    def shares_at(self, sample: int) -> dict[str, float]:
        """The share of the tokens that each source has at a sample."""
        return self.history[self.segment_of(sample)].shares()


def begin_history(
    weights: dict[str, Fraction],
    per_sample: dict[str, Fraction],
    stages: list[flags.Stage],
    num_steps: int,
    samples_per_step: int,
    steps_before: int = 0,
    first: int = 0,
) -> list[Segment]:
    """The segments of a run from sample `first` on, which comes after so many steps: the weights, then each stage from
    the step on that is nearest to its share of the planned run. Stages that would have begun earlier begin there."""
    segments = [Segment(first, weights, per_sample)]
    for stage in stages:
        begin = first + (round(stage.begin * num_steps) - steps_before) * samples_per_step
        if begin <= first:
            segments.clear()
        segments.append(Segment(max(begin, first), stage.weights, per_sample))
    return segments


class WindowOrder:
    """Which window of a source each of its samples is: each epoch is one permutation of its windows, so nothing repeats
    before all is seen. A pure function of (seed, name, sample); with no name, of (seed, sample)."""

    def __init__(self, windows: int, seed: int, name: str | None = None):
        self.windows = windows
        self.key = f"{seed}" if name is None else f"{seed} {name!r}"  # sources of one length are not read side by side

    def window_of(self, sample: int) -> int:
        """The window that the source's sample of this number is."""
        epoch, offset = divmod(sample, self.windows)
        return permuted(offset, self.windows, f"{self.key} {epoch}")

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, sample: int) -> int:
        """A window of the first epoch, which is a sequence of them."""
        if not 0 <= sample < self.windows:
            raise IndexError(sample)
        return self.window_of(sample)


# ----------------------------------------------------------------------------------------------------------------------
# The record


@dataclass(frozen=True)
class StepSize:
    """From an optimizer step on, how many samples a step takes."""

    steps_before: int
    samples_before: int
    samples: int  # of each step


@dataclass(frozen=True)
class DataRecord:
    """What a checkpoint records of a run's data, so far and as planned: from it a resumed run, and `--show-samples`,
    know which sample comes when."""

    sources: dict[str, dict[str, Any]]  # by name: the rules by which each is read, and what tells it from others
    plain: str | None  # whose order is independent of its name: the only source at the run's first start
    lanes: int
    asked: dict[str, Any]  # the weights and stages of the command line
    history: list[Segment]
    step_sizes: list[StepSize]
    removed: dict[str, dict[str, Any]] = field(default_factory=dict)  # earlier sources may come back

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        record = dataclasses.asdict(self)
        for segment in record["history"]:
            for name in ("weights", "per_sample"):
                segment[name] = {source: str(number) for source, number in segment[name].items()}
        return record

    def samples_of_step(self, step: int) -> range:
        """The global samples of an optimizer step; steps count from 1."""
        latest = self.step_sizes[0]
        for size in self.step_sizes:
            if size.steps_before < step:
                latest = size
        first = latest.samples_before + (step - 1 - latest.steps_before) * latest.samples
        return range(first, first + latest.samples)

    def step_of_sample(self, sample: int) -> int:
        """The optimizer step, from 1 on, that takes a global sample."""
        latest = [size for size in self.step_sizes if size.samples_before <= sample][-1]
        return latest.steps_before + (sample - latest.samples_before) // latest.samples + 1


def read_record(manifest: dict[str, Any]) -> DataRecord:
    """What a checkpoint's manifest records."""
    record = manifest["data"]
    history = []
    for segment in record["history"]:
        weights = {name: Fraction(weight) for name, weight in segment["weights"].items()}
        per_sample = {name: Fraction(tokens) for name, tokens in segment["per_sample"].items()}
        history.append(Segment(segment["first"], weights, per_sample))
    sizes = [StepSize(**size) for size in record["step_sizes"]]
    return DataRecord(**record | {"history": history, "step_sizes": sizes})


def renamed(record: DataRecord, name: str) -> DataRecord:
    """The record of a run of one source that is called differently now, as a file that was moved is."""
    (old,) = record.sources

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {name if key == old else key: value for key, value in values.items()}

    history = [Segment(part.first, rename(part.weights), rename(part.per_sample)) for part in record.history]
    return dataclasses.replace(
        record,
        sources=rename(record.sources),
        plain=name if record.plain == old else record.plain,
        asked=record.asked | {"weights": rename(record.asked["weights"])},
        history=history,
    )


def record_of_run(
    settings: flags.Settings,
    sources: dict[str, dict[str, Any]],
    weights: dict[str, Fraction],
    per_sample: dict[str, Fraction],
    samples_per_step: int,
    lanes: int,
    before: DataRecord | None = None,
    step: int = 0,
    samples: int = 0,
) -> DataRecord:
    """The record of a run that begins, or goes on after `step` steps and `samples` samples.

    Args:
        sources: the rules of each source.
        weights: of each source; `per_sample` the tokens of one of its samples, on average.
        before: what its checkpoint recorded; None for a new run.
    """
    given = {source.name: None if source.weight is None else str(source.weight) for source in settings.sources()}
    asked = {"weights": given, "stages": list(settings.mixture_stage or ())}
    stages = flags.stages_of(settings.mixture_stage)
    planned = begin_history(weights, per_sample, stages, settings.num_steps, samples_per_step, step, samples)
    if before is None:
        plain = next(iter(sources)) if len(sources) == 1 else None
        return DataRecord(sources, plain, lanes, asked, planned, [StepSize(0, 0, samples_per_step)])
    sizes, history = before.step_sizes, before.history
    if sizes[-1].samples != samples_per_step:
        sizes = [*sizes, StepSize(step, samples, samples_per_step)]
    if not same_mixture(before.asked, asked):
        history = [segment for segment in history if segment.first < planned[0].first] + planned
    known = before.removed | before.sources
    removed = {name: rules for name, rules in known.items() if name not in sources}
    return DataRecord(sources, before.plain, before.lanes, asked, history, sizes, removed)


def same_mixture(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights and stages that were asked for are the same shares, as 5 and 3 are 0.625 and 0.375."""

    def shares(weights: dict[str, Any]) -> dict[str, Fraction | None]:
        numbers = {name: None if weight is None else Fraction(weight) for name, weight in weights.items()}
        if len(numbers) == 1:
            return dict.fromkeys(numbers, Fraction(1))
        total = sum(number for number in numbers.values() if number)
        return {name: number and number / total for name, number in numbers.items()}

    def stages(texts: list[str]) -> list[tuple]:
        # a source that a stage does not name has no share in it
        parsed = flags.stages_of(tuple(texts))
        return [(stage.begin, {n: share for n, share in shares(stage.weights).items() if share}) for stage in parsed]

    same_weights = shares(one["weights"]) == shares(other["weights"])
    return same_weights and stages(one["stages"]) == stages(other["stages"])


def describe_changes(before: DataRecord, now: DataRecord, samples: int) -> list[str]:
    """What changed in a run's mixture since its checkpoint, after so many samples, in words."""
    changes = [f"source {name} added" for name in now.sources if name not in before.sources]
    changes += [f"source {name} removed" for name in before.sources if name not in now.sources]
    if not same_mixture(before.asked, now.asked):
        old, new = ([part for part in record.history if part.first <= samples][-1] for record in (before, now))
        changes.append(f"mixture {old.describe()} -> {new.describe()}")
    return changes
