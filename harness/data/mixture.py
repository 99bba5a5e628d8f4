"""Mixtures: which source each sample of a run comes from, as a pure function of the sample's number and the mixture's
history. Independent of what a source holds.

The history is a list of segments. From its first sample on, a segment has sources with weights. Within a segment the
sources divide the samples by a binary tree: at each node, of the first n samples the left part takes
floor(left weight / weight of both x n + 1/2). So the counts after any number of samples, and the source of any sample,
follow from its number alone. With two or three sources each is within one sample of its share at any time, with more
within two.

Where sources are streamed in N lanes, sample i reads lane i mod N of its source. Shares repeat themselves: of two equal
ones the first would only ever have the samples of even numbers, and half of each corpus would never be read. So the
samples of a segment are taken in blocks of N, and each block begins at a drawn place of its part of the order. In the
long run each lane is of each source as often as any other, and after any number of samples each source is within six
of its share.
"""

import heapq
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from harness.flags import Stage

MAX_WEIGHT = 2**30  # of a tree: products of two weights fit 64 bits


@dataclass(frozen=True)
class Node:
    """Two parts of a mixture, each a node or the index of a source."""

    left: "Node | int"
    right: "Node | int"
    left_weight: int
    weight: int  # of both

    def count_left(self, samples):
        """How many of the first `samples` of this node go to the left; an int or an array of int64."""
        whole, rest = samples // self.weight, samples % self.weight
        return whole * self.left_weight + (2 * self.left_weight * rest + self.weight) // (2 * self.weight)


