"""Mixtures: which source each sample of a run comes from, and which of that source's samples it is.

A source has a cursor: how many of its samples were taken. A segment of a run has sources with weights, and the cursors
with which it begins. Its samples are in blocks of `BLOCK`: how many of a block come from each source follows from the
weights and the block's number, their order from the seed and the number of its first sample. So any sample is found
without those before it, on any ranks. Other weights begin a new segment, in which each source is read on from where it
was.

A run that streams has N lanes: sample i is in lane i % N, and a source has a cursor in each. How many of a source come
before a sample in its lane is counted, block by block, from the segment's first sample on.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from harness import flags
from harness.data.permutation import permuted, spread

BLOCK = 1024  # samples
MAX_BLOCKS = 64  # whose order is kept

# ----------------------------------------------------------------------------------------------------------------------
# Shares


@dataclass(frozen=True)
class Segment:
    """What a run is mixed of from one sample on."""

    first: int  # global sample
    weights: dict[str, Fraction]  # shares of the tokens, up to a common factor
    per_sample: dict[str, Fraction]  # tokens in a sample of each source, on average
    cursors: dict[str, list[int]] = field(default_factory=dict)  # by source, in each lane; of those not here they are 0

    def shares(self) -> dict[str, float]:
        """Each source's share of the tokens."""
        total = sum(self.weights.values())
        return {name: float(weight / total) for name, weight in self.weights.items()}

    def describe(self) -> str:
        """The sources with their shares: `web 70 %, code 30 %`."""
        return ", ".join(f"{name} {100 * share:.4g} %" for name, share in self.shares().items() if share)

    @functools.cached_property
    def sample_weights(self) -> dict[str, int]:
        """Each source's share of the samples, up to a common factor, the heaviest first."""
        weights = {name: weight / self.per_sample[name] for name, weight in self.weights.items() if weight}
        common = math.lcm(*(weight.denominator for weight in weights.values()))
        return {name: int(weights[name] * common) for name in sorted(weights, key=lambda name: -weights[name])}

    def divide(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` come from each source, where these are whole blocks: from the heaviest on,
        each takes its share of what is left, rounded. With up to three sources each is within one sample of its share,
        with up to ten within two. More samples never give a source fewer; by largest remainder they could."""
        counts, left, total = {}, samples, sum(self.sample_weights.values())
        for name, weight in self.sample_weights.items():
            counts[name] = (2 * weight * left + total) // (2 * total)
            left, total = left - counts[name], total - weight
        return counts


class Block(NamedTuple):
    """The sources of the samples of a block, by their numbers in `Mixture.names`."""

    first: int  # global sample
    taken: list[int]  # samples of each source before the block, in all lanes
    order: np.ndarray  # the source of each sample


class Mixture:
    """The segments of a run, and the order that follows from them and from the seed."""

    def __init__(self, segments: list[Segment], seed: int, lanes: int = 1):
        self.segments, self.seed, self.lanes = segments, seed, lanes
        self.firsts = [segment.first for segment in segments]
        known = [name for segment in segments for name in (*segment.weights, *segment.cursors)]
        self.names = list(dict.fromkeys(known))
        self.blocks: dict[int, Block] = {}  # by first sample, the last ones that were asked for
        self.counted: tuple[int, np.ndarray] = (-1, np.empty(0))  # the first sample of a block, the cursors there

    def segment_at(self, sample: int) -> Segment:
        """The segment that a sample is in."""
        return self.segments[bisect.bisect_right(self.firsts, sample) - 1]

    def block_at(self, sample: int) -> Block:
        """The block that a sample is in."""
        segment = self.segment_at(sample)
        first = sample - (sample - segment.first) % BLOCK
        if first not in self.blocks:
            if len(self.blocks) == MAX_BLOCKS:
                self.blocks.clear()
            before, after = (segment.divide(end - segment.first) for end in (first, first + BLOCK))
            taken = [sum(segment.cursors.get(name, ())) + before.get(name, 0) for name in self.names]
            parts = spread([after[name] - before[name] for name in after], f"{self.seed} mixture {first}")
            sources = np.array([self.names.index(name) for name in after])
            self.blocks[first] = Block(first, taken, sources[parts])
        return self.blocks[first]

    def locate(self, sample: int) -> tuple[str, int]:
        """(the source of a sample, how many samples of that source come before it)."""
        block = self.block_at(sample)
        order = block.order[: sample - block.first + 1]
        source = int(order[-1])
        return self.names[source], block.taken[source] + int(np.count_nonzero(order[:-1] == source))

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` of the run are of each source."""
        block = self.block_at(samples)
        inside = np.bincount(block.order[: samples - block.first], minlength=len(self.names))
        return {name: block.taken[number] + int(inside[number]) for number, name in enumerate(self.names)}

    def number_in_lane(self, sample: int) -> int:
        """How many samples of its source come before a sample in its lane."""
        name, _ = self.locate(sample)
        return int(self.count_lanes(sample)[self.names.index(name), sample % self.lanes])

    def cursors(self, samples: int) -> dict[str, list[int]]:
        """How many of the first `samples` of the run are of each source, in each lane."""
        if self.lanes == 1:
            return {name: [count] for name, count in self.counts(samples).items()}
        return dict(zip(self.names, self.count_lanes(samples).tolist(), strict=True))

    def count_lanes(self, samples: int) -> np.ndarray:
        """How many of the first `samples` of the run are of each source (rows) in each lane (columns)."""
        segment, block = self.segment_at(samples), self.block_at(samples)
        first, cursors = self.counted
        if not segment.first <= first <= block.first:
            zeros = [0] * self.lanes
            first, cursors = segment.first, np.array([segment.cursors.get(name, zeros) for name in self.names])
        while first < block.first:
            first, cursors = first + BLOCK, cursors + self.count_in_block(first, BLOCK)
        self.counted = (first, cursors)
        return cursors + self.count_in_block(first, samples - first)

    def count_in_block(self, first: int, samples: int) -> np.ndarray:
        """As `count_lanes`, of the first `samples` of the block that begins with the sample `first`."""
        lanes = np.arange(first, first + samples) % self.lanes
        places = self.block_at(first).order[:samples] * self.lanes + lanes
        return np.bincount(places, minlength=len(self.names) * self.lanes).reshape(-1, self.lanes)


def with_cursors(begins: list[Segment], seed: int, lanes: int) -> list[Segment]:
    """Segments that follow each other, each with the cursors that those before it leave; the first has its own."""
    segments = begins[:1]
    for begin in begins[1:]:
        cursors = Mixture(segments, seed, lanes).cursors(begin.first)
        segments.append(dataclasses.replace(begin, cursors=cursors))
    return segments


def begin_segments(
    weights: dict[str, Fraction],
    per_sample: dict[str, Fraction],
    stages: list[flags.Stage],
    num_steps: int,
    samples_per_step: int,
    steps_before: int,
    first: int,
) -> list[Segment]:
    """The segments of a run from sample `first` on, which comes after so many steps: the weights, then each stage from
    the step on that is nearest to its share of the planned run. Stages that would have begun earlier begin there. None
    has cursors."""
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

    def window_at(self, sample: int) -> int:
        """The window that the source's sample of this number is."""
        epoch, offset = divmod(sample, self.windows)
        return permuted(offset, self.windows, f"{self.key} {epoch}")

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, sample: int) -> int:
        """A window of the first epoch, which is a sequence of them."""
        if not 0 <= sample < self.windows:
            raise IndexError(sample)
        return self.window_at(sample)


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
    segments: list[Segment]  # a resumed run reads on by the last that has begun, --show-samples by those before it too
    step_sizes: list[StepSize]
    removed: dict[str, dict[str, Any]] = field(default_factory=dict)  # earlier sources may come back

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        record = dataclasses.asdict(self)
        for segment in record["segments"]:
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
    segments = []
    for segment in record["segments"]:
        weights = {name: Fraction(weight) for name, weight in segment["weights"].items()}
        per_sample = {name: Fraction(tokens) for name, tokens in segment["per_sample"].items()}
        segments.append(Segment(segment["first"], weights, per_sample, segment["cursors"]))
    sizes = [StepSize(**size) for size in record["step_sizes"]]
    return DataRecord(**record | {"segments": segments, "step_sizes": sizes})


