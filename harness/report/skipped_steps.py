"""Skipped steps: counts the optimizer steps that were left out, says which and why, and finds that too many were. The
script calls it where the log or a save reads the steps. Independent of how a step is left out."""

import dataclasses
import math
import pathlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import job
from harness.base.text import counted
from harness.data.data_record import DataRecord
from harness.flags.commands import to_paste
from harness.job import columns
from harness.model.skipping import WINDOW, robust_z_score
from harness.report.not_finite import NotFinite, last_update
from harness.state.train_state import TrainState

RECENT = 1000  # steps of which at most MAX_SHARE may be skipped, once MIN_SKIPPED were
MAX_SHARE = 0.01
MIN_SKIPPED = 10


class StepResult(NamedTuple):
    """What a step gave; scalars that are still on the device, or numbers."""

    loss: torch.Tensor | float  # of this rank; as a number the mean over all
    grad_norm: torch.Tensor | float
    skipped: torch.Tensor | float  # 1 where the step was skipped, else 0
    router_loss: torch.Tensor | None = None  # of this rank; None without a router loss
    expert_load: torch.Tensor | None = None  # tokens of this rank that went to each expert, (layers, experts)


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    step: int
    reason: str  # such as "gradient norm is nan"


def read_results(results: list[StepResult]) -> list[StepResult]:
    """The results of the last steps as numbers, losses averaged over all ranks. `results` are this rank's since the
    last call, emptied here: one transfer from the device for all of them."""
    losses = torch.stack([result.loss for result in results])
    dist.all_reduce(losses)
    rows = [losses / dist.get_world_size()]
    for name in ("grad_norm", "skipped"):
        rows.append(torch.stack([getattr(result, name) for result in results]).to(losses.device))
    results.clear()
    count = len(losses)
    numbers = torch.cat(rows).tolist()
    columns_of_rows = (numbers[:count], numbers[count : 2 * count], numbers[2 * count :])
    return [StepResult(*numbers_of_step) for numbers_of_step in zip(*columns_of_rows, strict=True)]


def read_routing(result: StepResult) -> dict[str, float]:
    """`router_loss` and `expert_load_max` of a step, over all ranks; empty for a model without a router loss. The
    latter is the largest share of a layer's tokens that one expert got, over the share that each would get evenly."""
    if result.router_loss is None:
        return {}
    figures = torch.cat([result.router_loss.reshape(1), result.expert_load.flatten()])
    dist.all_reduce(figures)
    load = figures[1:].view_as(result.expert_load)
    fullest = (load.amax(1) / load.mean(1)).amax()
    router_loss, expert_load_max = torch.stack([figures[0] / dist.get_world_size(), fullest]).tolist()
    return {"router_loss": router_loss, "expert_load_max": expert_load_max}


def count_skipped(
    state: TrainState, results: list[StepResult], max_skipped: int
) -> tuple[list[SkippedStep], NotFinite | None]:
    """(the steps of `results`, the last ones of the run, that were skipped; why they end the run, None where they do
    not). Moves the counts and the norms of `state`."""
    skipped, problem = [], None
    for step, result in enumerate(results, state.step - len(results) + 1):
        if not result.skipped:
            norms = [*state.recent_norms, result.grad_norm]  # new lists: a save beside the training may write the old
            state.recent_norms = norms[-WINDOW:]
            continue
        skipped.append(SkippedStep(step, reason_of(result.grad_norm, state.recent_norms)))
        state.skipped_steps += 1
        recent = [other for other in state.recent_skipped if other > step - RECENT]
        state.recent_skipped = [*recent, step]
        problem = problem or too_many(state.recent_skipped, max_skipped, skipped[-1].reason)
    return skipped, problem


def reason_of(norm: float, norms: list[float]) -> str:
    """Why a step with this gradient norm was skipped, after steps with `norms`."""
    if not math.isfinite(norm):
        return f"gradient norm is {norm}"
    z_score = robust_z_score(torch.tensor(norm), torch.tensor(norms)).item()
    return f"gradient norm is {norm:.4g}, z-score {z_score:.1f}"


def too_many(skipped: list[int], max_skipped: int, reason: str) -> NotFinite | None:
    """Why a run ends whose last step was skipped; None where it goes on. `skipped` are the steps among the last RECENT
    that were, that one included."""
    last = skipped[-1]
    in_a_row = last - last_update(last, skipped)
    if in_a_row > max_skipped:
        words = f"{counted(in_a_row, 'step')} in a row skipped, more than --max-skipped {max_skipped}"
        return NotFinite(last - in_a_row + 1, reason, words)
    steps = min(last, RECENT)
    if len(skipped) >= MIN_SKIPPED and len(skipped) > MAX_SHARE * steps:
        words = f"{len(skipped)} of the last {steps:,} steps skipped, more than {100 * MAX_SHARE:g} %"
        return NotFinite(last, reason, words)
    return None


def describe_skipped(skipped: list[SkippedStep], data: DataRecord, folder: pathlib.Path) -> str:
    """A line for each run of skipped steps, with the command that shows what they trained on."""
    lines = []
    for run in runs_of(skipped):
        first, last = run[0].step, run[-1].step
        samples = range(data.samples_of_step(first).start, data.samples_of_step(last).stop)
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        reasons = ", ".join(dict.fromkeys(step.reason for step in run))
        command = to_paste(job.launcher(), config=folder / "config.json", show_samples=first)
        text = f"{steps}: {reasons}; samples {samples.start:,} to {samples.stop - 1:,}, which this shows: {command}"
        lines.append(columns({"skipped": text}))
    return "\n".join(lines)


def runs_of(skipped: list[SkippedStep]) -> list[list[SkippedStep]]:
    """Skipped steps that follow each other together."""
    runs: list[list[SkippedStep]] = []
    for step in skipped:
        if runs and runs[-1][-1].step == step.step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def as_notes(skipped: list[SkippedStep], data: DataRecord) -> list[dict]:
    """Skipped steps as a line of metrics.jsonl has them: with their first and last sample."""
    notes = []
    for step in skipped:
        samples = data.samples_of_step(step.step)
        notes.append({"step": step.step, "reason": step.reason, "samples": [samples.start, samples.stop - 1]})
    return notes
