"""Profiling: a trace of a few steps, where their time went, and the history of memory."""

import contextlib
import pathlib
import re
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from harness.base import torch_internals
from harness.base.devices import wait_for_device
from harness.job import Due, columns, say
from harness.state.train_state import TrainState

MAX_MEMORY_EVENTS = 200_000  # allocations and frees in a memory snapshot, the latest


class Profiler:
    """Profiles the steps of a run for which that is due."""

    def __init__(self, folder: pathlib.Path, state: TrainState):
        self.folder, self.state, self.trace = folder, state, contextlib.ExitStack()

    @contextlib.contextmanager
    def step(self, due: Due) -> Iterator[None]:
        """A training step, with the counting of it."""
        if due.profile_begins:
            self.trace.enter_context(profiling(self.folder, self.state))
        yield
        if due.profile_ends:
            self.finish()

    def finish(self) -> None:
        """Ends a profile that is under way, of a run that was stopped within it too."""
        self.trace.close()


@contextlib.contextmanager
def profiling(folder: pathlib.Path, state: TrainState):
    """Traces the steps taken inside, on rank 0, and says where their time went; no speed figure counts them."""
    with state.tracker.excluded():
        profiler = torch.profiler.profile() if dist.get_rank() == 0 else contextlib.nullcontext()
        with profiler as profile:
            wait_for_device()  # the clock starts after the profiler: CUPTI takes seconds
            first_step, start = state.step, time.perf_counter()
            yield
            wait_for_device()
            seconds = time.perf_counter() - start
        if profile:
            (folder / "profile").mkdir(exist_ok=True)
            profile.export_chrome_trace(str(folder / "profile" / "rank-0.json"))
            steps = state.step - first_step
            shares = time_shares(profile.events(), seconds)
            table = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items())
            say(columns({"profile": f"{steps} steps of {1000 * seconds / steps:,.1f} ms: {table}"}))
        dist.barrier()  # until rank 0 has written: the clocks of the other ranks must not count that either


def record_memory(folder: pathlib.Path) -> None:
    """Records allocations from now on, and dumps them when memory runs out."""
    torch_internals.record_memory_history(max_entries=MAX_MEMORY_EVENTS)
    torch_internals.call_when_out_of_memory(lambda *_: dump_memory(folder))


def dump_memory(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch_internals.dump_memory_snapshot(str(folder / f"memory-rank-{dist.get_rank()}.pickle"))


def time_shares(events, seconds: float) -> dict[str, float]:
    """Percent of `seconds` in which a device computed, communicated, communicated without computing, and was idle.

    Args:
        events: of a `torch.profiler.profile`. Where there are GPU kernels they alone count, NCCL's as communication;
            on a CPU every operator counts, collectives and gloo's threads as communication.
    """
    events = [event for event in events if not event.is_user_annotation or event.name.startswith("gloo:")]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list] = {False: [], True: []}
    for event in kernels or events:
        communicates = re.match("nccl|gloo:|c10d::|_c10d_functional::", event.name) is not None
        spans[communicates].append((event.time_range.start, event.time_range.end))
    compute, busy = covered(spans[False]), covered(spans[False] + spans[True])
    microseconds = {
        "compute": compute,
        "communication": covered(spans[True]),
        "exposed communication": busy - compute,
        "idle": 1e6 * seconds - busy,
    }
    return {name: 100 * value / (1e6 * seconds) for name, value in microseconds.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end), in their unit."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
