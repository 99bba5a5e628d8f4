"""Figures of all ranks, and the gates that they must pass."""

import math

import torch
import torch.distributed as dist

from harness.base.devices import GIB
from harness.base.errors import UserError
from harness.flags.settings import Settings
from harness.report.health import KernelClock
from harness.state.train_state import TrainState


def check_that_figures_will_exist(settings: Settings, device: torch.device, peak_tflops: float | None) -> None:
    """Raises UserError for a gate or a record of something that this machine does not measure. `peak_tflops` is that of
    the device, if it is known."""
    if settings.min_mfu and not peak_tflops:
        raise UserError("--min-mfu: there is no MFU without the device's peak; give --peak-tflops")
    of_memory = {"--max-memory-gib": settings.max_memory_gib, "--memory-snapshot": settings.memory_snapshot}
    if device.type != "cuda" and (given := [flag for flag, value in of_memory.items() if value]):
        raise UserError(f"{given[0]}: memory is measured on a GPU only; leave it out")


def check_gates(settings: Settings, metrics: dict) -> None:
    """Raises UserError with exit code 3 when a figure missed its gate."""
    missed, reserved = [], metrics.get("peak_memory_reserved", 0.0)
    mfu = metrics.get("mfu_percent", 0.0)  # a resumed run may end within its warmup
    if settings.min_mfu and mfu < settings.min_mfu:
        missed.append(f"--min-mfu {settings.min_mfu:g}: the MFU was {mfu:.2f} %")
    if settings.max_memory_gib and reserved > settings.max_memory_gib:
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: peak_memory_reserved was {reserved:.2f} GiB")
    if missed:
        raise UserError("acceptance gate missed: " + "; ".join(missed), exit_code=3)


def figures_of_all_ranks(
    speed: dict[str, float],
    state: TrainState,
    device: torch.device,
    waited_ms: float | None = None,
    clock: KernelClock | None = None,
) -> dict[str, float]:
    """Speed as this rank saw it, the slowest rank's step time and data wait, the fullest rank's memory, goodput.

    With the milliseconds of a step that each rank was in collectives also `slowest_rank`, the one that was there least;
    with a clock, where it is due, the fixed kernel's time on the slowest rank.
    """
    worst, rank, world = memory_figures(device), dist.get_rank(), dist.get_world_size()
    if "step_time_ms" in speed:
        worst |= {"slowest_rank_ms": speed["step_time_ms"], "data_wait_percent": speed["data_wait_percent"]}
    if worst:
        # each rank's in its place: the largest is what it says
        own = torch.full((3, world), -math.inf, dtype=torch.float64)
        # not clipped: on a GPU collectives run beside the work, and all ranks may be in them for longer than a step
        own[0, rank] = speed.get("step_time_ms", 0.0) - (waited_ms or 0.0)
        if clock and "step_time_ms" in speed:
            with state.tracker.excluded():
                own[1:, rank] = torch.tensor(clock.measure(state.step), dtype=own.dtype)
        values = torch.cat([torch.tensor([*worst.values()], dtype=torch.float64), own.flatten()]).to(device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        values = values.tolist()
        worst = dict(zip(worst, values, strict=False))
        worked, kernel_ms, reasons = (values[len(values) + n * world :][:world] for n in (-3, -2, -1))
        if waited_ms is not None and world > 1 and "step_time_ms" in speed:
            worst["slowest_rank"] = worked.index(max(worked))
        if clock and "step_time_ms" in speed:
            worst |= clock.judge(kernel_ms, [*map(int, reasons)], state.step, worst["slowest_rank_ms"])
    if "step_time_ms" not in speed:
        return worst
    # the rest of the time since the run began is start-up, compilation, evaluation, standing still, and after a resume
    # what was lost and the time between
    trained, elapsed = state.productive_seconds(), state.elapsed
    times = {"trained_seconds": trained, "elapsed_seconds": elapsed}
    return speed | worst | times | {"goodput_percent": min(100.0, 100 * trained / elapsed)}


def memory_figures(device: torch.device) -> dict[str, float]:
    """This rank's peaks since the last reset in GiB, by torch's caching allocator; `{}` on a CPU.

    `peak_memory_active` counts blocks in use or still awaited by a stream, `peak_memory_alloc` what tensors were given,
    `peak_memory_reserved` what the process held of the card.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = {"active": "active_bytes", "alloc": "allocated_bytes", "reserved": "reserved_bytes"}
    return {f"peak_memory_{name}": stats[f"{key}.all.peak"] / GIB for name, key in names.items()}
