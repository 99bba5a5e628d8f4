"""Batches: what a run trains on, sample by sample; the microbatches of one rank, read ahead by data workers and moved
to its device; the held-out batches of an evaluation; what a step trained on in words."""

import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harness import base, flags, job
from harness.data.mixture import DataRecord, Mixture, Segment, SequenceOrder, StepSize
from harness.data.stream import BEGINNING, EvalSequences, Position, ShardReader, Stream
from harness.data.windows import (
    IGNORE_INDEX,
    PackedDataset,
    PackedSequence,
    PaddedDataset,
    SyntheticDataset,
    create_collate_fn,
    document_lengths,
    sequence_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STREAM_PREFETCH = 16  # batches a worker reads ahead of a stream, for the time in which a shard reads its next chunk
EXCERPT = 200  # characters of a document that are printed

NOT_OF_MODEL = ("loss_divisor", "document_lengths")  # what a batch has beside the model's inputs
Positions = dict[str, dict[int, Position]]  # by source and shard


# ----------------------------------------------------------------------------------------------------------------------
# The samples of a run


@dataclass(eq=False)
class TrainingData:
    """The training data of a run.

    Sample i is in shard i % N (N is 1 without streams) and comes from the source that the mixture says. The m-th sample
    of a data set in shard s is number m * N + s in its `SequenceOrder`; that of a stream is the shard's m-th sequence.
    """

    sources: dict[str, Any]  # data sets of sequences, and streams
    record: DataRecord
    seq_len: int
    seed: int
    eval_data: dict[str, Any] | None = None  # sequences of each source, or of an eval dataset; None: no evaluation
    eval_identity: dict[str, str] = field(default_factory=dict)  # what tells each of these from others
    header: dict[str, str] = field(default_factory=dict)  # lines of the header
    beginning: str = ""  # the first words of the text, a prompt for a sample

    def __post_init__(self) -> None:
        self.mixture, self.orders = Mixture(self.record.segments, self.seed, self.record.num_shards), {}
        for name, source in self.sources.items():
            if not isinstance(source, Stream):
                self.orders[name] = SequenceOrder(len(source), self.seed, None if name == self.record.plain else name)

    def __len__(self) -> int:
        """Samples after which each source has been read once; there are more, in further epochs. Not of streams."""
        first = self.record.segments[0]
        weights = {name: weight / first.per_sample[name] for name, weight in first.weights.items() if weight}
        total = sum(weights.values())  # of samples, whose share is that of the tokens only where all have as many
        return max(math.ceil(self.orders[name].sequences * total / weight) for name, weight in weights.items())

    def __getitem__(self, sample: int) -> np.ndarray | PackedSequence:
        """A global sample; not of streams."""
        source, sequence = self.locate(sample)
        return source[sequence]

    @property
    def is_uniform(self) -> bool:
        """Whether each sample has `seq_len` tokens, all of which are trained on."""
        return all(source.is_uniform for source in self.sources.values())

    @property
    def has_streams(self) -> bool:
        return any(isinstance(source, Stream) for source in self.sources.values())

    @functools.cached_property
    def has_padding(self) -> bool:
        padded = [source for source in self.sources.values() if isinstance(source, PaddedDataset)]
        return any(source.total_tokens() < len(source) * self.seq_len for source in padded)

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens come from token files, whatever the run's tokenizer."""
        tokens = [getattr(source, "tokens", None) for source in self.sources.values()]
        return all(of_source is not None and of_source.is_mapped for of_source in tokens)

    def locate(self, sample: int) -> tuple[Any, int]:
        """(the data set that a global sample comes from, its sequence there); not of streams."""
        name, number = self.mixture.locate(sample)
        shards = self.record.num_shards
        return self.sources[name], self.orders[name].sequence_at(number * shards + sample % shards)

    def count_tokens(self, samples: range) -> int:
        """Tokens of global samples that are not padding."""
        if not self.has_padding:
            return len(samples) * self.seq_len
        return sum(source.real_tokens(sequence) for source, sequence in map(self.locate, samples))

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source is read by the first `samples` of the run; without streams, whose size is not known."""
        counts = self.mixture.counts(samples) if self.orders else {}
        return {name: counts.get(name, 0) / order.sequences for name, order in self.orders.items()}

    def ends_epoch(self, step: int) -> bool:
        """Whether with this optimizer step all sequences have been read once more: of one source, or of several that
        are mixed by size. The step takes sequences of the next epoch too where the last ones do not fill it."""
        sequences = sum(order.sequences for order in self.orders.values())
        samples = self.record.samples_of_step(step)
        return samples.stop // sequences > samples.start // sequences

    def metrics(self, samples: int, tokens: int) -> dict[str, float]:
        """The figures of a log line after so many samples and tokens: of each source of a mixture its share now and how
        often it was read; the share of padding so far."""
        figures = {}
        if len(self.mixture.names) > 1:
            shares = self.mixture.segment_at(max(samples - 1, 0)).shares()
            for name in self.sources:
                figures[f"share/{name}"] = shares.get(name, 0.0)
            for name, epochs in self.epochs(samples).items():
                figures[f"epochs/{name}"] = epochs
        if self.has_padding:
            figures["padding_percent"] = 100 * (1 - tokens / (samples * self.seq_len))
        return figures


def mix(sequences: dict[str, Any], weights: dict[str, Fraction | None], seq_len: int, seed: int) -> TrainingData:
    """The sequences of sources in the order of a run without stages, by these weights or by size."""
    per_sample = {name: Fraction(source.total_tokens(), len(source)) for name, source in sequences.items()}
    known = {name: Fraction(sequences[name].total_tokens()) if w is None else w for name, w in weights.items()}
    plain = next(iter(sequences)) if len(sequences) == 1 else None
    segments, sizes = [Segment(0, known, per_sample)], [StepSize(0, 0, 1)]
    record = DataRecord({name: {} for name in sequences}, plain, 1, {"weights": {}}, segments, sizes)
    return TrainingData(sequences, record, seq_len, seed)


class SampleReader:
    """Reads the samples of a run for one data worker. A shard of a stream is opened when its first sample is read."""

    def __init__(self, data: TrainingData, positions: Positions):
        """`positions` are where shards of streams can be read from on; others are read from their beginning."""
        self.data, self.positions = data, positions
        if [*data.sources] == [data.record.plain] and len(positions) == 1:  # the only source may have been renamed
            self.positions = {data.record.plain: next(iter(positions.values()))}
        self.readers: dict[tuple[str, int], ShardReader] = {}
        self.counts: Counter = Counter()

    def read(self, samples: Sequence[int]) -> tuple[list, Positions]:
        """(these samples, and for each shard of theirs where to begin to read the first of them again). A UserError
        where one cannot be read."""
        sequences = []
        positions: Positions = {}
        for sample in samples:
            name, number = self.data.mixture.locate(sample)
            if isinstance(self.data.sources[name], Stream):
                shard = sample % self.data.record.num_shards
                reader = self.shard(name, shard)
                sequences.append(reader.sequence(number))
                positions.setdefault(name, {}).setdefault(shard, reader.position())
            else:
                sequences.append(self.data[sample])
        return sequences, positions

    def shard(self, name: str, shard: int) -> ShardReader:
        if (name, shard) not in self.readers:
            position = self.positions.get(name, {}).get(shard, BEGINNING)
            self.readers[name, shard] = ShardReader(self.data.sources[name], shard, position, self.counts)
        return self.readers[name, shard]


# ----------------------------------------------------------------------------------------------------------------------
# Microbatches


class DataPosition(Protocol):
    """What is read here of a run's `TrainState`, and moved."""

    samples: int
    positions: Positions

    def move_positions(self, positions: Positions) -> None: ...


class Batches:
    """The batches that a run trains on, for `next`; the last one, and the last that gave a finite loss."""

    def __init__(self, batches: Iterator[dict[str, Any]]):
        self.batches = batches
        self.last: dict[str, Any] = {}
        self.finite: dict[str, Any] = {}

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, Any]:
        self.last = next(self.batches)
        return dict(self.last)  # a step takes out what the model does not get

    def last_finite(self, was_skipped: bool) -> dict[str, Any]:
        """The last batch; where its step was skipped an earlier one that this returned, if there is one."""
        if not (was_skipped and self.finite):
            self.finite = {name: value for name, value in self.last.items() if name not in NOT_OF_MODEL}
        return self.finite


