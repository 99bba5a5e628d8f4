"""Metrics: the table of all keys of metrics.jsonl, the metrics that are measured over all ranks, and the acceptance
gates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness import base, flags
from harness import state as states
from harness.report.health import StepResult

# ---- The table -------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A key of metrics.jsonl. `NAME/SOURCE` stands for one key for each source of the data."""

    key: str
    tracker_name: str  # in wandb and tensorboard
    unit: str
    description: str
    chart: str = ""  # title of its chart on the page, shared by several metrics; empty: none
    tile: str = ""  # format of its tile on the page; empty: none
    function: Callable[[Any, StepResult], Any] | None = None  # of a registered metric: of the model and a step's result
    reduce: str = ""  # of its values over the ranks, one of REDUCTIONS
    on_console: bool = False  # True if a log line on the console has it


# fmt: off
ROWS = (
    Metric("loss", "train/loss", "nats per token",
        "mean cross-entropy over every trained token of the global batch", chart="Loss", tile=".4f"),
    Metric("eval_loss", "eval/loss", "nats per token",
        "mean loss over the tokens of the eval split, at evaluations", chart="Loss", tile=".4f"),
    Metric("eval_loss/SOURCE", "eval/loss/SOURCE", "nats per token",
        "eval_loss of one source", chart="Eval loss by source"),
    Metric("step", "", "steps", "optimizer steps so far, counted from the run's first start", tile=","),
    Metric("tokens_seen", "data/tokens_seen", "tokens", "trained tokens so far, on all ranks", tile=","),
    Metric("tokens_per_sec", "perf/tokens_per_sec", "tokens/s",
        "tokens of the interval over its seconds, on all ranks", chart="Throughput", tile=",.0f"),
    Metric("tokens_per_sec_per_gpu", "perf/tokens_per_sec_per_gpu", "tokens/s",
        "tokens_per_sec over the number of ranks"),
    Metric("steps_per_sec", "perf/steps_per_sec", "steps/s", "optimizer steps of the interval over its seconds"),
    Metric("flops_per_token", "perf/flops_per_token", "FLOPs",
        "mean over the interval's tokens, each in its own document"),
    Metric("mfu_percent", "perf/mfu_percent", "%",
        "100 x actual_tflops_per_sec / theoretical_tflops_total", chart="MFU", tile=".1f"),
    Metric("actual_tflops_per_sec", "perf/actual_tflops_per_sec", "TFLOPS", "tokens_per_sec x flops_per_token"),
    Metric("theoretical_tflops_total", "perf/theoretical_tflops_total", "TFLOPS",
        "dense bf16 peak of one GPU x number of ranks"),
    Metric("step_time_ms", "perf/step_time_ms", "ms",
        "mean time of a step in the interval, on rank 0", chart="Step time", tile=",.1f"),
    Metric("peak_memory_reserved", "memory/peak_reserved_gib", "GiB",
        "peak memory held by torch's allocator, on the fullest GPU", chart="Memory", tile=".1f"),
    Metric("peak_memory_alloc", "memory/peak_alloc_gib", "GiB",
        "peak memory allocated to tensors, on the fullest GPU", chart="Memory"),
    Metric("peak_memory_active", "memory/peak_active_gib", "GiB",
        "peak memory in use or awaited by a stream, on the fullest GPU"),
    Metric("grad_norm", "train/grad_norm", "", "norm of the gradients before clipping", chart="Gradient norm"),
    Metric("learning_rate", "train/learning_rate", "", "learning rate of the step", chart="Learning rate"),
    Metric("skipped_steps", "train/skipped_steps", "steps",
        "skipped steps so far, whose gradient norm was NaN or infinite"),
    Metric("data_wait_percent", "data/wait_percent", "%",
        "share of time that the host waited for batches, on the worst rank", chart="Waiting for data", tile=".1f"),
    Metric("best_step", "eval/best_step", "steps", "step of the checkpoint that --keep-best keeps, on the last line"),
    Metric("best_eval_loss", "eval/best_loss", "nats per token", "eval_loss of that checkpoint"),
    Metric("goodput_percent", "perf/goodput_percent", "%",
        "100 x trained_seconds / elapsed_seconds, at most 100", tile=".1f"),
    Metric("trained_seconds", "perf/trained_seconds", "s",
        "time of all steps without pauses, at the speed of the median interval"),
    Metric("elapsed_seconds", "perf/elapsed_seconds", "s", "time since the run's first process started"),
    Metric("router_loss", "train/router_loss", "",
        "router loss of a mixture of experts before its coefficient", chart="Router loss"),
    Metric("expert_load_max", "train/expert_load_max", "",
        "tokens of the fullest expert over an even share; 1 is even", chart="Fullest expert"),
    Metric("padding_percent", "data/padding_percent", "%", "share of padding in all tokens read so far"),
    Metric("share/SOURCE", "data/share/SOURCE", "",
        "share of a source in the tokens, as requested, 0 to 1", chart="Shares of the sources"),
    Metric("epochs/SOURCE", "data/epochs/SOURCE", "epochs", "passes over a source so far"),
    Metric("predicted_peak_memory_alloc", "plan/peak_alloc_gib", "GiB",
        "peak_memory_alloc by the run's own plan, on the last line"),
    Metric("predicted_peak_memory_reserved", "plan/peak_reserved_gib", "GiB",
        "peak_memory_reserved by the run's own plan"),
    Metric("predicted_step_time_ms", "plan/step_time_ms", "ms", "step_time_ms by the run's own plan, on the last line"),
)
# fmt: on
METRICS = {metric.key: metric for metric in ROWS}
EXTRA_KEYS = ("final", "samples", "skipped")  # of a line, in addition to its metrics
PROMETHEUS_KEYS = (  # of the endpoint, in addition to a line's metrics
    *("state", "phase_seconds", "steps", "starts", "num_steps", "world_size", "log_interval_steps"),
    *("timeout_seconds", "start_time_seconds", "gpu_memory_gib"),
)
# names that no registered metric may have; sources are a label of Prometheus
RESERVED_KEYS = (*EXTRA_KEYS, *PROMETHEUS_KEYS, *(key.partition("/")[0] for key in METRICS))


