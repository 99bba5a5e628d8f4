"""Profiling: a trace of a few steps, where their time went, and the history of memory."""

import contextlib
import gc
import pathlib
import re
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent

from harness import base, job
from harness import state as states

MAX_MEMORY_EVENTS = 200_000  # allocations and frees in a memory snapshot, the latest


@contextlib.contextmanager
def profiling(folder: pathlib.Path, state: states.TrainState) -> Iterator[None]:
    """Traces the steps taken inside, on rank 0, and says where their time went; no speed figure counts them. An
    evaluation, samples or a save among them are in the trace, but no part of the steps' time."""
    with state.tracker.paused():
        profiler = torch.profiler.profile() if dist.get_rank() == 0 else contextlib.nullcontext()
        with profiler as profile:
            base.wait_for_device()  # the clock starts after the profiler: CUPTI takes seconds
            first_step, start = state.step, time.perf_counter()
            yield
            base.wait_for_device()
            seconds = time.perf_counter() - start
        if profile and state.step > first_step:  # a stop can come within its first step
            (folder / "profile").mkdir(exist_ok=True)
            with base.working():
                profile.export_chrome_trace(str(folder / "profile" / "rank-0.json"))
                say_profile(profile.events(), state.step - first_step, seconds)
            # Events are garbage in cycles. An evaluation's line among the steps has frozen the profiler that holds
            # them, so that they would be looked through at each line until the next evaluation.
            del profiler, profile
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        dist.barrier()  # until rank 0 has written: the clocks of the other ranks must not count that either


def say_profile(events: list[FunctionEvent], steps: int, seconds: float) -> None:
    """The line of a profile that took so many seconds, with all that was among its steps."""
    seconds -= covered(excluded_spans(events)) / 1e6
    shares = time_shares(events, seconds)
    table = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items())
    job.print0(job.columns({"profile": f"{steps} steps of {1000 * seconds / steps:,.1f} ms: {table}"}))


def record_memory(folder: pathlib.Path) -> None:
    """Records allocations from now on, and dumps them when memory runs out."""
    # private: the names that torch's guide to CUDA memory documents
    torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
    # private: no public name calls back before the error is raised, while what fills the memory is still there
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: dump_memory(folder))  # type: ignore[attr-defined]


@base.working()
def dump_memory(folder: pathlib.Path) -> None:
    """Writes memory-rank-N.pickle, which https://docs.pytorch.org/memory_viz shows."""
    folder.mkdir(parents=True, exist_ok=True)
    # private: the name that torch's guide to CUDA memory documents
    torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank-{dist.get_rank()}.pickle"))


def time_shares(events: list[FunctionEvent], seconds: float) -> dict[str, float]:
    """Percent of `seconds` in which a device computed, communicated, communicated without computing, and was idle.

    Args:
        events: of a `torch.profiler.profile`. Where there are GPU kernels they alone count, NCCL's as communication;
            on a CPU every operator counts for what it does itself, collectives and gloo's threads as communication.
            What ran while the clock was stopped (`PerformanceTracker.excluded`) does not count.
        seconds: that the profile took, without those in which the clock was stopped.
    """
    left_out = excluded_spans(events)
    events = [event for event in events if not event.is_user_annotation or event.name.startswith("gloo:")]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list] = {False: [], True: []}
    for event in kernels or events:
        communicates = re.match("nccl|gloo:|c10d::|_c10d_functional::", event.name) is not None
        spans[communicates] += own_spans(event)
    # what is covered of the steps' own time: of all time, less what was left out of it
    compute, communication, busy = (
        covered(kind + left_out) - covered(left_out) for kind in (spans[False], spans[True], spans[False] + spans[True])
    )
    microseconds = {
        "compute": compute,
        "communication": communication,
        "exposed communication": busy - compute,
        "idle": 1e6 * seconds - busy,
    }
    return {name: 100 * value / (1e6 * seconds) for name, value in microseconds.items()}


def excluded_spans(events: list[FunctionEvent]) -> list[tuple[float, float]]:
    """When the clock was stopped, by the marks that it leaves in a profile."""
    cpu_events = (event for event in events if event.device_type == torch.autograd.DeviceType.CPU)
    return [(event.time_range.start, event.time_range.end) for event in cpu_events if event.name == base.CLOCK_STOPPED]


def own_spans(event: FunctionEvent) -> Iterator[tuple[float, float]]:
    """When an event ran, without the events inside it: FSDP waits for a collective inside an operator of autograd."""
    reached = event.time_range.start
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        yield reached, child.time_range.start
        reached = child.time_range.end
    yield reached, event.time_range.end


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end), in their unit."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
