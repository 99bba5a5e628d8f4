"""Resolving: what the flags left open, decided once. Called by the script before it builds anything, and by plans."""

import dataclasses

import torch

from harness import base, flags, job, state
from harness import model as models
from harness.plan import own_plan


def resolve(settings: flags.Settings, config, manifest: dict | None = None) -> flags.Settings:
    """What the flags left open, decided once: from here on the settings are what the run does and what it records.

    `manifest` is that of the checkpoint that the run goes on from, if there is one.
    """
    asked, settings = settings, models.choose_precision(settings, manifest)
    if settings.compile is None:
        settings = dataclasses.replace(settings, compile=torch.cuda.is_available() or settings.plan)
    settings = dataclasses.replace(settings, sequence_length=models.choose_sequence_length(settings, config))
    settings = dataclasses.replace(settings, document_mask=bool(settings.document_mask))
    attention, fused_loss = models.choose_attention(settings, config), models.choose_loss(settings.fused_loss, config)
    settings = dataclasses.replace(settings, attention=attention, fused_loss=fused_loss)
    models.check_float8(settings)
    if settings.num_workers is None:  # cached windows take no work, and a process more takes a core that computes
        workers = 1 if torch.cuda.is_available() or settings.streaming else 0
        settings = dataclasses.replace(settings, num_workers=workers)
    if settings.batch_size == "auto" and not settings.plan:  # a plan looks for it itself
        batch_size = base.on_main_rank(lambda: own_plan.choose_batch_size(settings))
        settings = dataclasses.replace(settings, batch_size=batch_size)
    if manifest:
        settings = state.keep_global_batch(settings, manifest)
    if not (settings.plan or settings.measure):
        settings = state.count_eval_windows(job.count_steps(settings, manifest), manifest)
    # a flag that has no effect with so many microbatches may have one on the ranks of another start
    as_asked = {"gradient_accumulation_steps": asked.gradient_accumulation_steps}
    problem = flags.contradiction(dataclasses.replace(settings, **as_asked))
    if problem:
        raise base.UserError(problem)
    return settings