class Shares:
    """Sources that divide samples by their weights."""

    def __init__(self, weights: dict[str, Fraction]):
        self.names = [name for name, weight in weights.items() if weight > 0]
        self.tree = build_tree(as_integers([weights[name] for name in self.names]))

    def pick(self, sample: int) -> tuple[str, int]:
        """(the source of a sample, how many samples before it are of that source)."""
        node = self.tree
        while isinstance(node, Node):
            before = node.count_left(sample)
            if node.count_left(sample + 1) > before:
                node, sample = node.left, before
            else:
                node, sample = node.right, sample - before
        return self.names[node], sample

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` are of each source."""
        counts, parts = {}, [(self.tree, samples)]
        while parts:
            node, samples = parts.pop()
            if isinstance(node, Node):
                left = node.count_left(samples)
                parts += [(node.left, left), (node.right, samples - left)]
            else:
                counts[self.names[node]] = samples
        return counts

    def picks(self, samples: np.ndarray) -> np.ndarray:
        """The index in `names` of the source of each of these samples, int64."""
        sources = np.empty(len(samples), np.int64)
        parts = [(self.tree, np.arange(len(samples)), samples)]
        while parts:
            node, places, numbers = parts.pop()
            if not isinstance(node, Node):
                sources[places] = node
                continue
            before = node.count_left(numbers)
            goes_left = node.count_left(numbers + 1) > before
            parts.append((node.left, places[goes_left], before[goes_left]))
            parts.append((node.right, places[~goes_left], (numbers - before)[~goes_left]))
        return sources


def as_integers(weights: list[Fraction]) -> list[int]:
    """Weights as whole numbers of the same proportions, each at least 1; rounded where they would be huge."""
    common = math.lcm(*(weight.denominator for weight in weights))
    integers = [int(weight * common) for weight in weights]
    divisor = math.gcd(*integers)
    total = sum(integers) // divisor
    if total <= MAX_WEIGHT:
        return [integer // divisor for integer in integers]
    return [max(1, round(Fraction(integer, sum(integers)) * (MAX_WEIGHT // 2))) for integer in integers]


def build_tree(weights: list[int]) -> Node | int:
    """Joins the two lightest parts until one is left, as Huffman's code does: roundings of heavy parts add up least."""
    parts = [(weight, index, index) for index, weight in enumerate(weights)]  # (weight, order among equals, node)
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

    def record(self) -> dict[str, Any]:
        return {
            "from": self.first,
            "weights": {name: str(weight) for name, weight in self.weights.items()},
            "per_sample": {name: str(tokens) for name, tokens in self.per_sample.items()},
        }


class Mixture:
    """A history, and the order that follows from it."""

    def __init__(self, history: list[Segment], lanes: int = 1):
        self.history, self.lanes = history, lanes
        self.names = list(dict.fromkeys(name for segment in history for name in segment.weights))
        self.shares = []
        for segment in history:
            self.shares.append(Shares({name: w / segment.per_sample[name] for name, w in segment.weights.items()}))
        self.before: list[Counter] = [Counter()]  # of each segment: how many samples of each source come before it
        for number in range(1, len(history)):
            self.before.append(self.counts_within(number - 1, history[number].first))

    def segment_of(self, sample: int) -> int:
        """The number of the segment that a sample is in."""
        firsts = [segment.first for segment in self.history]
        return int(np.searchsorted(firsts, sample, "right")) - 1

    def locate(self, sample: int) -> tuple[str, int]:
        """(the source of a sample, how many samples of that source come before it in the whole run)."""
        number = self.segment_of(sample)
        if self.lanes > 1:
            (source,) = self.sources_between(sample, sample + 1)
            return self.names[source], self.counts_within(number, sample)[self.names[source]]
        name, count = self.shares[number].pick(sample - self.history[number].first)
        return name, self.before[number][name] + count

    def counts(self, samples: int) -> Counter:
        """How many of the first `samples` of the run are of each source."""
        return self.counts_within(self.segment_of(samples), samples)

    def counts_within(self, number: int, samples: int) -> Counter:
        """How many of the first `samples` of the run are of each source, where the last of them are in this segment."""
        length, shares = samples - self.history[number].first, self.shares[number]
        in_block = length % self.lanes
        counts = self.before[number] + Counter(shares.counts(length - in_block))
        if in_block:
            picks = shares.picks(turned(np.arange(length - in_block, length), self.lanes))
            counts.update(shares.names[source] for source in picks)
        return counts

    def sources_between(self, first: int, end: int) -> np.ndarray:
        """The index in `names` of the source of each sample from `first` to before `end`."""
        parts = []
        while first < end:
            number = self.segment_of(first)
            start, shares = self.history[number].first, self.shares[number]
            until = end
            if number + 1 < len(self.history):
                until = min(end, self.history[number + 1].first)
            index = np.array([self.names.index(name) for name in shares.names])
            parts.append(index[shares.picks(turned(np.arange(first - start, until - start), self.lanes))])
            first = until
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def lane_counts(self, samples: int, chunk: int = 2**20) -> np.ndarray:
        """How many of the first `samples` are of each source and in each lane: int64 of shape (sources, lanes)."""
        lanes = self.lanes
        counts = np.zeros(len(self.names) * lanes, np.int64)
        if len(self.names) == 1:
            return (samples + lanes - 1 - np.arange(lanes))[None] // lanes
        for first in range(0, samples, chunk):
            end = min(first + chunk, samples)
            cells = self.sources_between(first, end) * lanes + np.arange(first, end) % lanes
            counts += np.bincount(cells, minlength=len(counts))
        return counts.reshape(len(self.names), lanes)

    def shares_at(self, sample: int) -> dict[str, float]:
        """The share of the tokens that each source has at a sample."""
        return self.history[self.segment_of(sample)].shares()


def turned(samples: np.ndarray, lanes: int) -> np.ndarray:
    """Samples of a segment in the order in which they take their turns: each block of as many as there are lanes is
    turned by a number that is drawn for it, with the finalizer of SplitMix64 (Steele et al. 2014)."""
    blocks, places = np.divmod(samples, lanes)
    drawn = (blocks.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # products wrap
    drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    turns = (drawn >> np.uint64(32)).astype(np.int64) % lanes
    return blocks * lanes + (places + turns) % lanes


def begin_history(
    weights: dict[str, Fraction],
    per_sample: dict[str, Fraction],
    stages: list[Stage],
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
        segment = Segment(max(begin, first), stage.weights, per_sample)
        if begin <= first:
            segments.clear()
        segments.append(segment)
    return segments


def change_history(history: list[Segment], segments: list[Segment]) -> list[Segment]:
    """The history of a run that goes on with other segments than were planned."""
    first = segments[0].first
    return [segment for segment in history if segment.first < first] + segments


def read_history(records: list[dict[str, Any]]) -> list[Segment]:
    """The history that `Segment.record` wrote."""
    history = []
    for record in records:
        weights = {name: Fraction(weight) for name, weight in record["weights"].items()}
        per_sample = {name: Fraction(tokens) for name, tokens in record["per_sample"].items()}
        history.append(Segment(record["from"], weights, per_sample))
    return history
