"""Learning-rate schedules: a row for each value of --lr-scheduler, with the schedule of transformers, its options, and
a check of the flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from harness import base

if TYPE_CHECKING:
    from harness.flags.settings import Flags  # which imports this file


class Schedule(NamedTuple):
    """A row of the table."""

    transformers_name: str = ""  # of `transformers.get_scheduler`; empty with a `factor`
    options: Callable[[Flags], dict] = lambda args: {}  # its `scheduler_specific_kwargs`
    problem: Callable[[Flags], str] = lambda args: ""  # an error, or empty
    factor: Callable[[int, int, int], float] | None = None  # of --lr, from (finished steps, steps, warmup steps)
    has_warmup: bool = True


def decay_options(args: Flags) -> dict:
    """By default the decay is the last fifth of the run, or what is left of it after warmup."""
    steps = args.decay_steps
    if steps is None:
        steps = max(1, min(args.num_steps // 5, args.num_steps - (args.warmup_steps or 0)))
    return {"num_decay_steps": steps, "decay_type": args.decay_shape}


def decay_problem(args: Flags) -> str:
    after_warmup = max(0, args.num_steps - args.warmup_steps)
    if not args.num_steps or (args.decay_steps or 0) <= after_warmup:
        return ""
    problem = f"the run has {base.counted(after_warmup, 'step')} after warmup"
    return f"--decay-steps {args.decay_steps}: {problem}; give at most that many, or fewer --warmup-steps"


SCHEDULES = {
    "constant": Schedule("constant", has_warmup=False),
    "constant_with_warmup": Schedule("constant_with_warmup"),
    "linear": Schedule("linear"),
    "cosine": Schedule("cosine"),
    "cosine_with_min_lr": Schedule("cosine_with_min_lr", lambda args: {"min_lr_rate": 0.1}),
    "polynomial": Schedule("polynomial", lambda args: {"lr_end": 0.0}),  # its default, 1e-7, would refuse a smaller lr
    "inverse_sqrt": Schedule("inverse_sqrt"),
    "warmup_stable_decay": Schedule("warmup_stable_decay", decay_options, decay_problem),
}


def has_warmup(lr_scheduler: str) -> bool:
    """True if a schedule has a warmup, as those of --import do, which may not be registered yet."""
    return lr_scheduler not in SCHEDULES or SCHEDULES[lr_scheduler].has_warmup
