"""Health: the numbers of the steps so far, which of them were skipped and why, and which of their figures are NaN or
infinite: words that name the step, such as "the loss became nan at step 7", empty where nothing is wrong; and the error
that ends a run for them.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from harness import base
from harness import state as states

ADVICE = "a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"


class StepResult(NamedTuple):
    """The result of a step: tensors that are still on the device, and the documents that it read."""

    loss: torch.Tensor  # of this rank
    grad_norm: torch.Tensor
    skipped: torch.Tensor  # 1 where the step was skipped, else 0
    terms: dict[str, torch.Tensor]  # trained on beside the loss, of this rank
    router_loss: torch.Tensor | None = None  # of this rank; None without a router loss
    expert_load: torch.Tensor | None = None  # tokens of this rank that went to each expert, (layers, experts)
    document_lengths: Sequence[np.ndarray] = ()  # tokens of each document in this rank's microbatches, on the host


class StepNumbers(NamedTuple):
    """A step's result as numbers, over all ranks."""

    loss: float
    grad_norm: float
    skipped: float


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def read_results(results: list[StepResult]) -> list[StepNumbers]:
    """The results of steps as numbers, losses averaged over all ranks, with one transfer from the device for all."""
    losses = torch.stack([result.loss for result in results]).float()
    dist.all_reduce(losses)
    norms = torch.stack([result.grad_norm for result in results]).to(losses)
    skipped = torch.stack([result.skipped for result in results]).to(losses)
    numbers = torch.stack([losses / dist.get_world_size(), norms, skipped], dim=1)
    return [StepNumbers(*row) for row in numbers.tolist()]


def read_terms(result: StepResult) -> dict[str, float]:
    """What a step trained on beside the loss, averaged over all ranks."""
    if not result.terms:
        return {}
    terms = torch.stack(list(result.terms.values())).float()
    dist.all_reduce(terms)
    return dict(zip(result.terms, (terms / dist.get_world_size()).tolist(), strict=True))


def read_routing(result: StepResult) -> dict[str, float]:
    """`router_loss` and `expert_load_max` of a step, over all ranks; empty for a model without a router loss. The
    latter is the largest share of a layer's tokens that one expert got, over the share that each would get evenly."""
    if result.router_loss is None or result.expert_load is None:
        return {}
    figures = torch.cat([result.router_loss.reshape(1), result.expert_load.flatten()])
    dist.all_reduce(figures)
    load = figures[1:].view_as(result.expert_load)
    fullest = (load.amax(1) / load.mean(1)).amax()
    router_loss, expert_load_max = torch.stack([figures[0] / dist.get_world_size(), fullest]).tolist()
    return {"router_loss": router_loss, "expert_load_max": expert_load_max}


def count_skipped(state: states.TrainState, steps: list[StepNumbers], max_skipped: int) -> tuple[dict[int, str], str]:
    """({step: why it was skipped} of `steps`, the last ones of the run; what ends the run: more than `max_skipped` in a
    row). Moves the counts of `state`."""
    reasons: dict[int, str] = {}
    problem = ""
    for step, result in enumerate(steps, state.step - len(steps) + 1):
        if not result.skipped:
            state.skipped_in_a_row = 0
            continue
        reasons[step] = f"gradient norm is {result.grad_norm}"
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row > max_skipped and not problem:
            first, in_a_row = step - state.skipped_in_a_row + 1, base.counted(state.skipped_in_a_row, "step")
            problem = f"the {reasons[step]} at step {first}; {in_a_row} in a row skipped"
            problem += f", more than --max-skipped {max_skipped}"
    return reasons, problem


# ---- Not finite ------------------------------------------------------------------------------------------------------


def first_not_finite(metrics: dict, steps: list[StepNumbers]) -> str:
    """The first figure that is NaN or infinite, of `metrics` and of the losses of `steps`, the last of which they are
    of; a step that was skipped has none."""
    step = metrics["step"]
    figures = [(number, "loss", one.loss) for number, one in enumerate(steps, step - len(steps) + 1) if not one.skipped]
    keys = ("grad_norm", "eval_loss")
    figures += [(step, key.replace("_", " "), metrics[key]) for key in keys if key in metrics]
    for number, name, value in figures:
        if not math.isfinite(value):
            return f"the {name} became {value} at step {number}"
    return ""


def divergence_error(problem: str, folder: pathlib.Path, resumed: states.Checkpoint | None) -> base.UserError:
    """The error that ends the run in `folder` because of `problem`; what was saved before stays. `resumed` is the
    checkpoint that it went on from. Each checkpoint has given a finite loss before it was saved."""
    newest = base.newest_checkpoint(folder)
    kept = "nothing was saved"
    if newest:
        kept = f"the last good checkpoint is {newest.name}"
    elif resumed:
        kept = f"the last good checkpoint is {resumed.path}"
    return base.UserError(f"{problem}; {kept}; {ADVICE}", exit_code=1)
