"""Waits: how long this rank is inside the collectives of a sharded model. Most of that is waiting for slower ranks: the
slowest rank is inside them least. Independent of the other ranks' times."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from harness import model as models
from harness.report.profiling import covered


class Waits:
    """A clock around every all-gather, reduce-scatter and all-reduce of a model's `fully_shard` groups, which work as
    before. It runs in steps with a log line only. On a GPU it is a pair of events on the collective's stream, which
    takes no time there."""

    def __init__(self, model: nn.Module):
        mesh = next(model.parameters()).device_mesh  # type: ignore[attr-defined]  # they are DTensors
        self.cuda = mesh.device_type == "cuda"
        self.runs = False  # whether the current step is timed
        self.began: Any = None  # when the last such step began
        self.spans: list[tuple] = []  # of that step inside collectives: (start, end)
        self.reduced: Any = None  # when the last reduce-scatter ended or, where there is none, its buffer was made
        for module in models.sharded_modules(model):
            group = models.fsdp_group(module)
            # private: in public they can only be set
            all_gather, reduce_scatter = group._all_gather_comm, group._reduce_scatter_comm
            module.set_custom_all_gather(Timed(self, all_gather))  # type: ignore[arg-type]  # as FSDP2 uses it
            module.set_custom_reduce_scatter(Timed(self, reduce_scatter))  # type: ignore[arg-type]
            if mesh.ndim > 1:
                module.set_all_reduce_hook(lambda _: self.add(self.reduced))

    @contextlib.contextmanager
    def step(self, logs: bool) -> Iterator[None]:
        """A training step, with or without a log line after it."""
        if logs:
            self.runs, self.began, self.spans = True, self.now(), []
        yield
        self.runs = False

    def now(self):
        """This moment: seconds on a CPU, on a GPU an event on the current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start) -> None:
        if self.runs:
            self.spans.append((start, self.now()))

    def milliseconds(self) -> float:
        """How long this rank was in a collective in the last step that was timed. The device must be synchronized. Time
        in which several collectives run counts once."""
        return covered([(self.since_began(start), self.since_began(end)) for start, end in self.spans])

    def since_began(self, moment) -> float:
        """Milliseconds from the beginning of the step to a moment."""
        return self.began.elapsed_time(moment) if self.cuda else 1000 * (moment - self.began)


class Timed:
    """A collective with a clock, in the place of one of FSDP2's `AllGather` or `ReduceScatter` objects."""

    def __init__(self, waits: Waits, collective: Any):
        self.waits, self.collective = waits, collective

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.waits.runs:
            self.waits.reduced = self.waits.now()
        return self.collective.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group, **options):
        if not self.waits.runs:
            return self.collective(output_tensor, input_tensor, group, **options)
        start = self.waits.now()
        work = self.collective(output_tensor, input_tensor, group, **options)
        self.waits.add(start)
        self.waits.reduced = self.waits.now()
        return work
