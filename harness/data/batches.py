"""Batches: the microbatches that one rank trains on, read ahead by data workers and moved to its device. Called by the
script."""

import itertools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harness import job
from harness.base.errors import UserError
from harness.data.document_lengths import squared_lengths
from harness.data.sample_order import samples_of_microbatch
from harness.data.streaming import report_left_out
from harness.data.training_data import Positions, SampleReader, TrainingData
from harness.data.windows import create_collate_fn
from harness.flags.settings import Settings

STREAM_PREFETCH = 16  # batches a worker reads ahead of a stream, for the time in which the shuffle buffer is filled


def training_batches(settings: Settings, data: TrainingData, state, device: torch.device) -> Iterator[dict[str, Any]]:
    """Endless microbatches of this rank on its device, from the global sample `state.samples` on.

    `state` is the run's `TrainState`; `state.positions` moves with the batches. Where samples have other numbers of
    trained tokens than each other, a batch has a `loss_divisor`: its mean loss divided by it, summed over a step's
    microbatches and averaged over ranks, is the mean over each trained token of the global batch. With `position_ids` a
    batch has `squared_lengths`, for the tracker. A UserError that a data worker met is raised here.
    """
    loader = build_loader(settings, data, state, pin_memory=device.type == "cuda")
    if device.type != "cuda":
        for batch in loader:
            take_positions(batch, state)
            yield batch
        return
    copies = torch.cuda.Stream()  # the next batch is copied while the current one computes
    ahead = None
    for batch in loader:
        # one batch ahead of the step: a save between steps has where the next step's first window begins
        take_positions(batch, state)
        ready = ahead
        torch.cuda.current_stream().wait_stream(copies)
        with torch.cuda.stream(copies):
            ahead = {name: to_device(value, device) for name, value in batch.items()}
        if ready is not None:
            for value in ready.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(torch.cuda.current_stream())
            yield ready


def to_device(value, device: torch.device):
    """A tensor on the device; a number stays on the host."""
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def build_loader(settings: Settings, data: TrainingData, state, pin_memory: bool) -> DataLoader:
    """The loader of this rank's microbatches."""
    batches = RankBatches(
        data,
        settings.batch_size,
        settings.gradient_accumulation_steps,
        dist.get_rank(),
        dist.get_world_size(),
        state.samples,
        state.positions,
    )
    prefetch = STREAM_PREFETCH if settings.streaming and settings.num_workers else None
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=settings.num_workers,
        prefetch_factor=prefetch,
        worker_init_fn=job.ignore_signals,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own: it draws a seed when it begins, which a resumed run would draw again
    )


@dataclass(eq=False)
class RankBatches(IterableDataset):
    """Endless microbatches of one rank, divided among its data workers in turn. A UserError comes as the last item, as
    a DataLoader would wrap it into a traceback."""

    data: TrainingData
    batch_size: int
    accumulation: int = 1  # microbatches of a step
    rank: int = 0
    world_size: int = 1
    first_sample: int = 0
    positions: Positions | None = None

    def __iter__(self) -> Iterator[dict[str, Any] | UserError]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive the fork of a worker
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # the UserError alone reports what goes wrong
        worker = get_worker_info()
        try:
            yield from self.batches_of(worker.id if worker else 0, worker.num_workers if worker else 1)
        except UserError as error:
            yield UserError(str(error), exit_code=1)

    def batches_of(self, worker: int, workers: int) -> Iterator[dict[str, Any]]:
        """Every batch of one of so many workers: a DataLoader takes one of each in turn."""
        report = report_left_out if self.rank == 0 else None
        reader = SampleReader(self.data, self.first_sample, self.positions or {}, report)
        collate = create_collate_fn(self.data.end_of_text, shift_labels=False)
        per_step = self.accumulation * self.world_size * self.batch_size
        for step in itertools.count():
            first = self.first_sample + step * per_step
            step_samples = range(first, first + per_step)
            reader.enter_step(step_samples)
            trained_in_step = 0
            if not self.data.is_uniform:
                _, trained_in_step = self.data.count_tokens(step_samples)
                if not trained_in_step:
                    raise no_trained_token(self.data, step_samples)
            for number in range(self.accumulation):
                microbatch = step * self.accumulation + number
                if microbatch % workers != worker:
                    continue
                samples = samples_of_microbatch(
                    self.first_sample, microbatch, self.batch_size, self.rank, self.world_size
                )
                windows, positions = reader.read(samples)
                batch = collate(windows)
                if positions:
                    batch["positions"] = positions
                if not self.data.is_uniform:
                    _, trained = self.data.count_tokens(samples)
                    batch["loss_divisor"] = trained_in_step / (trained * self.world_size) if trained else math.inf
                if "position_ids" in batch:
                    batch["squared_lengths"] = squared_lengths(batch["position_ids"], self.real_inputs(samples))
                yield batch

    def real_inputs(self, samples: range) -> np.ndarray | None:
        """Booleans of shape (samples, seq_len), False for padding; None where there is none."""
        if self.data.is_uniform:
            return None
        lengths = [self.data.count_tokens(range(sample, sample + 1))[0] for sample in samples]
        return np.arange(self.data.seq_len) < np.array(lengths)[:, None]


def no_trained_token(data: TrainingData, samples: range) -> UserError:
    """A step of these samples would have no loss."""
    step = data.record.step_of_sample(samples.start)
    problem = f"step {step:,} has no trained token in its samples {samples.start:,} to {samples.stop - 1:,}"
    advice = f"--show-samples {step} shows them; use a longer --sequence-length, larger batches or other data"
    return UserError(f"--dataset: {problem}; {advice}")


def take_positions(batch, state) -> None:
    """Moves the positions of the state to those of a batch of streams, or raises what a data worker met."""
    if isinstance(batch, UserError):
        raise batch
    state.move_positions(batch.pop("positions", {}))
