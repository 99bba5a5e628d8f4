"""The loader: the microbatches of one rank, read ahead by data workers and moved to its device; evaluation batches."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harness import base, flags, job
from harness.base import IGNORE_INDEX
from harness.data.packing import EvalSequences, PackedSequence, collate, document_lengths
from harness.data.training_data import Positions, SampleReader, TrainingData

STREAM_PREFETCH = 16  # batches that a worker reads ahead, so that no step waits while a shard opens its next chunk


class RunState(Protocol):
    """What is used here of a run's `state.TrainState`."""

    samples: int
    positions: Positions

    def move_positions(self, positions: Positions) -> None: ...


class Batches:
    """An iterator over a run's `training_batches` that times the wait for them and counts their tokens. It keeps the
    last microbatch of the last complete step: before a save, one more pass over it looks for NaN."""

    def __init__(self, batches: Iterator[dict[str, Any]], tracker: Any, has_padding: bool, ranks_per_sequence: int):
        """`tracker` is a utils.PerformanceTracker."""
        self.batches, self.tracker, self.ranks_per_sequence = batches, tracker, ranks_per_sequence
        # With padding the tokens of all ranks are summed, on the host: on a device the sum would wait for the step.
        # Without padding all ranks have equal tokens.
        self.gloo_group = job.new_gloo_group() if has_padding else None
        self.newest_batch: dict[str, Any] = {}
        self.step_batch: dict[str, Any] = {}  # the last microbatch of the last complete step
        self.checked_batch: dict[str, Any] = {}  # the one that `batch_to_check` last returned
        self.document_lengths: list[np.ndarray] = []  # of each microbatch since the last complete step

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> dict[str, Any]:
        job.enter_phase("data")
        with self.tracker.data_wait():
            batch = next(self.batches)
        self.document_lengths.append(batch.pop("document_lengths"))
        self.newest_batch = batch
        return dict(batch)  # a copy: `train_step` pops `loss_divisor`

    def complete_step(self) -> tuple[int, np.ndarray]:
        """Count the microbatches since the last call as a complete step. Return (its tokens on all ranks, without
        padding; the tokens of each document on this rank). Every rank calls this."""
        lengths = np.concatenate(self.document_lengths)
        self.document_lengths.clear()
        self.step_batch = self.newest_batch
        if self.gloo_group is None:
            return int(lengths.sum()) * dist.get_world_size() // self.ranks_per_sequence, lengths
        total = torch.tensor(lengths.sum())
        dist.all_reduce(total, group=self.gloo_group)
        return int(total) // self.ranks_per_sequence, lengths

    def batch_to_check(self, was_skipped: bool) -> dict[str, Any]:
        """Return the microbatch of the pass that looks for NaN before a save: the last one of the last complete step.
        If that step was skipped, its batch may be the cause of a NaN, so that of the previous check is returned, if
        there was one."""
        if not (was_skipped and self.checked_batch):
            self.checked_batch = {name: value for name, value in self.step_batch.items() if name != "loss_divisor"}
        return self.checked_batch


