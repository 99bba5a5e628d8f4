"""Schedule: what is due at which optimizer step. Called by the training loop."""

import dataclasses
import math
from dataclasses import dataclass

import torch.distributed as dist

from harness.flags import PROFILED_STEPS, Settings, default_warmup


def count_steps(settings: Settings, manifest: dict | None) -> Settings:
    """The settings with the steps that give --num-tokens, and with the warmup where none was given: 5 % of the steps.
    A run that goes on from the checkpoint of `manifest` counts its tokens and keeps its warmup."""
    steps, warmup = settings.num_steps, settings.warmup_steps
    if settings.num_tokens:
        steps, done = 0, 0
        if manifest:
            steps, done = manifest["step"], manifest["samples"] * settings.sequence_length
        steps += settings.steps_for(max(0, settings.num_tokens - done), dist.get_world_size())
    if "warmup_steps" not in settings.given:
        warmup = default_warmup(settings.lr_scheduler, steps)
        if manifest and manifest["flags"]["lr_scheduler"] == settings.lr_scheduler:
            warmup = manifest["flags"]["warmup_steps"]
    return dataclasses.replace(settings, num_steps=steps, warmup_steps=warmup)


@dataclass(frozen=True)
class Due:
    """What is due at one optimizer step. Steps count from 1, over restarts too."""

    step: int
    first: bool  # the first one since this start
    last: bool
    evaluate: bool
    first_evaluation: bool  # since this start
    log: bool  # a log line; an evaluation needs one
    save: bool  # a checkpoint
    profile_begins: bool  # before this step
    profiled: bool
    profile_ends: bool  # after this step


class Schedule:
    """Tells what is due at a step of a run that begins, or goes on, with `first_step`."""

    def __init__(self, settings: Settings, first_step: int, has_held_out: bool):
        self.settings, self.first_step, self.has_held_out = settings, first_step, has_held_out
        self.profiled = range(0)
        if settings.profile:  # the first step is left out in any case: it compiles
            begin = first_step + max(settings.perf_warmup_steps, 1)
            self.profiled = range(begin, begin + PROFILED_STEPS)
        self.first_evaluation = None
        if has_held_out:
            next_multiple = math.ceil(first_step / settings.eval_interval) * settings.eval_interval
            self.first_evaluation = min(next_multiple, settings.num_steps)

    def at(self, step: int) -> Due:
        settings = self.settings
        last = step == settings.num_steps
        evaluate = self.has_held_out and (last or step % settings.eval_interval == 0)
        save = last and settings.keeps_last()
        if settings.checkpoint_interval:
            save = save or step % settings.checkpoint_interval == 0
        return Due(
            step=step,
            first=step == self.first_step,
            last=last,
            evaluate=evaluate,
            first_evaluation=step == self.first_evaluation,
            log=evaluate or last or step == 1 or step % settings.log_interval == 0,
            save=save,
            profile_begins=step == self.profiled.start and step in self.profiled,
            profiled=step in self.profiled,
            profile_ends=step == self.profiled.stop - 1 and step in self.profiled,
        )