def training_batches(
    settings: flags.Settings, data: TrainingData, state: DataPosition, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Endless microbatches of this rank on its device, from the global sample `state.samples` on.

    `state` is the run's `TrainState`; `state.positions` moves with the batches. A batch has `document_lengths`, the
    tokens of each document in it, by which its FLOPs are counted. Where samples have other numbers of
    trained tokens than each other, a batch has a `loss_divisor`: its mean loss divided by it, summed over a step's
    microbatches and averaged over ranks, is the mean over each trained token of the global batch. A UserError that a
    data worker met is raised here. How many bad records of streams rank 0 has left out is printed at the first one and
    each time they are ten times as many.
    """
    batches = read_batches(settings, data, state, device)
    return batches if data.is_uniform else count_labels(batches, settings.gradient_accumulation_steps)


def count_labels(batches: Iterator[dict[str, Any]], per_step: int) -> Iterator[dict[str, Any]]:
    """Microbatches with their `loss_divisor`, by the labels of all `per_step` of a step on all ranks. Every rank calls
    this; the sum stays on the device. A step without a label gives NaN as its loss."""
    while microbatches := list(itertools.islice(batches, per_step)):
        trained = torch.stack([(batch["labels"] != IGNORE_INDEX).sum() for batch in microbatches]).double()
        in_step = trained.sum()
        dist.all_reduce(in_step)
        for batch, divisor in zip(microbatches, (in_step / (trained * dist.get_world_size())).float(), strict=True):
            yield batch | {"loss_divisor": divisor}


def read_batches(
    settings: flags.Settings, data: TrainingData, state: DataPosition, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The microbatches of `training_batches`, without a `loss_divisor`."""
    loader = DataLoader(
        RankBatches(settings, data, state.samples, state.positions, dist.get_rank(), dist.get_world_size()),
        batch_size=None,
        collate_fn=unchanged,
        num_workers=settings.num_workers,
        prefetch_factor=STREAM_PREFETCH if data.has_streams and settings.num_workers else None,
        worker_init_fn=job.ignore_signals,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own: it draws a seed when it begins, which a resumed run would draw again
    )
    items: Iterator[dict[str, Any]] = map(raised, loader)
    if data.has_streams:
        items = join_rows(items, max(settings.num_workers, 1), state, pins=device.type == "cuda")
    for batch in items:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        yield batch | {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def unchanged(item: Any) -> Any:
    """By default a DataLoader makes a tensor of each array, which goes through shared memory, a file for each."""
    return item


def raised(item: dict[str, Any] | base.UserError) -> dict[str, Any]:
    if isinstance(item, base.UserError):
        raise item
    return item


def join_rows(
    items: Iterator[dict[str, Any]], workers: int, state: DataPosition, pins: bool
) -> Iterator[dict[str, Any]]:
    """The microbatches of which each of so many workers reads some rows; see `RankBatches.rows_of`."""
    collate = create_collate_fn(shift_labels=False)
    reported = 0
    while True:
        sequences: dict[int, Any] = {}  # by row
        bad = 0
        for item in itertools.islice(items, workers):
            sequences |= item["sequences"]
            bad += item["bad_records"]
            state.move_positions(item["positions"])
        if bad >= max(1, 10 * reported):
            job.print0("data      ", f"left out so far: bad records {bad:,}")
            reported = bad
        rows = [sequences[row] for row in sorted(sequences)]
        batch = {name: tensor.pin_memory() if pins else tensor for name, tensor in collate(rows).items()}
        yield {**batch, "document_lengths": lengths_in(rows)}


def lengths_in(sequences: Sequence[np.ndarray | PackedSequence]) -> np.ndarray:
    """The `document_lengths` of some sequences together."""
    return np.concatenate([document_lengths(sequence) for sequence in sequences])


@dataclass(eq=False)
class RankBatches(IterableDataset):
    """Endless microbatches of one rank: ranks are disjoint, and a step's samples do not depend on how many ranks or
    microbatches share them. Of token caches and files each data worker reads whole microbatches in turn. Of streams it
    reads some rows of each, those of its own shards: a shard is tokenized by one worker. A UserError comes as the last
    item, as a DataLoader would wrap it into a traceback."""

    settings: flags.Settings
    data: TrainingData
    first_sample: int
    positions: Positions
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[dict[str, Any] | base.UserError]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive the fork of a worker
        worker = get_worker_info()
        read = self.rows_of if self.data.has_streams else self.batches_of
        try:
            yield from read(worker.id if worker else 0, worker.num_workers if worker else 1)
        except base.UserError as error:
            yield base.UserError(str(error), exit_code=1)

    def batches_of(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Every batch of one of so many workers: a DataLoader takes one of each in turn."""
        reader = SampleReader(self.data, self.positions)
        collate = create_collate_fn(shift_labels=False)
        for microbatch in itertools.count(worker, workers):
            samples = self.samples_of(microbatch)
            sequences, _ = reader.read(samples)
            yield {**collate(sequences), "document_lengths": lengths_in(sequences)}

    def rows_of(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Of every microbatch the sequences of the worker's own shards, by row, and the positions of these shards. The
        rank's shards are dealt to its workers as it meets them, so each worker knows whose they all are."""
        reader = SampleReader(self.data, self.positions)
        num_shards = self.data.record.num_shards
        owners: dict[int, int] = {}  # by shard
        for microbatch in itertools.count():
            samples = self.samples_of(microbatch)
            for sample in samples:
                owners.setdefault(sample % num_shards, len(owners) % workers)
            rows = [row for row, sample in enumerate(samples) if owners[sample % num_shards] == worker]
            sequences, positions = reader.read([samples[row] for row in rows])
            by_row = dict(zip(rows, sequences, strict=True))
            yield {"sequences": by_row, "positions": positions, "bad_records": reader.counts["bad records"]}

    def samples_of(self, microbatch: int) -> range:
        first = self.first_sample + (microbatch * self.world_size + self.rank) * self.settings.batch_size
        return range(first, first + self.settings.batch_size)


def eval_batches(
    settings: flags.Settings, dataset: PackedDataset | SyntheticDataset | EvalSequences, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of the held-out sequences. Each sequence is taken once over all ranks, and every rank gets the
    same number of batches: in the last one, labels that are left over are IGNORE_INDEX."""
    per_round = settings.batch_size * dist.get_world_size()
    sequences = min(len(dataset), settings.eval_windows or len(dataset))
    collate = create_collate_fn(shift_labels=False)
    for number in range(math.ceil(sequences / per_round)):
        first = number * per_round + dist.get_rank() * settings.batch_size
        indices = range(first, first + settings.batch_size)
        batch = collate([dataset[index if index < sequences else 0] for index in indices])
        left_over = [index >= sequences for index in indices]
        batch["labels"][left_over] = IGNORE_INDEX
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def mean_losses(held_out: Iterable[str], totals: torch.Tensor) -> tuple[dict[str, float], int]:
    """`eval_loss`, the mean over every token, and of several sources also `eval_loss/NAME`; and how many tokens these
    are. `totals` has the summed loss and the tokens of each source of `held_out`, (sources, 2), of all ranks.

    Raises:
        UserError: a source has no token that is trained on.
    """
    by_source = {}
    for name, (summed_loss, tokens) in zip(held_out, totals.tolist(), strict=True):
        if not tokens:
            problem = f"the held-out sequences of {name} have no trained token"
            raise base.UserError(f"--eval-interval: {problem}; use a longer --sequence-length or other data", 1)
        by_source[f"eval_loss/{name}"] = summed_loss / tokens
    summed_loss, tokens = totals.sum(0).tolist()
    losses = {"eval_loss": summed_loss / tokens}
    return (losses | by_source if len(by_source) > 1 else losses), int(tokens)


# ----------------------------------------------------------------------------------------------------------------------
# --show-samples


def describe_step(data: TrainingData, tokenizer: "PreTrainedTokenizerBase | None", step: int) -> str:
    """The samples of an optimizer step: each with its source, and how each of its documents begins. A UserError where a
    source is no longer one of the run's."""
    samples = data.record.samples_of_step(step)
    reader = SampleReader(data, {})
    lines = [f"step {step:,}: {len(samples):,} samples, from sample {samples.start:,} on"]
    for sample in samples:
        lines.append("")
        name, _ = data.mixture.locate(sample)
        if name not in data.sources:
            raise base.UserError(
                f"--show-samples {step}: sample {sample:,} is of the source {name}, which was removed since; give it "
                f"too, as in --dataset {name}=FILE:1 beside the others"
            )
        (sequence,), _ = reader.read(range(sample, sample + 1))
        tokens = sequence_tokens(sequence)
        if not isinstance(data.sources[name], PackedDataset):  # a stream, or random tokens
            shard = sample % data.record.num_shards
            lines += [f"sample {sample:,}: {name}, shard {shard:,}", f"  {excerpt(tokens, tokenizer)}"]
            continue
        source, index = data.locate(sample)
        lines.append(f"sample {sample:,}: {name}, sequence {index:,} of {len(source):,}")
        borders = [*source.starts_in(index), source.real_tokens(index)]
        for start, end in itertools.pairwise(borders):
            lines.append(f"  from token {start:,}: {excerpt(tokens[start:end], tokenizer)}")
    return "\n".join(lines)


def excerpt(tokens: np.ndarray, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """How a stretch of tokens begins, in one line; as ids where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, tokens[: EXCERPT // 8]))
    text = tokenizer.decode(tokens)
    assert isinstance(text, str)  # of one list of ids
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
