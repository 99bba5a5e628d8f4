"""Schedule: the number of steps, and the actions due at each."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from harness import flags


def count_steps(settings: flags.Settings, manifest: dict | None, samples_per_epoch: int) -> tuple[int, int]:
    """Return (optimizer steps of a run, the fewest that give --num-tokens or --num-epochs; warmup steps, by default 5 %
    of them). A run that resumes from the checkpoint of `manifest` counts its samples and keeps its warmup.
    `samples_per_epoch` is for --num-epochs."""
    import torch.distributed as dist

    steps, warmup = settings.num_steps, settings.warmup_steps
    samples = Fraction(settings.num_tokens or 0, settings.sequence_length or 1)
    if settings.num_epochs:
        samples = Fraction(str(settings.num_epochs)) * samples_per_epoch  # the decimal as typed: 0.1 is a tenth
    if samples:
        steps, done = (manifest["step"], manifest["samples"]) if manifest else (0, 0)
        steps += settings.steps_for(max(0, samples - done) * settings.sequence_length, dist.get_world_size())
    if "warmup_steps" not in settings.explicit:
        warmup = flags.default_warmup(settings.lr_scheduler, steps)
        run_flags = manifest["flags"] if manifest else {}
        # that of the run, unless it would now be in warmup to its end
        if run_flags.get("lr_scheduler") == settings.lr_scheduler and run_flags["warmup_steps"] < steps:
            warmup = run_flags["warmup_steps"]
    return steps, warmup


@dataclass(frozen=True)
class Actions:
    """Actions due at one optimizer step. Steps count from 1 and continue over restarts."""

    step: int
    first: bool  # of this start
    last: bool
    evaluate: bool
    log: bool  # a log line; an evaluation needs one
    save: bool  # a checkpoint
    profile_begins: bool  # the profiler starts before this step
    profiled: bool
    profile_ends: bool  # the profiler stops after this step


def due(
    settings: flags.Settings,
    step: int,
    first_step: int = 1,
    has_room: bool = True,
    ends_epoch: Callable[[int], bool] = lambda step: False,
) -> Actions:
    """Return the actions due at `step`.

    Args:
        first_step: the first step of this start.
        has_room: False if the disk has no room for the final checkpoint, which is left out then.
        ends_epoch: returns True for a step in which an epoch of the data ends.
    """
    last = step == settings.num_steps
    if settings.eval_interval == "epoch":
        evaluate = last or ends_epoch(step)
    else:
        evaluate = settings.eval_interval > 0 and (last or step % settings.eval_interval == 0)
    save = (last and settings.final_checkpoint and has_room) or (settings.keep_best and evaluate)
    if settings.checkpoint_interval:
        save = save or step % settings.checkpoint_interval == 0
    profile_begin = first_step + max(settings.perf_warmup_steps, 1)  # the first step compiles, so it is never profiled
    profile_end = profile_begin + flags.PROFILED_STEPS - 1
    return Actions(
        step=step,
        first=step == first_step,
        last=last,
        evaluate=evaluate,
        log=evaluate or last or step == 1 or step % settings.log_interval == 0,
        save=save,
        profile_begins=settings.profile and step == profile_begin,
        profiled=settings.profile and profile_begin <= step <= profile_end,
        profile_ends=settings.profile and step == profile_end,
    )
