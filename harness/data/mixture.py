"""Mixtures: which source each sample of a run comes from, and which of that source's samples it is.

A run that streams has N shards, any other run has one: sample i is in shard i % N. A segment of a run has sources with
weights. Its samples in a shard are in blocks of `BLOCK`: how many of a block come from each source follows from the
weights and the block's number, their order from the seed and the number of its first sample. So any sample is found
without those before it, on any ranks. Other weights or sources begin a new segment, in which each source continues
where it was. Another global batch begins one too, but changes no order.

torchtitan has had the same idea since August 2026 from a library, grain's MapDataset: sample i is a pure function of
the seed, and shuffle, mix and prefetch are operators. It has no stages that begin at a step, no shares that are exact
at the end of each block and no best-fit packing over a whole corpus, so these would be lost with it.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypedDict

import numpy as np

from harness import flags
from harness.data.permutation import permuted, spread

BLOCK = 1024  # samples
MAX_BLOCKS = 64  # in `Mixture.blocks`, plus one for each shard

# ----------------------------------------------------------------------------------------------------------------------
# Shares


@dataclass(frozen=True)
class Segment:
    """The sources of a run, their weights and the global batch from one sample on."""

    first: int  # global sample
    weights: dict[str, Fraction]  # shares of the tokens, up to a common factor
    tokens_per_sample: dict[str, Fraction]  # of each source, on average
    steps_before: int = 0  # optimizer steps
    samples_per_step: int = 1

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
        weights = {name: weight / self.tokens_per_sample[name] for name, weight in self.weights.items() if weight}
        common = math.lcm(*(weight.denominator for weight in weights.values()))
        return {name: int(weights[name] * common) for name in sorted(weights, key=lambda name: -weights[name])}

    def divide(self, num_samples: int) -> dict[str, int]:
        """The number of samples of each source among the first `num_samples`, a multiple of BLOCK, of this segment in a
        shard: from the heaviest source on, each takes its share of what is left, rounded. Each of n sources is within
        (1 + H(n - 2)) / 2 samples of its share, with H(k) = 1 + 1/2 + ... + 1/k: within 1 with up to 3 sources, within
        2 with up to 12, within 3 with up to 84. More samples never give a source fewer, as by largest remainder."""
        counts, left, total = {}, num_samples, sum(self.sample_weights.values())
        for name, weight in self.sample_weights.items():
            counts[name] = (2 * weight * left + total) // (2 * total)  # weight * left / total, rounded
            left, total = left - counts[name], total - weight
        return counts


class Block(NamedTuple):
    """The sources of the samples of a block, by their numbers in `Mixture.names`."""

    first: int  # global sample
    taken: np.ndarray  # samples of each source before the block, in its shard
    order: np.ndarray  # the source of each sample


class Mixture:
    """The segments of a run, and the order that follows from them and from the seed."""

    def __init__(self, segments: list[Segment], seed: int, num_shards: int = 1):
        self.seed, self.num_shards = seed, num_shards
        self.segments = segments[:1]
        for before, segment in itertools.pairwise(segments):
            if segment.weights != before.weights:  # else, as with another global batch, the blocks continue
                self.segments.append(segment)
        self.firsts = [segment.first for segment in self.segments]
        self.names = list(dict.fromkeys(name for segment in segments for name in segment.weights))
        self.blocks: dict[int, Block] = {}  # by first sample

    def segment_at(self, sample: int) -> Segment:
        """The segment of a sample."""
        return self.segments[bisect.bisect_right(self.firsts, sample) - 1]

    def block_at(self, sample: int) -> Block:
        """The block of a sample."""
        segment, shard = self.segment_at(sample), sample % self.num_shards
        begin_in_shard = self.samples_in_shard(segment.first, shard)
        # samples of the segment before the block, in the shard
        offset_in_segment = (sample // self.num_shards - begin_in_shard) // BLOCK * BLOCK
        first = (begin_in_shard + offset_in_segment) * self.num_shards + shard
        if first not in self.blocks:
            if len(self.blocks) >= MAX_BLOCKS + self.num_shards:
                self.blocks.pop(next(iter(self.blocks)))
            at_begin, at_end = segment.divide(offset_in_segment), segment.divide(offset_in_segment + BLOCK)
            taken = np.zeros(len(self.names), np.int64)
            if begin_in_shard:  # recursion: what was taken before is in the last block of the segment before
                taken += self.count_in_shard(begin_in_shard, shard)
            for name, count in at_begin.items():
                taken[self.names.index(name)] += count
            parts = spread([at_end[name] - at_begin[name] for name in at_end], f"{self.seed} mixture {first}")
            sources = np.array([self.names.index(name) for name in at_end], np.uint16)
            self.blocks[first] = Block(first, taken, sources[parts])
        return self.blocks[first]

    def samples_in_shard(self, num_samples: int, shard: int) -> int:
        """The number of the first `num_samples` of the run that are in a shard."""
        return -((shard - num_samples) // self.num_shards)  # ceil((num_samples - shard) / num_shards)

    def count_in_shard(self, num_samples: int, shard: int) -> np.ndarray:
        """The number of samples of each source, in the order of `names`, among the first `num_samples` (> 0) of a
        shard."""
        block = self.block_at((num_samples - 1) * self.num_shards + shard)
        order = block.order[: num_samples - block.first // self.num_shards]
        return block.taken + np.bincount(order, minlength=len(self.names))

    def locate(self, sample: int) -> tuple[str, int]:
        """(the source of a sample, how many samples of that source come before it in its shard)."""
        block = self.block_at(sample)
        order = block.order[: (sample - block.first) // self.num_shards + 1]
        source = int(order[-1])
        return self.names[source], int(block.taken[source]) + int(np.count_nonzero(order[:-1] == source))

    def counts(self, num_samples: int, first_shard: int = 0, stride: int = 1) -> np.ndarray:
        """The number of samples of each source, in the order of `names`, among the first `num_samples` of the run that
        are in the shards `first_shard`, `first_shard + stride`, and so on."""
        taken = np.zeros(len(self.names), np.int64)
        for shard in range(first_shard, min(self.num_shards, num_samples), stride):
            taken += self.count_in_shard(self.samples_in_shard(num_samples, shard), shard)
        return taken


def with_batch(segments: list[Segment], samples_per_step: int, steps_before: int, first: int) -> list[Segment]:
    """The same mixture with another global batch from sample `first` on, which comes after `steps_before` steps: a
    segment begins there, in place of one that begins there already, and those that are planned keep their steps."""
    begun = [segment for segment in segments if segment.first <= first]
    changed = [dataclasses.replace(begun[-1], first=first, steps_before=steps_before)]
    for segment in segments[len(begun) :]:
        begin = first + (segment.steps_before - steps_before) * samples_per_step
        changed.append(dataclasses.replace(segment, first=begin))
    changed = [dataclasses.replace(segment, samples_per_step=samples_per_step) for segment in changed]
    return [segment for segment in begun if segment.first < first] + changed


class SequenceOrder:
    """The order of a source's sequences: each epoch is one permutation of them, so none repeats before all are seen. A
    pure function of (seed, name, number); without a name, of (seed, number)."""

    def __init__(self, num_sequences: int, seed: int, name: str | None = None):
        self.num_sequences = num_sequences
        # the name gives sources of equal length different orders
        self.key = f"{seed}" if name is None else f"{seed} {name!r}"

    def sequence_at(self, number: int) -> int:
        """The index of the sequence that is this source's sample `number`, counted over epochs."""
        epoch, offset = divmod(number, self.num_sequences)
        return permuted(offset, self.num_sequences, f"{self.key} {epoch}")


