"""Not finite: how a run ends whose loss or weights are NaN or infinite, or that skipped too many steps."""

import math
import pathlib
from typing import NamedTuple

from harness.base import UserError, saved
from harness.state.train_state import TrainState


class NotFinite(NamedTuple):
    """The first thing of a run that is NaN or infinite, or the first of the steps that were skipped for it."""

    step: int  # of the optimizer
    words: str  # such as "loss became nan"
    consequence: str = ""  # what followed, such as "6 steps in a row were skipped"


def first_not_finite(metrics: dict, losses: list[float | None]) -> NotFinite | None:
    """The first figure that is NaN or infinite; None where all are finite. `losses` are those of the steps up to that
    of `metrics`, None for a step that was skipped."""
    step = metrics["step"]
    figures = [(of_step, "loss", loss) for of_step, loss in enumerate(losses, step - len(losses) + 1)]
    figures.append((step, "grad norm", metrics.get("grad_norm")))
    for key in ("eval_loss", "eval_loss_ema"):
        figures.append((step, key.replace("_", " "), metrics.get(key)))
    for of_step, name, value in figures:
        if value is not None and not math.isfinite(value):
            return NotFinite(of_step, f"{name} became {value}")
    return None


def last_update(step: int, skipped: list[int]) -> int:
    """The last step up to this one that was not skipped."""
    while step in skipped:
        step -= 1
    return step


def broken_update(state: TrainState) -> NotFinite | None:
    """The last update, where weights or optimizer states are NaN or infinite after it; every rank calls this."""
    if state.finite():
        return None
    words = "update made weights or optimizer states infinite or NaN"
    return NotFinite(last_update(state.step, state.recent_skipped), words)


def find_divergence(
    state: TrainState, first_step: int, loss: float, norm: float = 0.0, of: str = "the weights"
) -> NotFinite | None:
    """The last update, where the loss or the gradient norm that `of` gave after it is NaN or infinite. `first_step` is
    the first one since this start: without an update since then it is that step's loss or norm."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            step = last_update(state.step, state.recent_skipped)
            if step < first_step:
                return NotFinite(first_step, f"{name} of {of} was {value} from the start")
            return NotFinite(step, f"update left {of} with a {name} of {value}")
    return None


def give_up(folder: pathlib.Path, problem: NotFinite, resumed: pathlib.Path | None) -> None:
    """Ends the run in `folder` because of `problem`; what was saved before stays. `resumed` is the checkpoint that it
    went on from. Each checkpoint has given a finite loss before it was saved."""
    newest = saved.newest(folder)
    kept = "nothing was saved"
    if newest:
        kept = f"the last good checkpoint is {newest.name}"
    elif resumed:
        kept = f"the last good checkpoint is {resumed}"
    parts = [f"the {problem.words} at step {problem.step}", problem.consequence, kept]
    parts.append("a lower --lr, more --warmup-steps or --max-grad-norm 1 may help")
    raise UserError("; ".join(part for part in parts if part), exit_code=1)
