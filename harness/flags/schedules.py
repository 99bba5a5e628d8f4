"""Schedules of the learning rate: a row each, which `--lr-scheduler` takes by its name. A row names the schedule of
transformers, the options that it gets, and what is wrong with the flags where something is."""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class StepFlags(Protocol):
    """The settings that a schedule reads; `Args` itself is made of the rows here."""

    @property
    def num_steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int | None: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def decay_shape(self) -> str: ...


class Schedule(NamedTuple):
    """One row: each function is given the settings."""

    transformers_name: str  # of `transformers.get_scheduler`
    options: Callable[[StepFlags], dict] = lambda s: {}  # its `scheduler_specific_kwargs`
    problem: Callable[[StepFlags], str] = lambda s: ""  # what does not go with it, as an error


def options_of_decay(s: StepFlags) -> dict:
    """Without --decay-steps the decay is the last fifth of the run."""
    steps = max(1, s.num_steps // 5) if s.decay_steps is None else s.decay_steps
    return {"num_decay_steps": steps, "decay_type": s.decay_shape}


def problem_of_constant(s: StepFlags) -> str:
    return "--warmup-steps: the constant scheduler has no warmup; use constant_with_warmup" if s.warmup_steps else ""


def problem_of_decay(s: StepFlags) -> str:
    after_warmup = max(0, s.num_steps - s.warmup_steps)
    if not s.num_steps or (s.decay_steps or 0) <= after_warmup:
        return ""
    problem = f"after the warmup there are {after_warmup} steps"
    return f"--decay-steps {s.decay_steps}: {problem}; give no more, or fewer --warmup-steps"


SCHEDULES = {
    "constant": Schedule("constant", problem=problem_of_constant),
    "constant_with_warmup": Schedule("constant_with_warmup"),
    "linear": Schedule("linear"),
    "cosine": Schedule("cosine"),
    "cosine_with_min_lr": Schedule("cosine_with_min_lr", lambda s: {"min_lr_rate": 0.1}),
    "polynomial": Schedule("polynomial", lambda s: {"lr_end": 0.0}),  # it refuses an lr below its own, 1e-7
    "inverse_sqrt": Schedule("inverse_sqrt"),
    "warmup_stable_decay": Schedule("warmup_stable_decay", options_of_decay, problem_of_decay),
}
