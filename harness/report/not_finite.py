"""Not finite: how a run ends whose loss or weights are NaN or infinite, or that skipped too many steps."""

import math
import pathlib
from typing import NamedTuple

from harness.base import saved
from harness.base.errors import UserError


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


def give_up(folder: pathlib.Path, problem: NotFinite, first_step: int, resumed: pathlib.Path | None) -> None:
    """Ends the run in `folder` because of `problem`; what was saved before stays. `first_step` is the first one since
    this start, `resumed` the checkpoint that it went on from."""
    newest = saved.newest(folder)
    if newest and saved.step_saved(newest) >= problem.step:
        kept = f"{newest.name} was saved after it: without that folder --resume auto goes on from the one before"
    elif resumed and problem.step == first_step:
        kept = f"the run went on from {resumed}: remove that folder, and --resume auto goes on from the one before"
    elif newest:
        kept = f"the newest checkpoint is {newest.name}, from before"
    else:
        kept = "nothing was saved"
    parts = [f"the {problem.words} at step {problem.step}", problem.consequence, kept]
    parts.append("a lower --lr, more --warmup-steps or --max-grad-norm 1 may help")
    raise UserError("; ".join(part for part in parts if part), exit_code=1)
