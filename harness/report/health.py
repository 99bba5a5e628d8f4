"""Health: the numbers of the steps so far, which of them were skipped and why, and how a run ends whose loss or weights
are NaN or infinite, or that skipped too many steps. Independent of how a step is skipped."""

import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from harness import base
from harness import model as models
from harness import state as states

RECENT = 1000  # steps of which at most MAX_SHARE may be skipped, once MIN_SKIPPED were
MAX_SHARE = 0.01
MIN_SKIPPED = 10


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


class Skipped(NamedTuple):
    step: int
    reason: str  # such as "gradient norm is nan"


class NotFinite(NamedTuple):
    """The first thing of a run that is NaN or infinite, or the first of the steps that were skipped for it."""

    step: int  # of the optimizer
    words: str  # such as "loss became nan"
    consequence: str = ""  # what followed, such as "6 steps in a row were skipped"


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


# ---- Skipped steps ---------------------------------------------------------------------------------------------------


def count_skipped(
    state: states.TrainState, steps: list[StepNumbers], max_skipped: int
) -> tuple[list[Skipped], NotFinite | None]:
    """(those of `steps`, the last ones of the run, that were skipped; why they end the run, None where they do not).
    Moves the counts and the norms of `state`."""
    skipped, problem = [], None
    for step, result in enumerate(steps, state.step - len(steps) + 1):
        if not result.skipped:
            norms = [*state.recent_norms, result.grad_norm]  # new lists: a save beside the training may write the old
            state.recent_norms = norms[-models.WINDOW :]
            continue
        skipped.append(Skipped(step, reason_of(result.grad_norm, state.recent_norms)))
        state.skipped_steps += 1
        recent = [other for other in state.recent_skipped if other > step - RECENT]
        state.recent_skipped = [*recent, step]
        problem = problem or too_many(state.recent_skipped, max_skipped, skipped[-1].reason)
    return skipped, problem


def reason_of(norm: float, norms: list[float]) -> str:
    """Why a step with this gradient norm was skipped, after steps with `norms`."""
    if not math.isfinite(norm):
        return f"gradient norm is {norm}"
    z_score = models.robust_z_score(torch.tensor(norm), torch.tensor(norms)).item()
    return f"gradient norm is {norm:.4g}, z-score {z_score:.1f}"


def last_update(step: int, skipped: list[int]) -> int:
    """The last step up to this one that was not skipped."""
    while step in skipped:
        step -= 1
    return step


def too_many(skipped: list[int], max_skipped: int, reason: str) -> NotFinite | None:
    """Why a run ends whose last step was skipped; None where it goes on. `skipped` are the steps among the last RECENT
    that were, that one included."""
    last = skipped[-1]
    in_a_row = last - last_update(last, skipped)
    if in_a_row > max_skipped:
        words = f"{base.counted(in_a_row, 'step')} in a row skipped, more than --max-skipped {max_skipped}"
        return NotFinite(last - in_a_row + 1, reason, words)
    steps = min(last, RECENT)
    if len(skipped) >= MIN_SKIPPED and len(skipped) > MAX_SHARE * steps:
        words = f"{len(skipped)} of the last {steps:,} steps skipped, more than {100 * MAX_SHARE:g} %"
        return NotFinite(last, reason, words)
    return None


# ---- Not finite ------------------------------------------------------------------------------------------------------


def first_not_finite(metrics: dict, losses: list[float | None]) -> NotFinite | None:
    """The first figure that is NaN or infinite; None where all are finite. `losses` are those of the steps up to that
    of `metrics`, None for a step that was skipped."""
    step = metrics["step"]
    figures = [(of_step, "loss", loss) for of_step, loss in enumerate(losses, step - len(losses) + 1)]
    figures.append((step, "grad norm", metrics.get("grad_norm")))
    figures += [(step, key.replace("_", " "), metrics.get(key)) for key in ("eval_loss", "eval_loss_ema")]
    for of_step, name, value in figures:
        if value is not None and not math.isfinite(value):
            return NotFinite(of_step, f"{name} became {value}")
    return None


def broken_update(state: states.TrainState) -> NotFinite | None:
    """The last update, where weights or optimizer states are NaN or infinite after it; every rank calls this."""
    if state.finite():
        return None
    words = "update made weights or optimizer states infinite or NaN"
    return NotFinite(last_update(state.step, state.recent_skipped), words)


def check_pass(run: Any, batch: dict, first_step: int) -> NotFinite | None:
    """Why the state of `run` must not be saved or called done, None where nothing is wrong: weights and optimizer
    states are finite, and so are the loss and the gradient norm of `batch`, and a loss of the weights' average. Every
    rank calls this; it is outside the measured time. `first_step` is the first one since this start."""
    state = run.state
    step = last_update(state.step, state.recent_skipped)
    with state.tracker.excluded():
        problem = broken_update(state)
        if problem:
            return problem
        loss, norm = models.loss_and_norm(state.model, state.optimizer, batch)
        found = [("weights", "loss", loss), ("weights", "gradient norm", norm)]
        if state.average:
            with state.average.as_weights():
                found.append(("weights' average", "loss", models.loss_without_data(state.model)))
    for whose, name, value in found:
        if not math.isfinite(value) and step < first_step:
            return NotFinite(first_step, f"{name} of the {whose} was {value} from the start")
        if not math.isfinite(value):
            return NotFinite(step, f"update left the {whose} with a {name} of {value}")
    return None


def give_up(folder: pathlib.Path, problem: NotFinite, resumed: pathlib.Path | None) -> None:
    """Ends the run in `folder` because of `problem`; what was saved before stays. `resumed` is the checkpoint that it
    went on from. Each checkpoint has given a finite loss before it was saved."""
    newest = base.newest_checkpoint(folder)
    kept = "nothing was saved"
    if newest:
        kept = f"the last good checkpoint is {newest.name}"
    elif resumed:
        kept = f"the last good checkpoint is {resumed}"
    parts = [f"the {problem.words} at step {problem.step}", problem.consequence, kept]
    parts.append("a lower --lr, more --warmup-steps or --max-grad-norm 1 may help")
    raise base.UserError("; ".join(part for part in parts if part), exit_code=1)


class Remembered:
    """The batches that a run trains on, for `next`. It remembers the last one, and the last that gave a finite loss."""

    def __init__(self, batches: Iterator[dict]):
        self.batches = batches
        self.last: dict = {}
        self.finite: dict = {}

    def __next__(self) -> dict:
        self.last = next(self.batches)
        return dict(self.last)  # a step takes out what the model does not get

    def good(self, metrics: dict) -> dict:
        """The batch of the step that `metrics` are of; where that was skipped an earlier one, if there is one."""
        if "loss" in metrics or not self.finite:
            self.finite = {name: value for name, value in self.last.items() if name != "loss_divisor"}
        return self.finite
