"""Resolving: what the flags leave open until model, corpora, machine and checkpoint are known, decided once, before
anything is built: by a run, and in the same way by a plan."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from transformers import PretrainedConfig

from harness import base, data, flags, job, state
from harness import model as models


def resolve(
    asked: flags.Args,
    config: PretrainedConfig,
    choose_batch_size: Callable[[flags.Args], int],
    corpora: Sequence[data.Corpus] = (),
    manifest: dict | None = None,
    count_epoch: Callable[[flags.Args], int] = lambda known: 0,
) -> flags.Settings:
    """What a run does and what it records, of what was given.

    Args:
        config: of the model.
        choose_batch_size: called for --batch-size auto, on rank 0, with all that is decided by then.
        corpora: that are read.
        manifest: of the checkpoint that the run goes on from, if there is one.
        count_epoch: called for --num-epochs, with all else that is decided: how many samples the data have.

    Raises:
        UserError: what was decided does not go together, or does not run here.
    """
    precision = models.choose_precision(asked, manifest)
    known = dataclasses.replace(
        asked,
        precision=precision.name,
        fp8_recipe=precision.fp8_recipe,
        fp8_emulate=precision.fp8_emulate,
        compile=(asked.plan or torch.cuda.is_available()) if asked.compile is None else asked.compile,
        sequence_length=models.choose_sequence_length(asked, config),
        document_mask=data.masks_documents(asked, corpora),
        num_workers=choose_num_workers(asked),
        lr=choose_lr(asked, manifest),
        final_checkpoint=asked.saves_final_checkpoint(),
    )
    known = dataclasses.replace(
        known, attention=models.choose_attention(known, config), fused_loss=models.choose_loss(known.fused_loss, config)
    )
    models.check_float8(known)
    find_size = functools.partial(choose_batch_size, known)
    size = asked.batch_size if isinstance(asked.batch_size, int) else base.broadcast_from_rank_0(find_size)
    batch = state.Batch(size, asked.gradient_accumulation_steps, asked.explicit)
    if manifest:
        batch = state.keep_global_batch(batch, manifest)
    known = dataclasses.replace(
        known, batch_size=batch.size, gradient_accumulation_steps=batch.accumulation, explicit=batch.explicit
    )
    if not asked.plan:
        steps, warmup = job.count_steps(known, manifest, count_epoch(known) if known.num_epochs else 0)
        windows = state.count_eval_windows(known, batch.size, manifest)
        known = dataclasses.replace(known, num_steps=steps, warmup_steps=warmup, eval_windows=windows)
    # a flag that has no effect with so many microbatches may have one on the ranks of another start
    as_asked = dataclasses.replace(known, gradient_accumulation_steps=asked.gradient_accumulation_steps)
    if problem := flags.contradiction(as_asked):
        raise base.UserError(problem)
    return flags.Settings(**vars(known))


def choose_lr(settings: flags.Args, manifest: dict | None) -> float:
    """--lr; by default the checkpoint's that a run goes on from, of a new run one that goes with its weights."""
    if settings.lr is not None:
        return settings.lr
    return manifest["flags"]["lr"] if manifest else flags.default_lr(settings)[0]


def choose_num_workers(settings: flags.Args) -> int:
    """--num-workers; by default none where windows are in the cache, which take no work, and the CPU computes: another
    process would take a core from it."""
    if settings.num_workers is not None:
        return settings.num_workers
    return 1 if torch.cuda.is_available() or settings.streaming else 0
