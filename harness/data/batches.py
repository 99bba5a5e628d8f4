"""Batches: the microbatches that one rank trains on, read ahead by data workers and moved to its device. Called by the
script."""

import signal
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.base.errors import UserError
from harness.data import sample_order, streaming
from harness.data.windows import create_collate_fn
from harness.flags.settings import Settings
from harness.job.terminal import STOP_SIGNALS

STREAM_PREFETCH = 16  # batches a worker reads ahead of a stream, for the time in which the shuffle buffer is filled


def training_batches(settings: Settings, dataset, state, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of this rank on its device, from the global sample `state.samples` on.

    `state` is the run's `TrainState`. Of a stream, `state.position` moves with the batches. A UserError that a data
    worker met is raised here.
    """
    loader = build_loader(settings, dataset, state, pin_memory=device.type == "cuda")
    if device.type != "cuda":
        for batch in loader:
            take_position(batch, state)
            yield batch
        return
    copies = torch.cuda.Stream()  # the next batch is copied while the current one computes
    ahead = None
    for batch in loader:
        # one batch ahead of the step: a save between steps has where the next step's first window begins
        take_position(batch, state)
        ready = ahead
        torch.cuda.current_stream().wait_stream(copies)
        with torch.cuda.stream(copies):
            ahead = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if ready is not None:
            for tensor in ready.values():
                tensor.record_stream(torch.cuda.current_stream())
            yield ready


def build_loader(settings: Settings, dataset, state, pin_memory: bool) -> DataLoader:
    """The loader of this rank's microbatches: shares of a stream, or windows in the global order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if settings.streaming:
        source = {
            "dataset": streaming.StreamedBatches(
                dataset, settings.batch_size, rank, world_size, state.samples, state.position
            ),
            "batch_size": None,
            "prefetch_factor": STREAM_PREFETCH if settings.num_workers else None,
        }
    else:
        source = {
            "dataset": dataset,
            "batch_sampler": sample_order.GlobalOrderSampler(
                len(dataset), settings.batch_size, rank, world_size, settings.seed, state.samples
            ),
            "collate_fn": create_collate_fn(dataset.end_of_text, shift_labels=False),
        }
    return DataLoader(
        **source,
        num_workers=settings.num_workers,
        worker_init_fn=ignore_signals,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own: it draws a seed when it begins, which a resumed run would draw again
    )


def take_position(batch, state) -> None:
    """Moves `state.position` to that of a batch of a stream, or raises what a data worker met."""
    if isinstance(batch, UserError):
        raise batch
    state.position = batch.pop("position", None)


def ignore_signals(worker: int) -> None:
    """A scheduler signals every process of a job; the data workers serve until their rank leaves."""
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
