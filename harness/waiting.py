"""Waiting: how long this rank is inside the collectives of a sharded model. Most of that is waiting for slower ranks:
the slowest rank is the one that is there least. Called by the training loop. It does not know what the others do."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from harness import collectives


class Waiting:
    """A clock around every all-gather, reduce-scatter and all-reduce of a model's `fully_shard` groups.

    On a CPU it runs in every step. On a GPU it is a pair of events on the collective's stream, which takes no time
    there, and it runs in the last step before a log line only.
    """

    def __init__(self, model: nn.Module):
        mesh = next(model.parameters()).device_mesh
        self.cuda, self.runs, self.steps, self.spans = mesh.device_type == "cuda", False, 0, []
        self.reduced = None  # when the last reduce-scatter ended or, where there is none, its buffer was made
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Timed(self, collectives.all_gather()))
                module.set_custom_reduce_scatter(Timed(self, collectives.reduce_scatter(mesh)))
                if mesh.ndim > 1:
                    module.set_all_reduce_hook(lambda _: self.add(self.reduced))

    @contextlib.contextmanager
    def step(self, logs: bool) -> Iterator[None]:
        """A training step, with or without a log line after it."""
        self.runs = logs or not self.cuda
        yield
        self.steps += self.runs
        self.runs = False

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start) -> None:
        if self.runs:
            self.spans.append((start, self.now()))

    def take(self) -> float:
        """Milliseconds in collectives, a step, since this was last called; the device is synchronized."""
        spent = sum(start.elapsed_time(end) if self.cuda else 1000 * (end - start) for start, end in self.spans)
        spent, self.steps, self.spans = spent / max(self.steps, 1), 0, []
        return spent


class Timed:
    """A collective with a clock."""

    def __init__(self, waiting: Waiting, collective: collectives.Collective):
        self.waiting, self.collective = waiting, collective

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.waiting.runs:
            self.waiting.reduced = self.waiting.now()
        return self.collective.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group, **options):
        if not self.waiting.runs:
            return self.collective(output_tensor, input_tensor, group, **options)
        start = self.waiting.now()
        work = self.collective(output_tensor, input_tensor, group, **options)
        self.waiting.add(start)
        self.waiting.reduced = self.waiting.now()
        return work
