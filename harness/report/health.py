"""Health: results of steps as numbers, skipped steps, NaN and infinity, and the error that ends a diverged run.
Problems are texts such as "the loss became nan at step 7", empty if there is none."""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import base
from harness import state as states

ADVICE = "a lower --lr, a longer warmup or a smaller --max-grad-norm may help"


class StepResult(NamedTuple):
    """The result of a step on this rank: tensors on the device."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor  # 1 if the step was skipped, else 0
    terms: dict[str, torch.Tensor]  # other terms of the training objective
    router_loss: torch.Tensor | None = None  # None without a router loss
    expert_load: torch.Tensor | None = None  # tokens per expert, (layers, experts)


class StepNumbers(NamedTuple):
    """The result of a step over all ranks."""

    loss: float
    grad_norm: float
    skipped: float


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def read_results(results: list[StepResult]) -> list[StepNumbers]:
    """Transfer the results of steps to the host at once, with losses averaged over ranks; every rank calls this."""
    losses = torch.stack([result.loss for result in results]).float()
    dist.all_reduce(losses)
    norms = torch.stack([result.grad_norm for result in results]).to(losses)
    skipped = torch.stack([result.skipped for result in results]).to(losses)
    numbers = torch.stack([losses / dist.get_world_size(), norms, skipped], dim=1)
    return [StepNumbers(*row) for row in numbers.tolist()]


def read_terms(result: StepResult) -> dict[str, float]:
    """The other terms of a step's training objective, averaged over ranks; every rank calls this."""
    if not result.terms:
        return {}
    terms = torch.stack(list(result.terms.values())).float()
    dist.all_reduce(terms)
    return dict(zip(result.terms, (terms / dist.get_world_size()).tolist(), strict=True))


def read_routing(result: StepResult) -> dict[str, float]:
    """`router_loss` and `expert_load_max` of a step over all ranks, empty without a router loss. The latter is the
    largest number of tokens that an expert got, over the mean of its layer."""
    if result.router_loss is None or result.expert_load is None:
        return {}
    sums = torch.cat([result.router_loss.reshape(1), result.expert_load.flatten()])
    dist.all_reduce(sums)
    load = sums[1:].view_as(result.expert_load)
    fullest = (load.amax(1) / load.mean(1)).amax()
    router_loss, expert_load_max = torch.stack([sums[0] / dist.get_world_size(), fullest]).tolist()
    return {"router_loss": router_loss, "expert_load_max": expert_load_max}


def count_skipped(state: states.TrainState, steps: list[StepNumbers], max_skipped: int) -> tuple[dict[int, str], str]:
    """Count the skipped ones of `steps`, the latest steps, in `state`. Returns ({step: reason} of the skipped ones, a
    problem if more than `max_skipped` were skipped in a row)."""
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


# ---- NaN and infinity ------------------------------------------------------------------------------------------------


def first_not_finite(metrics: dict, steps: Sequence[StepNumbers] = ()) -> str:
    """Name the first NaN or infinity: a loss of `steps`, the latest ones, or the gradient norm or eval loss in
    `metrics`, those of the last step. Skipped steps do not count."""
    last = metrics["step"]
    values = [(step, "loss", one.loss) for step, one in enumerate(steps, last - len(steps) + 1) if not one.skipped]
    keys = ("grad_norm", "eval_loss")
    values += [(last, key.replace("_", " "), metrics[key]) for key in keys if key in metrics]
    for step, name, value in values:
        if not math.isfinite(value):
            return f"the {name} became {value} at step {step}"
    return ""


def divergence_error(problem: str, folder: pathlib.Path, resumed: states.Checkpoint | None) -> base.UserError:
    """The error with exit code 1 that ends the run in `folder` because of `problem`, with its last good checkpoint:
    each one gave a finite loss before it was saved. `resumed` is the checkpoint that the run resumed from."""
    newest = base.newest_checkpoint(folder)
    kept = "nothing was saved"
    if newest:
        kept = f"the last good checkpoint is {newest.name}"
    elif resumed:
        kept = f"the last good checkpoint is {resumed.path}"
    return base.UserError(f"{problem}; {kept}; {ADVICE}", exit_code=1)