def renamed(record: DataRecord, names: Collection[str]) -> DataRecord:
    """The record of a run whose sources have these `names` now: the only one may be called differently, as a file that
    was moved is."""
    if not len(record.sources) == len(names) == 1:
        return record
    (old,), (name,) = record.sources, names

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {name if key == old else key: value for key, value in values.items()}

    segments = [
        Segment(part.first, rename(part.weights), rename(part.per_sample), rename(part.cursors))
        for part in record.segments
    ]
    return dataclasses.replace(
        record,
        sources=rename(record.sources),
        plain=name if record.plain == old else record.plain,
        asked=record.asked | {"weights": rename(record.asked["weights"])},
        segments=segments,
    )


def record_of_run(
    settings: flags.Flags,
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
    planned = begin_segments(weights, per_sample, stages, settings.num_steps, samples_per_step, step, samples)
    if before is None:
        plain = next(iter(sources)) if len(sources) == 1 else None
        segments = with_cursors(planned, settings.seed, lanes)
        return DataRecord(sources, plain, lanes, asked, segments, [StepSize(0, 0, samples_per_step)])
    sizes, segments = before.step_sizes, before.segments
    if sizes[-1].samples != samples_per_step:
        sizes = [*sizes, StepSize(step, samples, samples_per_step)]
    if not same_mixture(before.asked, asked):
        begun = [segment for segment in segments if segment.first < samples]
        planned[0] = dataclasses.replace(
            planned[0], cursors=Mixture(segments, settings.seed, before.lanes).cursors(samples)
        )
        segments = begun + with_cursors(planned, settings.seed, before.lanes)
    known = before.removed | before.sources
    removed = {name: rules for name, rules in known.items() if name not in sources}
    return DataRecord(sources, before.plain, before.lanes, asked, segments, sizes, removed)


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
        old, new = ([part for part in record.segments if part.first <= samples][-1] for record in (before, now))
        changes.append(f"mixture {old.describe()} -> {new.describe()}")
    return changes
