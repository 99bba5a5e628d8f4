"""Profiling: a trace of a few steps, the shares of their time, and the history of memory."""

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

MAX_MEMORY_EVENTS = 200_000  # latest allocations and frees in a memory snapshot


@contextlib.contextmanager
def profiling(folder: pathlib.Path, state: states.TrainState) -> Iterator[None]:
    """Trace the steps inside on rank 0, and print the shares of their time. Speed metrics leave them out. An
    evaluation, samples or a save between them are in the trace, but not in the shares."""
    with state.tracker.paused():
        profiler = torch.profiler.profile() if dist.get_rank() == 0 else contextlib.nullcontext()
        with profiler as profile:
            base.wait_for_device()  # the clock starts after the profiler: CUPTI takes seconds
            first_step, start = state.step, time.perf_counter()
            yield
            base.wait_for_device()
            seconds = time.perf_counter() - start
        if profile and state.step > first_step:  # a stop can come in the first step
            with base.working():
                write_trace(profile, folder / "profile" / "rank-0.json")
                print_profile(profile.events(), state.step - first_step, seconds)
            # Events are cyclic garbage. If an evaluation during the steps has frozen their profiler, each log line
            # would scan them until the next evaluation.
            del profiler, profile
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        dist.barrier()  # the clocks of all ranks leave out the writing of the trace


def write_trace(profile: torch.profiler.profile, path: pathlib.Path) -> None:
    """Write a trace. If the disk refuses it, a line says so and the run continues."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        profile.export_chrome_trace(str(path))
        if not path.exists():  # torch raises no error
            raise OSError(0, "the disk is full or read-only")
    except OSError as error:
        job.print0(f"failed     {path}: {error.strerror}; the run continues without its trace")


def print_profile(events: list[FunctionEvent], steps: int, seconds: float) -> None:
    """Print the line of a profile of `steps` steps. `seconds` include the pauses between them."""
    seconds -= union_length(paused_spans(events)) / 1e6
    shares = time_shares(events, seconds)
    table = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items())
    job.print0(job.columns({"profile": f"{steps} steps of {1000 * seconds / steps:,.1f} ms: {table}"}))


def record_memory(folder: pathlib.Path) -> None:
    """Record allocations from now on, and dump them when memory runs out."""
    # private: the names that torch's guide to CUDA memory documents
    torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
    # private: no public name calls back before the error is raised, while the allocations are still alive
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: dump_memory(folder))  # type: ignore[attr-defined]


@base.working()
def dump_memory(folder: pathlib.Path) -> None:
    """Write memory-rank-N.pickle for https://docs.pytorch.org/memory_viz. If the disk refuses it, a line says so."""
    path = folder / f"memory-rank-{dist.get_rank()}.pickle"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # private: the name that torch's guide to CUDA memory documents
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        job.print_error(f"train_fsdp.py: {path} is not written ({error.strerror}); the run continues without it")


def time_shares(events: list[FunctionEvent], seconds: float) -> dict[str, float]:
    """Percent of `seconds` for compute, communication, communication without compute, and idle time of a device.

    Args:
        events: of a `torch.profiler.profile`. With GPU kernels only these count, NCCL's as communication; on a CPU each
            operator counts with its self time, collectives and gloo's threads as communication. Events while the
            clock was paused (`PerformanceTracker.paused`) do not count.
        seconds: duration of the profile without pauses of the clock.
    """
    left_out = paused_spans(events)
    events = [event for event in events if not event.is_user_annotation or event.name.startswith("gloo:")]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list] = {False: [], True: []}
    for event in kernels or events:
        communicates = re.match("nccl|gloo:|c10d::|_c10d_functional::", event.name) is not None
        spans[communicates] += self_time_spans(event)
    # lengths without the pauses
    compute, communication, busy = (
        union_length(kind + left_out) - union_length(left_out)
        for kind in (spans[False], spans[True], spans[False] + spans[True])
    )
    microseconds = {
        "compute": compute,
        "communication": communication,
        "exposed communication": busy - compute,
        "idle": 1e6 * seconds - busy,
    }
    return {name: 100 * value / (1e6 * seconds) for name, value in microseconds.items()}


def paused_spans(events: list[FunctionEvent]) -> list[tuple[float, float]]:
    """The (start, end) of each pause of the clock, from its marks in the profile."""
    cpu_events = (event for event in events if event.device_type == torch.autograd.DeviceType.CPU)
    return [(event.time_range.start, event.time_range.end) for event in cpu_events if event.name == base.CLOCK_STOPPED]


def self_time_spans(event: FunctionEvent) -> Iterator[tuple[float, float]]:
    """The (start, end) of an event without its children: FSDP waits for a collective inside an autograd operator."""
    reached = event.time_range.start
    for child in sorted(event.cpu_children, key=lambda child: child.time_range.start):
        yield reached, child.time_range.start
        reached = child.time_range.end
    yield reached, event.time_range.end


def union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end), in their unit."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
