"""Training data: the samples of a run, each found by its number."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.data.eval_split import EvalData
from harness.data.mixture import DataRecord, Mixture, Segment, SequenceOrder, SourceSpec
from harness.data.packing import EvalSequences, PackedSequence, WholeDocumentDataset
from harness.data.stream import SHARD_START, Position, ShardReader, Stream

Positions = dict[str, dict[int, Position]]  # by source and shard


@dataclass
class OpenedSource:
    """One source of a run."""

    train: Any  # its sequences (PackedDataset or SyntheticDataset), or a Stream
    eval_data: EvalData | None  # None if nothing of it is evaluated
    spec: SourceSpec


@dataclass(eq=False)
class TrainingData:
    """The training data of a run.

    Sample i is in shard i % N (N is 1 without streams) and comes from the source that the mixture says. The m-th sample
    of a source in shard s is number m * N + s in its `SequenceOrder`; of a stream it is the shard's m-th sequence.
    """

    sources: dict[str, Any]  # the sequences of each source, or its Stream
    record: DataRecord
    seq_len: int
    seed: int
    eval_sets: dict[str, EvalSequences] | None = None  # by source, or of an eval dataset; None: no evaluation
    eval_fingerprints: dict[str, str] = field(default_factory=dict)  # of the eval sets, for checkpoints
    header: dict[str, str] = field(default_factory=dict)  # lines of the header
    demo_prompt: str = ""  # the first words of the data, which the sample of --demo continues

    def __post_init__(self) -> None:
        self.mixture, self.orders = Mixture(self.record.segments, self.seed, self.record.num_shards), {}
        for name, source in self.sources.items():
            if not isinstance(source, Stream):
                key_name = None if name == self.record.ordered_without_name else name
                self.orders[name] = SequenceOrder(len(source), self.seed, key_name)

    def __len__(self) -> int:
        """The number of samples in which each source is read once, up to a few sequences: shares are exact only at the
        end of a block. Not defined with streams."""
        weights = self.record.segments[0].sample_weights
        total = sum(weights.values())
        return max(-(-self.orders[name].num_sequences * total // weight) for name, weight in weights.items())

    def __getitem__(self, sample: int) -> np.ndarray | PackedSequence:
        """One of the first `len(self)` samples; not of streams."""
        if not 0 <= sample < len(self):
            raise IndexError(sample)
        source, index = self.find_sequence(sample)
        return source[index]

    @property
    def is_uniform(self) -> bool:
        """True if each sample has `seq_len` tokens, all of which are trained on."""
        return all(source.is_uniform for source in self.sources.values())

    @property
    def has_streams(self) -> bool:
        return any(isinstance(source, Stream) for source in self.sources.values())

    @functools.cached_property
    def has_padding(self) -> bool:
        padded = [source for source in self.sources.values() if isinstance(source, WholeDocumentDataset)]
        return any(source.total_tokens() < len(source) * self.seq_len for source in padded)

    @property
    def from_token_files(self) -> bool:
        """True if all tokens are in token files: the run's tokenizer has not made them."""
        opened = [getattr(source, "tokens", None) for source in self.sources.values()]
        return all(tokens is not None and not tokens.files[0].cache_key for tokens in opened)

    def find_sequence(self, sample: int) -> tuple[Any, int]:
        """(the sequences of the source that a global sample comes from, its index among them); not of streams."""
        name, number = self.mixture.locate(sample)
        shards = self.record.num_shards
        return self.sources[name], self.orders[name].sequence_at(number * shards + sample % shards)

    def epochs(self, num_samples: int) -> dict[str, float]:
        """The times that the first `num_samples` of the run read each source; streams, whose size is unknown, are left
        out. Every rank calls this: with several shards each rank counts in some of them."""
        if not self.orders:
            return {}
        if self.record.num_shards == 1:
            taken = self.mixture.counts(num_samples)
        else:
            taken = self.mixture.counts(num_samples, dist.get_rank(), dist.get_world_size())
            dist.all_reduce(torch.from_numpy(taken))
        counts = dict(zip(self.mixture.names, taken.tolist(), strict=True))
        return {name: counts.get(name, 0) / order.num_sequences for name, order in self.orders.items()}

    def ends_epoch(self, step: int) -> bool:
        """True if this optimizer step completes an epoch, of one source or of several that are mixed by size. The step
        takes sequences of the next epoch too if the last ones do not fill it."""
        num_sequences = sum(order.num_sequences for order in self.orders.values())
        samples = self.record.samples_of_step(step)
        return samples.stop // num_sequences > samples.start // num_sequences

    def metrics(self, num_samples: int, num_tokens: int) -> dict[str, float]:
        """The metrics of a log line after so many samples and tokens: for each source of a mixture its current share
        and its epochs; the share of padding so far. Every rank calls this."""
        metrics = {}
        if len(self.mixture.names) > 1:
            shares = self.mixture.segment_at(max(num_samples - 1, 0)).shares()
            for name in self.sources:
                metrics[f"share/{name}"] = shares.get(name, 0.0)
            for name, epochs in self.epochs(num_samples).items():
                metrics[f"epochs/{name}"] = epochs
        if self.has_padding:
            metrics["padding_percent"] = 100 * (1 - num_tokens / (num_samples * self.seq_len))
        return metrics


