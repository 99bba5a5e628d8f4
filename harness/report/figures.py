"""Figures of all ranks, and the gates that they must pass."""

import dataclasses
import math

import torch
import torch.distributed as dist

from harness.base.devices import GIB
from harness.base.errors import UserError
from harness.flags.settings import Settings
from harness.report.slow_ranks import SlowRanks
from harness.state.train_state import TrainState


def check_that_figures_will_exist(settings: Settings, device: torch.device, peak_tflops: float | None) -> None:
    """Raises UserError for a gate or a record of something that this machine does not measure. `peak_tflops` is the
    device's, None where it is not known."""
    if settings.min_mfu and not peak_tflops:
        raise UserError("--min-mfu: there is no MFU without the device's peak; give --peak-tflops")
    memory_flags = {"--max-memory-gib": settings.max_memory_gib, "--memory-snapshot": settings.memory_snapshot}
    for flag, value in memory_flags.items():
        if value and device.type != "cuda":
            raise UserError(f"{flag}: memory is measured on a GPU only; leave it out")


def check_gates(settings: Settings, metrics: dict) -> None:
    """Raises UserError with exit code 3 when a figure missed its gate."""
    missed = []
    reserved = metrics.get("peak_memory_reserved", 0.0)
    mfu = metrics.get("mfu_percent", 0.0)  # a resumed run may end within its warmup
    if settings.min_mfu and mfu < settings.min_mfu:
        missed.append(f"--min-mfu {settings.min_mfu:g}: the MFU was {mfu:.2f} %")
    if settings.max_memory_gib and reserved > settings.max_memory_gib:
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: peak_memory_reserved was {reserved:.2f} GiB")
    if missed:
        raise UserError("acceptance gate missed: " + "; ".join(missed), exit_code=3)


ABSENT = -math.inf  # a figure that a rank did not measure: less than any other in a maximum


@dataclasses.dataclass(frozen=True)
class RankFigures:
    """What one rank measured for a log line. All are numbers: a row of the tensor in which they are gathered."""

    peak_memory_active: float = ABSENT  # GiB, as `memory_figures` has it
    peak_memory_alloc: float = ABSENT
    peak_memory_reserved: float = ABSENT
    step_time_ms: float = ABSENT
    data_wait_percent: float = ABSENT
    waited_ms: float = ABSENT  # of a step, inside collectives
    squared_lengths: float = ABSENT  # of the documents of the window, the sum of their lengths' squares

    @property
    def worked_ms(self) -> float:
        """Milliseconds of a step outside collectives. Below zero on a GPU whose collectives, which run beside the work,
        took longer than a step: only differences between ranks mean something."""
        return self.step_time_ms - self.waited_ms


def figures_of_all_ranks(
    speed: dict[str, float],
    state: TrainState,
    device: torch.device,
    waited_ms: float | None = None,
    slow_ranks: SlowRanks | None = None,
) -> dict[str, float]:
    """Speed as this rank saw it, the figures of `worst_of_ranks`, MFU by the documents of all ranks where `speed` has
    the `squared_lengths` of this one's, and goodput; in warmup memory alone.

    `waited_ms` is how long this rank was inside collectives in a step, None where that was not timed; by it
    `slow_ranks` names a rank that the others wait for. Either all ranks call this with speed or none does.
    """
    own = memory_figures(device)
    speed = dict(speed)
    if "squared_lengths" in speed:
        own["squared_lengths"] = speed.pop("squared_lengths")
    timed = "step_time_ms" in speed
    if timed:
        own |= {"step_time_ms": speed["step_time_ms"], "data_wait_percent": speed["data_wait_percent"]}
        if waited_ms is not None:
            own["waited_ms"] = waited_ms
    if not own:  # the same on every rank, so none waits in a collective
        return {}
    ranks = gather(RankFigures(**own), device)
    worst = worst_of_ranks(ranks)
    if not timed:
        return worst
    if slow_ranks and waited_ms is not None:
        slow_ranks.judge([rank.worked_ms for rank in ranks], worst["slowest_rank_ms"])
    # the rest of the time since the run began is start-up, compilation, evaluation, pauses, and after a resume what was
    # lost and the time between
    trained, elapsed = state.productive_seconds(), state.elapsed
    figures = speed | worst
    squared_lengths = [rank.squared_lengths for rank in ranks]
    if ABSENT not in squared_lengths:
        figures |= state.tracker.count_documents(sum(squared_lengths))
    figures["trained_seconds"] = trained
    figures["elapsed_seconds"] = elapsed
    figures["goodput_percent"] = min(100.0, 100 * trained / elapsed)
    return figures


def gather(own: RankFigures, device: torch.device) -> list[RankFigures]:
    """The figures of every rank, in the order of the ranks, by one all-reduce: each rank fills its row of a table, and
    the largest of a figure and `ABSENT` is the figure."""
    row = dataclasses.astuple(own)
    table = torch.full((dist.get_world_size(), len(row)), ABSENT, dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(row, dtype=torch.float64)
    table = table.to(device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return [RankFigures(*values) for values in table.tolist()]


def worst_of_ranks(ranks: list[RankFigures]) -> dict[str, float]:
    """The fullest rank's memory, and after warmup the slowest rank's step time and data wait.

    With more than one rank also `slowest_rank`, the one that worked longest outside collectives, where ranks wait for
    slower ones. Of equal ranks it is the first.
    """
    worst = {}
    for name in ("peak_memory_active", "peak_memory_alloc", "peak_memory_reserved"):
        worst[name] = max(getattr(rank, name) for rank in ranks)
    worst["slowest_rank_ms"] = max(rank.step_time_ms for rank in ranks)
    worst["data_wait_percent"] = max(rank.data_wait_percent for rank in ranks)
    if len(ranks) > 1 and all(rank.waited_ms != ABSENT for rank in ranks):
        worked_ms = [rank.worked_ms for rank in ranks]
        worst["slowest_rank"] = worked_ms.index(max(worked_ms))
    return {key: value for key, value in worst.items() if value != ABSENT}


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