# ----------------------------------------------------------------------------------------------------------------------
# The record


class SourceSpec(TypedDict, total=False):
    """How a source is read and by what it is recognized, as a checkpoint's DataRecord has it."""

    eval_rule: str | None  # by_number or by_content: how its eval documents are chosen; None if it has none
    dataset: str  # a checksum of its tokens, or of the names and sizes of its files if it is streamed
    beginning: str  # a checksum of its first tokens, by which data that weights were trained on are recognized
    chat: bool  # True for conversations; absent for all else
    end_of_text: int  # id that ends its documents; absent if it decides nothing


@dataclass(frozen=True)
class DataRecord:
    """The record of a run's data in a checkpoint, so far and as planned: from it a resumed run, and `--show-samples`,
    know which sample comes when."""

    sources: dict[str, SourceSpec]  # by name, of each source that the run has or had
    # The source whose order does not depend on its name (`SequenceOrder`): the only one when the run first started, so
    # that two runs on one text, and `get_dataset`, have the same order; None if there were several.
    ordered_without_name: str | None
    num_shards: int
    typed_weights: dict[str, str | None]  # by source, of the command line; None if it is by size
    typed_stages: list[str]  # of the command line
    segments: list[Segment]  # all that have begun, and those that are planned

    @property
    def names(self) -> list[str]:
        """The names of the sources that the run has."""
        return list(self.typed_weights)

    def typed_shares(self) -> list[tuple[Fraction, dict[str, Fraction | None]]]:
        """(the fraction of the run at which it begins, its shares) of the typed weights and of each typed stage, to
        compare mixtures: the weights 5 and 3 equal 0.625 and 0.375."""
        stages = flags.parse_stages(tuple(self.typed_stages))
        begin = (Fraction(0), normalize(self.typed_weights))
        return [begin, *((stage.begin, normalize(stage.weights)) for stage in stages)]

    def to_json(self) -> dict[str, Any]:
        """The record in types of JSON, as a manifest has it."""
        record = dataclasses.asdict(self)
        for segment in record["segments"]:
            for name in ("weights", "tokens_per_sample"):
                segment[name] = {source: str(number) for source, number in segment[name].items()}
        return record

    def samples_of_step(self, step: int) -> range:
        """The global samples of an optimizer step; steps count from 1."""
        latest = self.segments[0]
        for segment in self.segments:
            if segment.steps_before < step:
                latest = segment
        first = latest.first + (step - 1 - latest.steps_before) * latest.samples_per_step
        return range(first, first + latest.samples_per_step)


