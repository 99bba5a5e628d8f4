"""Not finite: how a run ends whose loss, gradients or weights are NaN or infinite."""

import math
import pathlib
from typing import NamedTuple

from harness.base import saved
from harness.base.errors import UserError


class NotFinite(NamedTuple):
    """The first thing of a run that is NaN or infinite."""

    step: int  # of the optimizer
    words: str  # such as "loss became nan"


def first_not_finite(metrics: dict, losses: list[float]) -> NotFinite | None:
    """The first figure that is NaN or infinite; None where all are finite. `losses` are those of the steps up to that
    of `metrics`."""
    step = metrics["step"]
    figures = [(of_step, "loss", loss) for of_step, loss in enumerate(losses, step - len(losses) + 1)]
    figures.append((step, "grad norm", metrics["grad_norm"]))
    for key in ("eval_loss", "eval_loss_ema"):
        if key in metrics:
            figures.append((step, key.replace("_", " "), metrics[key]))
    for of_step, name, value in figures:
        if not math.isfinite(value):
            return NotFinite(of_step, f"{name} became {value}")
    return None


def give_up(folder: pathlib.Path, problem: NotFinite, first_step: int, resumed: pathlib.Path | None) -> None:
    """Ends the run in `folder` because of `problem`; what was saved before stays. `first_step` is the first one since
    this start, `resumed` the checkpoint that it went on from."""
    newest = saved.newest(folder)
    if resumed and problem.step == first_step:
        kept = f"the run went on from {resumed}: remove that folder, and --resume auto goes on from the one before"
    elif newest:
        kept = f"the newest checkpoint is {newest.name}, from before"
    else:
        kept = "nothing was saved"
    advice = "a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"
    raise UserError(f"the {problem.words} at step {problem.step}; {kept}; {advice}", exit_code=1, entry="not-finite")
