"""Figures: the table of all that a line of metrics.jsonl holds, those that all ranks measure together, and the gates
that they must pass."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import base, flags
from harness import state as states

# ---- The table -------------------------------------------------------------------------------------------------------

# A row is a figure: its key in metrics.jsonl | its name in wandb and tensorboard | its unit | its chart on the page |
# its format on the page's tiles | what it is. A key in /SOURCE is there once for each source of the data.
TABLE = """
loss|train/loss|nats per token|Loss|.4f|mean cross-entropy over every trained token of the global batch
eval_loss|eval/loss|nats per token|Loss|.4f|mean loss over the held-out tokens, at evaluations
eval_loss/SOURCE|eval/loss/SOURCE|nats per token|Held-out loss by source||eval_loss of one source
step||steps||,|optimizer steps so far, counted from the run's first start
tokens_seen|data/tokens_seen|tokens||,|tokens that were trained on so far, on all ranks
tokens_per_sec|perf/tokens_per_sec|tokens/s|Throughput|,.0f|tokens of the window over its seconds, on all ranks
tokens_per_sec_per_gpu|perf/tokens_per_sec_per_gpu|tokens/s|||tokens_per_sec over the number of ranks
steps_per_sec|perf/steps_per_sec|steps/s|||optimizer steps of the window over its seconds
flops_per_token|perf/flops_per_token|FLOPs|||mean over the window's tokens, each in its own document
mfu_percent|perf/mfu_percent|%|MFU|.1f|100 x actual_tflops_per_sec / theoretical_tflops_total
actual_tflops_per_sec|perf/actual_tflops_per_sec|TFLOPS|||tokens_per_sec x flops_per_token
theoretical_tflops_total|perf/theoretical_tflops_total|TFLOPS|||dense bf16 peak of one GPU x number of ranks
step_time_ms|perf/step_time_ms|ms|Step time|,.1f|mean time of a step in the window, on rank 0
peak_memory_reserved|memory/peak_reserved_gib|GiB|Memory|.1f|what torch's allocator held of the fullest GPU, at most
peak_memory_alloc|memory/peak_alloc_gib|GiB|Memory||what tensors were given on the fullest GPU, at most
peak_memory_active|memory/peak_active_gib|GiB|||what was in use or awaited by a stream on the fullest GPU, at most
grad_norm|train/grad_norm||Gradient norm||norm of the gradients before clipping
learning_rate|train/learning_rate||Learning rate||learning rate of the step
skipped_steps|train/skipped_steps|steps|||steps so far that were skipped, for a norm that is not finite
data_wait_percent|data/wait_percent|%|Waiting for data|.1f|time that the host waited for batches, on the worst rank
best_step|eval/best_step|steps|||step of the checkpoint that --keep-best keeps, on the last line
best_eval_loss|eval/best_loss|nats per token|||eval_loss of that checkpoint
goodput_percent|perf/goodput_percent|%||.1f|100 x trained_seconds / elapsed_seconds, at most 100
trained_seconds|perf/trained_seconds|s|||time of all steps at their usual speed, that of the median window
elapsed_seconds|perf/elapsed_seconds|s|||time since the run's first process started
router_loss|train/router_loss||Router loss||router loss of a mixture of experts before its coefficient
expert_load_max|train/expert_load_max||Fullest expert||tokens of the fullest expert over an even share; 1 is even
padding_percent|data/padding_percent|%|||share of padding in all that was read so far
share/SOURCE|data/share/SOURCE||Shares of the sources||share of a source in the tokens, as asked for, 0 to 1
epochs/SOURCE|data/epochs/SOURCE|epochs|||passes over a source so far
predicted_peak_memory_alloc|plan/peak_alloc_gib|GiB|||peak_memory_alloc by the run's own plan, on the last line
predicted_peak_memory_reserved|plan/peak_reserved_gib|GiB|||peak_memory_reserved by the run's own plan
predicted_step_time_ms|plan/step_time_ms|ms|||step_time_ms by the run's own plan, on the last line
"""
NOTES = ("final", "samples", "skipped")  # keys of a line that are no figures


class Figure(NamedTuple):
    key: str
    name: str
    unit: str
    chart: str  # figures of the same chart share it, in the order of the table; empty: none
    tile: str  # a format; empty: no tile
    words: str


METRICS = {figure.key: figure for figure in (Figure(*row.split("|")) for row in TABLE.strip().splitlines())}


def find(key: str) -> Figure | None:
    """The row of a key of metrics.jsonl, of any source of the data too; None where it has none."""
    key, _, source = key.partition("/")
    return METRICS.get(f"{key}/SOURCE" if source else key)


def named(metrics: dict) -> dict[str, float]:
    """The figures of a line under their names in wandb and tensorboard, without notes and the step. A key without a row
    is in the group `other`."""
    row = {}
    for key, value in metrics.items():
        if key == "step" or key in NOTES:
            continue
        figure = find(key)
        row[figure.name.replace("SOURCE", key.partition("/")[2]) if figure else f"other/{key}"] = value
    return row


# ---- Of all ranks ----------------------------------------------------------------------------------------------------

WORST = ("peak_memory_active", "peak_memory_alloc", "peak_memory_reserved", "data_wait_percent")  # the largest counts
FLOPS = {"flops_per_token", "actual_tflops_per_sec", "mfu_percent"}  # means over ranks, whose documents differ


def gather_metrics(speed: dict[str, float], state: states.TrainState, device: torch.device) -> dict[str, float]:
    """The figures of a log line that all ranks measure. `speed` is what this rank's tracker measured; nothing in
    warmup, and then there is memory alone. Every rank calls this."""
    own = speed if "peak_memory_reserved" in speed else speed | base.memory_metrics()
    row = torch.tensor([own.get(name, 0.0) for name in WORST], dtype=torch.float64, device=device)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    worst = {name: value for name, value in zip(WORST, row.tolist(), strict=True) if name in own}
    if "flops_per_token" in speed:
        mean = torch.tensor(speed["flops_per_token"], dtype=torch.float64, device=device)  # this rank's documents
        dist.all_reduce(mean)
        share = mean.item() / dist.get_world_size() / speed["flops_per_token"]
        speed = speed | {name: share * speed[name] for name in FLOPS & speed.keys()}
    return with_run_times(speed, state) | worst


def with_run_times(speed: dict[str, float], state: states.TrainState) -> dict[str, float]:
    """`speed` with the time of the whole run; nothing in warmup."""
    if "step_time_ms" not in speed:
        return {}
    trained, elapsed = state.productive_seconds(), state.elapsed
    goodput = min(100.0, 100 * trained / elapsed)
    return speed | {"trained_seconds": trained, "elapsed_seconds": elapsed, "goodput_percent": goodput}


# ---- Gates -----------------------------------------------------------------------------------------------------------


def check_measurable(settings: flags.Args, device: torch.device, peak_tflops: float | None) -> None:
    """Raises UserError for a gate or a record of something that this machine does not measure. `peak_tflops` is the
    device's, None where it is not known."""
    if settings.min_mfu and not peak_tflops:
        raise base.UserError("--min-mfu: there is no MFU without the device's peak; give --peak-tflops")
    for flag, value in (("--max-memory-gib", settings.max_memory_gib), ("--memory-snapshot", settings.memory_snapshot)):
        if value and device.type != "cuda":
            raise base.UserError(f"{flag}: memory is measured on a GPU only; leave it out")


def check_gates(settings: flags.Settings, metrics: dict) -> None:
    """Raises UserError with exit code 3 when a figure of the last line missed its gate."""
    missed = []
    mfu, reserved = metrics.get("mfu_percent"), metrics.get("peak_memory_reserved")
    if settings.min_mfu and mfu is None:  # a resumed run may end within its warmup
        problem = f"the MFU was not measured, as no step came after the {settings.perf_warmup_steps} of warmup"
        missed.append(f"--min-mfu {settings.min_mfu:g}: {problem}; more --num-steps, or fewer --perf-warmup-steps")
    elif settings.min_mfu and mfu < settings.min_mfu:
        missed.append(f"--min-mfu {settings.min_mfu:g}: the MFU was {mfu:.2f} %")
    if settings.max_memory_gib and reserved is None:
        problem = "peak_memory_reserved was not measured, as no step was taken"
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: {problem}; more --num-steps")
    elif settings.max_memory_gib and reserved > settings.max_memory_gib:
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: peak_memory_reserved was {reserved:.2f} GiB")
    if missed:
        raise base.UserError("acceptance gate missed: " + "; ".join(missed), exit_code=3)