def find_metric(key: str) -> Metric | None:
    """The row for a key of metrics.jsonl, with or without a source; None for an unknown key."""
    key, _, source = key.partition("/")
    return METRICS.get(f"{key}/SOURCE" if source else key)


def to_tracker_names(metrics: dict) -> dict[str, float]:
    """The metrics of a line by their names in wandb and tensorboard, without the step. A key without a row gets the
    group `other`."""
    renamed = {}
    for key, value in metrics.items():
        if key == "step" or key in EXTRA_KEYS:
            continue
        metric, source = find_metric(key), key.partition("/")[2]
        renamed[metric.tracker_name.replace("SOURCE", source) if metric else f"other/{key}"] = value
    return renamed


# ---- Over all ranks --------------------------------------------------------------------------------------------------

MAX_OVER_RANKS = ("peak_memory_active", "peak_memory_alloc", "peak_memory_reserved", "data_wait_percent")
REDUCTIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Metrics in proportion to the FLOPs of a rank's documents: a line has their mean over ranks.
PROPORTIONAL_TO_FLOPS = {"flops_per_token", "actual_tflops_per_sec", "mfu_percent"}


@torch.no_grad()
def registered_metrics(model: Any, result: StepResult, device: torch.device) -> dict[str, float]:
    """The registered metrics after a step, over all ranks; every rank calls this."""
    found = {}
    for metric in METRICS.values():
        if metric.function:
            answer = metric.function(model, result)
            is_of_all_ranks = isinstance(answer, DTensor)
            try:
                value = torch.tensor(float(answer.full_tensor() if is_of_all_ranks else answer), dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError) as error:
                raise base.UserError(f"metric {metric.key}: it gave no number ({base.first_line(error)})") from error
            if not is_of_all_ranks:
                value = value.to(device)
                dist.all_reduce(value, REDUCTIONS[metric.reduce])
                if metric.reduce == "mean":
                    value /= dist.get_world_size()
            found[metric.key] = value.item()
    return found


def gather_metrics(speed: dict[str, float], state: states.TrainState, device: torch.device) -> dict[str, float]:
    """Combine the metrics that every rank measures; every rank calls this. `speed` is this rank's from its performance
    tracker, empty during warmup, when only memory is returned."""
    local = speed if "peak_memory_reserved" in speed else speed | base.memory_metrics()
    row = torch.tensor([local.get(name, 0.0) for name in MAX_OVER_RANKS], dtype=torch.float64, device=device)
    dist.all_reduce(row, dist.ReduceOp.MAX)
    largest = {name: value for name, value in zip(MAX_OVER_RANKS, row.tolist(), strict=True) if name in local}
    if "flops_per_token" in speed:
        mean = torch.tensor(speed["flops_per_token"], dtype=torch.float64, device=device)  # this rank's documents
        dist.all_reduce(mean)
        share = mean.item() / dist.get_world_size() / speed["flops_per_token"]
        speed = speed | {name: share * speed[name] for name in PROPORTIONAL_TO_FLOPS & speed.keys()}
    return with_run_times(speed, state) | largest


def with_run_times(speed: dict[str, float], state: states.TrainState) -> dict[str, float]:
    """Add the times of the whole run to `speed`; empty during warmup."""
    if "step_time_ms" not in speed:
        return {}
    trained, elapsed = state.productive_seconds(), state.elapsed
    goodput = min(100.0, 100 * trained / elapsed)
    return speed | {"trained_seconds": trained, "elapsed_seconds": elapsed, "goodput_percent": goodput}


# ---- Gates -----------------------------------------------------------------------------------------------------------


def check_measurable(settings: flags.Args, device: torch.device, peak_tflops: float | None) -> None:
    """Raise UserError for flags that need a measurement which this machine lacks. `peak_tflops` is the device's, None
    if unknown."""
    if settings.min_mfu and not peak_tflops:
        raise base.UserError("--min-mfu: the peak of this device is unknown; give --peak-tflops")
    for flag, value in (("--max-memory-gib", settings.max_memory_gib), ("--memory-snapshot", settings.memory_snapshot)):
        if value and device.type != "cuda":
            raise base.UserError(f"{flag}: memory is measured on GPUs only; leave it out")


def check_gates(settings: flags.Settings, metrics: dict) -> None:
    """Raise UserError with exit code 3 if a metric of the last line missed its gate."""
    missed = []
    mfu, reserved = metrics.get("mfu_percent"), metrics.get("peak_memory_reserved")
    if settings.min_mfu and mfu is None:  # a resumed run may end within its warmup
        problem = f"the MFU was not measured: no step came after the {settings.perf_warmup_steps} warmup steps"
        missed.append(f"--min-mfu {settings.min_mfu:g}: {problem}; give more --num-steps or fewer --perf-warmup-steps")
    elif settings.min_mfu and mfu < settings.min_mfu:
        missed.append(f"--min-mfu {settings.min_mfu:g}: the MFU was {mfu:.2f} %")
    if settings.max_memory_gib and reserved is None:
        problem = "peak_memory_reserved was not measured: no step was taken"
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: {problem}; give more --num-steps")
    elif settings.max_memory_gib and reserved > settings.max_memory_gib:
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: peak_memory_reserved was {reserved:.2f} GiB")
    if missed:
        raise base.UserError("acceptance gate missed: " + "; ".join(missed), exit_code=3)
