"""Resolving: the defaults that depend on model, corpora, machine and checkpoint, decided once, before anything is
built, in a run and in a plan."""

import dataclasses

import torch
from transformers import PretrainedConfig

from harness import base, data, flags, job, state
from harness import model as models


def resolve(
    args: flags.Args, config: PretrainedConfig, corpora: data.Corpora | None = None, manifest: dict | None = None
) -> flags.Settings:
    """Resolve every default of `args` except those of `resolve_steps`. --batch-size auto becomes the smallest possible
    size, which `loop.open_run` replaces.

    Args:
        config: the model's.
        corpora: those that are read; None in a plan, which reads none.
        manifest: that of the checkpoint from which a run resumes; None for a new run.

    Raises:
        UserError: a value does not run on this machine or with this model.
    """
    precision = models.choose_precision(args, manifest)
    sequence_length = models.choose_sequence_length(args, config)
    document_mask = data.masks_documents(args.document_mask, args.packing, corpora or data.Corpora([]))
    batch_size = args.batch_size
    if batch_size == "auto":
        part_length = sequence_length // args.context_parallel
        batch_size = flags.batch_size_multiple(precision.fp8_recipe, part_length)
    runs_on_gpu = args.plan or torch.cuda.is_available()
    lr, _ = flags.choose_lr(args, manifest)
    decided = {
        "precision": precision.name,
        "fp8_recipe": precision.fp8_recipe,
        "fp8_emulate": precision.fp8_emulate,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "document_mask": document_mask,
        "attention": models.choose_attention(args, config, precision.name, sequence_length, document_mask),
        "compile": runs_on_gpu if args.compile is None else args.compile,
        "fused_loss": models.choose_loss(args.fused_loss, config),
        "num_workers": choose_num_workers(args),
        "lr": lr,
        "final_checkpoint": args.saves_final_checkpoint(),
    }
    settings = flags.Settings(**(vars(args) | decided))
    models.check_context_parallel(settings, config)
    models.check_float8(settings)
    return settings


def resolve_steps(settings: flags.Settings, manifest: dict | None = None, samples_per_epoch: int = 0) -> flags.Settings:
    """Decide what depends on the global batch: steps, warmup, and the sequences of an evaluation.

    Args:
        manifest: as `resolve` has it.
        samples_per_epoch: for --num-epochs.
    """
    steps, warmup = job.count_steps(settings, manifest, samples_per_epoch)
    eval_sequences = state.count_eval_sequences(settings, manifest)
    return dataclasses.replace(settings, num_steps=steps, warmup_steps=warmup, eval_sequences=eval_sequences)


def refuse_contradictions(settings: flags.Settings, args: flags.Args) -> None:
    """Raise a UserError if resolved settings contradict each other. The number of microbatches is that of `args`: a
    resume on more ranks may resolve it to 1, for which --defer-grad-sync of the run would be refused."""
    typed_accumulation = dataclasses.replace(settings, gradient_accumulation_steps=args.gradient_accumulation_steps)
    if problem := flags.contradiction(typed_accumulation):
        raise base.UserError(problem)


def choose_num_workers(args: flags.Args) -> int:
    """--num-workers; by default none on a CPU that reads from the cache: a process would take one of its cores."""
    if args.num_workers is not None:
        return args.num_workers
    return 1 if torch.cuda.is_available() or args.streaming else 0