def mix(sequences: dict[str, Any], weights: dict[str, Fraction | None], seq_len: int, seed: int) -> TrainingData:
    """The sequences of sources in the order of a run without stages, by these weights or by size."""
    tokens_per_sample = {name: mean_sample_tokens(source, seq_len) for name, source in sequences.items()}
    resolved = {name: Fraction(sequences[name].total_tokens()) if w is None else w for name, w in weights.items()}
    record = DataRecord(
        sources={name: {} for name in sequences},
        ordered_without_name=next(iter(sequences)) if len(sequences) == 1 else None,
        num_shards=1,
        typed_weights={},
        typed_stages=[],
        segments=[Segment(0, resolved, tokens_per_sample)],
    )
    return TrainingData(sequences, record, seq_len, seed)


def mean_sample_tokens(source: Any, seq_len: int) -> Fraction:
    """The mean number of tokens in a sequence of a source, without padding."""
    return Fraction(seq_len) if isinstance(source, Stream) else Fraction(source.total_tokens(), len(source))


class SampleReader:
    """Reads the samples of a run for one data worker. A shard of a stream is opened when its first sample is read."""

    def __init__(self, data: TrainingData, positions: Positions):
        """`positions` are those from which shards of streams are read; other shards are read from their beginning."""
        self.data, self.positions = data, positions
        self.readers: dict[tuple[str, int], ShardReader] = {}
        self.counts: Counter = Counter()  # of what streams leave out, such as bad records

    def read(self, samples: Sequence[int]) -> tuple[list, Positions]:
        """(the sequences of these samples; for each shard of a stream among them, the position of its first one). A
        UserError if one cannot be read."""
        sequences = []
        positions: Positions = {}
        for sample in samples:
            name, number = self.data.mixture.locate(sample)
            if isinstance(self.data.sources[name], Stream):
                shard = sample % self.data.record.num_shards
                reader = self.shard_reader(name, shard)
                sequences.append(reader.sequence(number))
                positions.setdefault(name, {}).setdefault(shard, reader.position())
            else:
                source, index = self.data.find_sequence(sample)
                sequences.append(source[index])
        return sequences, positions

    def shard_reader(self, name: str, shard: int) -> ShardReader:
        if (name, shard) not in self.readers:
            position = self.positions.get(name, {}).get(shard, SHARD_START)
            self.readers[name, shard] = ShardReader(self.data.sources[name], shard, position, self.counts)
        return self.readers[name, shard]
