"""Health: the numbers of the steps so far, which of them were skipped and why, and how a run ends whose loss or weights
are NaN or infinite, or that skipped too many steps. Independent of how a step is skipped.

What ends a run is found here as words that name the step, such as "the loss became nan at step 7"; empty words mean
that nothing is wrong.
"""

import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from harness import base
from harness import model as models
from harness import state as states

ADVICE = "a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"


class StepResult(NamedTuple):
    """What a step gave: scalars that are still on the device."""

    loss: torch.Tensor  # of this rank
    grad_norm: torch.Tensor
    skipped: torch.Tensor  # 1 where the step was skipped, else 0
    router_loss: torch.Tensor | None = None  # of this rank; None without a router loss
    expert_load: torch.Tensor | None = None  # tokens of this rank that went to each expert, (layers, experts)


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


def broken_update(state: states.TrainState) -> str:
    """Names the last update where weights or optimizer states are NaN or infinite after it; every rank calls this."""
    if state.finite():
        return ""
    return f"the update made weights or optimizer states infinite or NaN at step {state.step - state.skipped_in_a_row}"


def check_updated_weights(run: Any, batch: dict, first_step: int) -> str:
    """Why the state of `run` must not be saved or called done: weights and optimizer states are finite, and so are the
    loss and the gradient norm of `batch`. Every rank calls this; it is outside the measured time. `first_step` is the
    first one since this start."""
    state = run.state
    with state.tracker.excluded():
        problem = broken_update(state)
        if problem:
            return problem
        loss, norm = models.loss_and_norm(state.model, state.optimizer, batch)
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            when = max(first_step, state.step - state.skipped_in_a_row)  # the weights may be broken since the start
            return f"the {name} of the weights became {value} at step {when}"
    return ""


def diverged(folder: pathlib.Path, problem: str, resumed: pathlib.Path | None) -> base.UserError:
    """The error that ends the run in `folder` because of `problem`; what was saved before stays. `resumed` is the
    checkpoint that it went on from. Each checkpoint has given a finite loss before it was saved."""
    newest = base.newest_checkpoint(folder)
    kept = "nothing was saved"
    if newest:
        kept = f"the last good checkpoint is {newest.name}"
    elif resumed:
        kept = f"the last good checkpoint is {resumed}"
    return base.UserError(f"{problem}; {kept}; {ADVICE}", exit_code=1)


class Remembered:
    """The batches that a run trains on, for `next`. It remembers the last one, and the last that gave a finite loss."""

    def __init__(self, batches: Iterator[dict]):
        self.batches = batches
        self.last: dict = {}
        self.finite: dict = {}

    def __next__(self) -> dict:
        self.last = next(self.batches)
        return dict(self.last)  # a step takes out what the model does not get

    def last_good(self, metrics: dict) -> dict:
        """The batch of the step that `metrics` are of; where that was skipped an earlier one, if there is one."""
        if "loss" in metrics or not self.finite:
            self.finite = {name: value for name, value in self.last.items() if name != "loss_divisor"}
        return self.finite