def training_batches(
    settings: flags.Settings, data: TrainingData, state: RunState, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Endless microbatches of this rank on its device, from the global sample `state.samples` on.

    `state` is the run's `TrainState`; it gets the positions of streams with each batch. A batch has `document_lengths`,
    the tokens of each document in it, by which its FLOPs are counted. If not every label counts, a batch has a
    `loss_divisor`: mean losses of batches, divided by it, summed over a step's microbatches and averaged over ranks,
    are the mean over all trained tokens of the global batch. A UserError that a data worker met is raised here. The
    number of bad records of streams that rank 0 has left out is printed at the first one and whenever it is ten times
    as large.
    """
    batches = read_batches(settings, data, state, device)
    return batches if data.is_uniform else add_loss_divisors(batches, settings.gradient_accumulation_steps)


def add_loss_divisors(batches: Iterator[dict[str, Any]], microbatches_per_step: int) -> Iterator[dict[str, Any]]:
    """Add a `loss_divisor` to each microbatch, from the trained labels of all microbatches of a step on all ranks: for
    one without a trained label, whose loss is 0, it is infinite. Every rank calls this; the sum stays on the device."""
    while microbatches := list(itertools.islice(batches, microbatches_per_step)):
        trained = torch.stack([(batch["labels"] != IGNORE_INDEX).sum() for batch in microbatches]).double()
        in_step = trained.sum()
        job.enter_phase("labels")  # from here on a rank waits for the others, which it does not in "data"
        dist.all_reduce(in_step)
        in_step.clamp_(min=1)  # a step may have no trained label; 0 / 0 would be NaN
        divisors = (in_step / (trained * dist.get_world_size())).float()
        for batch, divisor in zip(microbatches, divisors, strict=True):
            yield batch | {"loss_divisor": divisor}


def read_batches(
    settings: flags.Settings, data: TrainingData, state: RunState, device: torch.device
) -> Iterator[dict[str, Any]]:
    """The microbatches of `training_batches`, without a `loss_divisor`."""
    group_index, num_groups = find_group(settings)
    loader = DataLoader(
        RankBatches(settings, data, state.samples, state.positions, group_index, num_groups),
        batch_size=None,
        collate_fn=unchanged,
        num_workers=settings.num_workers,
        prefetch_factor=STREAM_PREFETCH if data.has_streams and settings.num_workers else None,
        worker_init_fn=job.ignore_signals,
        pin_memory=device.type == "cuda",
        # a DataLoader draws a seed when it begins; from torch's own generator a resumed run would draw one more than
        # the run that was not stopped
        generator=torch.Generator(),
    )
    items: Iterator[dict[str, Any]] = map(raise_if_error, loader)
    if data.has_streams:
        items = join_rows(items, max(settings.num_workers, 1), state, pins=device.type == "cuda")
    for batch in items:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        yield batch | {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def find_group(settings: flags.Settings) -> tuple[int, int]:
    """(the index of this rank's group, the number of groups); the ranks of a group read the same sequences."""
    return dist.get_rank() // settings.context_parallel, settings.groups(dist.get_world_size())


def unchanged(item: Any) -> Any:
    """Return the item as it is. The default collate_fn would make a tensor of each array, in a shared memory file."""
    return item


def raise_if_error(item: dict[str, Any] | base.UserError) -> dict[str, Any]:
    if isinstance(item, base.UserError):
        raise item
    return item


def join_rows(items: Iterator[dict[str, Any]], workers: int, state: RunState, pins: bool) -> Iterator[dict[str, Any]]:
    """Join the rows of each microbatch, of which each of `workers` reads some; see `RankBatches.worker_rows`."""
    reported = 0
    while True:
        sequences: dict[int, Any] = {}  # by row
        bad = 0
        for item in itertools.islice(items, workers):  # a DataLoader gives one item of each worker in turn
            sequences |= item["sequences"]
            bad += item["bad_records_so_far"]
            state.move_positions(item["positions"])
        if bad >= max(1, 10 * reported):
            job.print0("data      ", f"left out so far: bad records {bad:,}")
            reported = bad
        rows = [sequences[row] for row in sorted(sequences)]
        batch = collate(rows, with_shift_labels=False)
        if pins:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        yield {**batch, "document_lengths": lengths_in(rows)}


def lengths_in(sequences: Sequence[np.ndarray | PackedSequence]) -> np.ndarray:
    """The `document_lengths` of some sequences together."""
    return np.concatenate([document_lengths(sequence) for sequence in sequences])


@dataclass(eq=False)
class RankBatches(IterableDataset):
    """Endless microbatches of one group of ranks: groups are disjoint, and a step's samples do not depend on how many
    groups or microbatches share them. From token caches and files each data worker reads full microbatches in turn.
    From streams it reads some rows of each microbatch, those of its own shards: a shard is tokenized by one worker. A
    UserError is yielded as the last item, as a DataLoader would wrap it into a traceback."""

    settings: flags.Settings
    data: TrainingData
    first_sample: int
    positions: Positions
    group_index: int
    num_groups: int

    def __iter__(self) -> Iterator[dict[str, Any] | base.UserError]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked worker lacks the threads of its parent's tokenizer
        worker = get_worker_info()
        read = self.worker_rows if self.data.has_streams else self.worker_batches
        try:
            yield from read(worker.id if worker else 0, worker.num_workers if worker else 1)
        except base.UserError as error:
            yield base.UserError(str(error), exit_code=1)  # not 2, wrong usage: training has begun

    def worker_batches(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """The batches of one of several workers: a DataLoader takes one of each worker in turn."""
        reader = SampleReader(self.data, self.positions)
        for microbatch in itertools.count(worker, workers):
            samples = self.microbatch_samples(microbatch)
            sequences, _ = reader.read(samples)
            yield {**collate(sequences, with_shift_labels=False), "document_lengths": lengths_in(sequences)}

    def worker_rows(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Yield the sequences of this worker's shards in each microbatch, by row, and the positions of these shards.
        Shards are assigned round-robin in the order of their first samples, so all workers compute the same owners."""
        reader = SampleReader(self.data, self.positions)
        num_shards = self.data.record.num_shards
        owners: dict[int, int] = {}  # by shard
        for microbatch in itertools.count():
            samples = self.microbatch_samples(microbatch)
            for sample in samples:
                owners.setdefault(sample % num_shards, len(owners) % workers)
            rows = [row for row, sample in enumerate(samples) if owners[sample % num_shards] == worker]
            sequences, positions = reader.read([samples[row] for row in rows])
            by_row = dict(zip(rows, sequences, strict=True))
            yield {"sequences": by_row, "positions": positions, "bad_records_so_far": reader.counts["bad records"]}

    def microbatch_samples(self, microbatch: int) -> range:
        first = self.first_sample + (microbatch * self.num_groups + self.group_index) * self.settings.batch_size
        return range(first, first + self.settings.batch_size)


def eval_batches(
    settings: flags.Settings, dataset: EvalSequences, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """The share of the eval sequences of this rank's group. Each sequence is taken once over all groups, and every rank
    gets the same number of batches: rows past the end repeat sequence 0, with all labels IGNORE_INDEX."""
    group_index, num_groups = find_group(settings)
    per_round = settings.batch_size * num_groups
    num_sequences = min(len(dataset), settings.eval_sequences or len(dataset))
    for number in range(math.ceil(num_sequences / per_round)):
        first = number * per_round + group_index * settings.batch_size
        indices = range(first, first + settings.batch_size)
        sequences = [dataset[index if index < num_sequences else 0] for index in indices]
        batch = collate(sequences, with_shift_labels=False)
        past_end = [index >= num_sequences for index in indices]
        batch["labels"][past_end] = IGNORE_INDEX
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def ranks_evaluating(settings: flags.Settings, number: int) -> range:
    """The ranks on which `eval_batches` takes the eval sequence of this number."""
    group_index = number // settings.batch_size % settings.groups(dist.get_world_size())
    return range(group_index * settings.context_parallel, (group_index + 1) * settings.context_parallel)


def mean_losses(sources: Iterable[str], totals: torch.Tensor) -> tuple[dict[str, float], int]:
    """`eval_loss`, the mean over every token, and of several sources also `eval_loss/NAME`; and how many tokens these
    are. `totals` has the summed loss and the number of tokens of each of `sources`, (sources, 2), over all ranks.

    Raises:
        UserError: a source has no token that is trained on.
    """
    by_source = {}
    for name, (summed_loss, tokens) in zip(sources, totals.tolist(), strict=True):
        if not tokens:
            problem = f"the eval sequences of {name} have no trained token"
            raise base.UserError(f"--eval-interval: {problem}; use a longer --sequence-length or other data", 1)
        by_source[f"eval_loss/{name}"] = summed_loss / tokens
    summed_loss, tokens = totals.sum(0).tolist()
    losses = {"eval_loss": summed_loss / tokens}
    return (losses | by_source if len(by_source) > 1 else losses), int(tokens)