def read_data_record(manifest: dict[str, Any]) -> DataRecord:
    """The data record of a checkpoint's manifest."""
    record = manifest["data"]
    segments = []
    for segment in record["segments"]:
        weights = {name: Fraction(weight) for name, weight in segment["weights"].items()}
        tokens_per_sample = {name: Fraction(tokens) for name, tokens in segment["tokens_per_sample"].items()}
        segments.append(Segment(**segment | {"weights": weights, "tokens_per_sample": tokens_per_sample}))
    return DataRecord(**record | {"segments": segments})


def make_record(
    *,
    settings: flags.Flags,
    specs: dict[str, SourceSpec],
    weights: dict[str, Fraction],
    tokens_per_sample: dict[str, Fraction],
    samples_per_step: int,
    num_shards: int,
    before: DataRecord | None = None,
    step: int = 0,
    num_samples: int = 0,
) -> DataRecord:
    """The record of a run that begins, or resumes after `step` steps and `num_samples` samples.

    Args:
        specs: of each source; `weights` likewise, and `tokens_per_sample`, on average.
        before: what its checkpoint recorded; None for a new run.
    """
    planned = [Segment(num_samples, weights, tokens_per_sample, step, samples_per_step)]
    for stage in flags.parse_stages(settings.mixture_stage):
        begin = max(round(stage.begin * settings.num_steps), step)
        if begin == step:  # the stage has begun already: it replaces the weights, and stages before it
            planned.clear()
        first = num_samples + (begin - step) * samples_per_step
        planned.append(Segment(first, stage.weights, tokens_per_sample, begin, samples_per_step))
    typed = {source.name: None if source.weight is None else str(source.weight) for source in settings.sources()}
    only_source = next(iter(specs)) if len(specs) == 1 else None
    now = DataRecord(specs, only_source, num_shards, typed, list(settings.mixture_stage or ()), planned)
    if before is None:
        return now
    segments = before.segments
    if before.typed_shares() != now.typed_shares():
        segments = [segment for segment in segments if segment.first < num_samples] + planned
    elif segments[-1].samples_per_step != samples_per_step:
        segments = with_batch(segments, samples_per_step, step, num_samples)
    specs = before.sources | specs
    return DataRecord(specs, before.ordered_without_name, before.num_shards, typed, now.typed_stages, segments)


def normalize(weights: Mapping[str, str | Fraction | None]) -> dict[str, Fraction | None]:
    """The share of each source with a weight, without those of weight 0; None for a source that is mixed by size."""
    if len(weights) == 1:
        return dict.fromkeys(weights, Fraction(1))
    numbers = {name: None if weight is None else Fraction(weight) for name, weight in weights.items()}
    total = sum(number for number in numbers.values() if number)
    return {name: number / total if number else None for name, number in numbers.items() if number != 0}


def describe_changes(before: DataRecord, now: DataRecord, num_samples: int) -> list[str]:
    """The changes of a run's mixture since its checkpoint, after so many samples, in words."""
    changes = [f"source {name} added" for name in now.names if name not in before.names]
    changes += [f"source {name} removed" for name in before.names if name not in now.names]
    if before.typed_shares() != now.typed_shares():
        old, new = ([part for part in record.segments if part.first <= num_samples][-1] for record in (before, now))
        is_later = old.shares() == new.shares()
        changes.append("later stages of the mixture" if is_later else f"mixture {old.describe()} -> {new.describe()}")
    return changes
