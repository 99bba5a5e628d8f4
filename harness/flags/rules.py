"""Rules: contradictions between flags, and flags that have no effect."""

import math
import os
import re
from collections.abc import Iterator
from typing import Any

from harness import base
from harness.flags.checkpoints import no_checkpoint
from harness.flags.choices import OPTIMIZERS, PLAIN_SUFFIXES, TOKEN_SUFFIXES
from harness.flags.imports import model_types
from harness.flags.names import suggest
from harness.flags.schedules import SCHEDULES, has_warmup
from harness.flags.settings import (
    FLAGS,
    LENGTHS,
    PRESETS,
    PROFILED_STEPS,
    Flags,
    as_flag,
    default_split,
    has_suffix,
    is_eval_dataset,
    is_local,
    is_pattern,
)
from harness.flags.sources import mixture_problem, splits_overlap

COMPARES = ("compare", "output_dir")
FLASH = ("flash", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def contradiction(args: Flags) -> str:
    """The first contradiction between flags, as an error; empty if there is none."""
    return next(contradictions(args), "")


def contradictions(args: Flags) -> Iterator[str]:
    """Every contradiction and every flag without effect, as errors."""
    for name, field in FLAGS.items():
        table, value = field.metadata["table"], getattr(args, name)
        if table and value not in table:
            choices = f"choose from {', '.join(table)}; --import FILE.py adds others"
            yield f"{as_flag(name)}: invalid choice: {value!r} ({choices})"
    lengths = [as_flag(name) for name in LENGTHS if name in args.explicit]
    if len(lengths) > 1:
        yield f"{lengths[1]}: {lengths[0]} is given too; leave one out"
    if args.compare:
        yield from [f"{as_flag(name)}: no effect with --compare" for name in args.explicit if name not in COMPARES]
    if args.resume == "auto" and args.num_steps == 0:
        yield "--resume: --num-steps 0 needs one checkpoint; give its PATH"
    if problem := model_problem(args.model):
        yield f"--model {args.model}: {problem}"
    if args.model in model_types() and args.init == "pretrained":
        yield f"--init pretrained: {args.model} is a registered model type without weights; give a folder as --model"
    for name in ("run_name", "project_name"):
        value = getattr(args, name)
        if value is not None and (problem := not_a_folder_name(value)):
            yield f"{as_flag(name)}: {value!r} is {problem}"

    yield from (problem for _, problem in left_out_by_others(args))

    # Data
    if problem := mixture_problem(args.dataset, args.mixture_stage):
        yield problem
    if problem := trained_eval_split(args):
        yield problem
    if args.streaming and args.packing in ("best-fit", "none"):
        problem = "needs the lengths of all documents, unknown in a stream"
        yield f"--packing {args.packing}: {problem}; leave out --streaming"
    if args.num_tokens and args.packing == "none":
        problem = "with --packing none the number of tokens in a step is unknown before the data are read"
        yield f"--num-tokens: {problem}; give --num-steps or --num-epochs"
    if args.num_steps and not args.plan:
        yield from without_epochs(args)

    # Model and precision
    if args.document_mask and args.attention in FLASH:
        problem = "does not support --document-mask, the default for conversations"
        yield f"--attention {args.attention}: {problem}; use flex_attention or sdpa"
    if args.precision == "fp32" and args.attention in (*FLASH, "cudnn"):
        yield f"--attention {args.attention}: does not support fp32; use sdpa or --precision bf16"
    if args.num_steps and (problem := misfits_float8(args)):
        yield problem
    yield from wrong_adapters(args)

    # Optimizer, schedule
    optimizer = OPTIMIZERS[args.optimizer]
    if max(args.betas) > optimizer.max_beta:
        reason = "larger ones make updates of the moments round to zero in bf16"
        yield f"--betas: at most {optimizer.max_beta} with --optimizer {args.optimizer}; {reason}"
    if problem := SCHEDULES[args.lr_scheduler].problem(args):
        yield problem
    if args.num_steps and "warmup_steps" in args.explicit and args.warmup_steps > args.num_steps:
        steps = base.counted(args.num_steps, "step")
        yield f"--warmup-steps {args.warmup_steps}: the run has {steps}; give at most that many"

    # Measurements
    measured = args.num_steps - args.perf_warmup_steps - (PROFILED_STEPS if args.profile else 0)
    for name in ("profile", "min_mfu"):
        if args.trains() and getattr(args, name) and measured < 1:
            enough = args.num_steps - measured + 1
            yield f"{as_flag(name)}: no step is left to measure; give --num-steps at least {enough}"

    # Without training, and plans
    if args.num_steps == 0 and not (args.export or args.sample_prompt or args.eval_interval):
        yield "--num-steps: 0 trains nothing; add --eval-interval 1, --sample-prompt TEXT or --export DIR"
    if (
        args.num_steps == 0
        and (args.eval_interval or not args.export)
        and args.resume == "none"
        and args.init == "random"
    ):
        problem = "0 trains nothing, and the weights are random"
        yield f"--num-steps: {problem}; give --resume PATH, or --model DIR --init pretrained"
    if args.plan_gpu and not base.choose_kind(args.plan_gpu)[0]:
        yield base.unlisted(args.plan_gpu)

    # Missing files, then flags without effect
    if os.environ.get("RANK", "0") == "0":  # other nodes check their disks later
        yield from missing_files(args)
    for names, problem in lacking_conditions(args):
        if args.trains() or FLAGS[names[0]].metadata["only_with"] == "plan":  # no run has the flags of plans
            yield problem
    if args.trains():
        yield from (problem for _, problem in without_effect(args))


def flags_without_effect(args: Flags) -> set[str]:
    """The flags without effect on training, given the others."""
    found = (*left_out_by_others(args), *lacking_conditions(args), *without_effect(args))
    return {name for names, _ in found for name in names}


def left_out_by_others(args: Flags) -> Iterator[tuple[list[str], str]]:
    """(flags, error) for flags that others leave without effect in every mode."""
    if args.show_samples:
        others = [name for name in ("plan", "export", "average_checkpoints") if getattr(args, name)]
        if args.num_steps == 0:
            others.append("num_steps")
        if others:
            yield others, f"{', '.join(map(as_flag, others))}: not with --show-samples; leave one out"
    elif args.plan and args.num_steps == 0:
        yield ["num_steps"], "--num-steps: 0 trains nothing, and --plan plans training; leave one out"
    if args.dataset == "synthetic":
        for name in ("streaming", "document_mask"):
            if getattr(args, name):
                yield [name], f"{as_flag(name)}: synthetic tokens have no documents; leave it out"
    if args.warmup_steps and not has_warmup(args.lr_scheduler):
        problem = f"--lr-scheduler {args.lr_scheduler} has no warmup"
        yield ["warmup_steps"], f"--warmup-steps: {problem}; use constant_with_warmup, or leave it out"
    if args.streaming and args.max_epochs:
        yield ["max_epochs"], "--max-epochs: the size of a stream is unknown; leave out --streaming"
    if args.zero_stage == 0 and args.dp_replicate_size > 1:
        problem = "--zero-stage 0 replicates on every rank already"
        yield ["dp_replicate_size"], f"--dp-replicate-size: {problem}; leave it out"
    if args.export_weights and not args.lora_rank and args.resume == "none":  # else the checkpoint decides
        problem = "without --lora-rank the full model is exported"
        yield ["export_weights"], f"--export-weights: {problem}; leave it out"
    if args.average_checkpoints and (args.num_steps or args.resume in ("none", "auto") or args.plan):
        problem = "only with --num-steps 0 and --resume RUN, the folder of a run"
        yield ["average_checkpoints"], f"--average-checkpoints: {problem}"
    if args.json and args.plan_details:
        yield ["plan_details"], "--plan-details: --json prints all of it; leave one out"
    if args.json and not args.plan and (args.num_steps or not args.eval_interval):
        yield ["json"], "--json: only with --plan, or with --num-steps 0 and --eval-interval"


def lacking_conditions(args: Flags) -> Iterator[tuple[list[str], str]]:
    """(flags, error) for each explicit flag that has conditions, `only_with`, if none of them holds. Plans,
    exports and evaluations accept them, as they take the flags of a run; so does a resume those that it inherits."""
    for name in FLAGS:
        conditions = FLAGS[name].metadata["only_with"].split()
        if conditions and is_typed(args, name) and not any(is_met(args, condition) for condition in conditions):
            needed = " or ".join(map(condition_text, conditions))
            yield [name], f"{as_flag(name)}: only with {needed}; give that too, or leave it out"


def without_effect(args: Flags) -> Iterator[tuple[list[str], str]]:
    """(flags, error) for explicit flags without effect on training. Plans, which may be those of a run on its ranks,
    accept them too."""

    def no_effect(fields: str, reason: str) -> Iterator[tuple[list[str], str]]:
        names = [name for name in fields.split() if is_typed(args, name)]
        if names:
            yield names, f"{', '.join(map(as_flag, names))}: no effect, {reason}; leave it out"

    if not args.saves_during_training() and not args.saves_final_checkpoint():
        yield from no_effect("keep_checkpoints", "nothing is saved without --checkpoint-interval or --final-checkpoint")
    if args.dataset == "synthetic":
        fields = "dataset_split eval_split skip_bad_records text_field dataset_config packing max_epochs"
        yield from no_effect(fields, "synthetic tokens come from no file")
    if args.packing == "none":
        yield from no_effect("document_mask", "with --packing none a sequence has one document")
    datasets = [source.dataset for source in args.sources()]
    if all(map(is_local, datasets)):
        yield from no_effect("dataset_config", "only datasets of the hub have subsets")
    if all(dataset == "demo" or has_suffix(dataset, PLAIN_SUFFIXES) for dataset in datasets):
        yield from no_effect("text_field", "text and token files have no fields")
    if all(has_suffix(dataset, TOKEN_SUFFIXES) for dataset in datasets):
        yield from no_effect("skip_bad_records", "token files have no records")
    if len(datasets) == 1:
        yield from no_effect("mixture_stage", "a single source has no weights")
    if args.decay_steps == 0:
        yield from no_effect("decay_shape", "--decay-steps 0 has no decay")
    if args.gradient_accumulation_steps == 1:
        yield from no_effect("defer_grad_sync", "a step has one microbatch")
    if args.zero_stage < 2:
        yield from no_effect("defer_grad_sync", f"--zero-stage {args.zero_stage} implies it")
    if not args.own_plan and args.explicit.get("batch_size") != "auto":
        yield from no_effect("plan_gpu gpus_per_node", "--no-own-plan plans nothing")


def is_typed(args: Flags, name: str) -> bool:
    """True if a flag is explicit and not inherited; a switch that is off by default only if it is on: a file may list
    it as false."""
    is_explicit = name in args.explicit and name not in args.inherited
    return is_explicit and not (FLAGS[name].default is False and getattr(args, name) is False)


def is_met(args: Flags, condition: str) -> bool:
    """True if a condition of `only_with` holds: `field`, which is then on, or `field=value`."""
    name, _, wanted = condition.partition("=")
    value: Any = getattr(args, name)
    if wanted:
        return value == wanted
    return value not in (None, False, 0, "none")


def condition_text(condition: str) -> str:
    """A condition as words of a command line: `--lr-scheduler cosine`."""
    name, _, wanted = condition.partition("=")
    return f"{as_flag(name)} {wanted}".rstrip()


def wrong_adapters(args: Flags) -> Iterator[str]:
    """An error for each flag that contradicts --lora-rank or needs it."""
    if not args.lora_rank:
        return
    if args.init == "random" and not args.plan:
        yield "--lora-rank: the weights are random; give --init pretrained"
    if args.precision == "fp8":
        yield "--lora-rank: not with --precision fp8; use bf16"
    if args.optimizer == "muon":
        yield "--lora-rank: not with --optimizer muon; use adamw"
    if len(args.lora_targets or ()) > 1 and any(map(is_pattern, args.lora_targets)):
        yield "--lora-targets: a pattern is given with others; give names or a single pattern"


def misfits_float8(args: Flags) -> str:
    """An error if float8 does not support the number of tokens in a microbatch; empty if it does, or if the number is
    unknown yet."""
    if args.precision != "fp8" or args.sequence_length is None or args.batch_size == "auto":
        return ""
    if args.batch_size % args.batch_size_multiple() == 0:
        return ""
    unit = 16 // math.gcd(16, args.batch_size) * args.context_parallel
    length = max(unit, round(args.sequence_length / unit) * unit)
    batch = -(-args.batch_size // args.batch_size_multiple()) * args.batch_size_multiple()
    size = f"{args.batch_size} x {args.part_length()}"
    problem = f"--precision fp8 ({args.fp8_recipe}) needs a multiple of 16 tokens, and {size} is none"
    advice = f"give {length}, or --batch-size {batch}, or --fp8-recipe rowwise_with_gw_hp"
    return f"--sequence-length {args.sequence_length}: {problem}; {advice}"


def without_epochs(args: Flags) -> Iterator[str]:
    """An error for each flag that counts epochs, if the data have none."""
    reason, otherwise = "", ""
    if args.streaming:
        reason, otherwise = "the size of a stream is unknown", "leave out --streaming"
    elif args.dataset == "synthetic":
        reason, otherwise = "synthetic tokens have no epochs", "use another --dataset"
    elif len(args.sources()) > 1 and (
        args.mixture_stage or any(source.weight is not None for source in args.sources())
    ):
        reason, otherwise = "weighted sources have different epochs", "leave out the weights"
    if reason and args.num_epochs:
        yield f"--num-epochs: {reason}; give --num-steps or --num-tokens, or {otherwise}"
    if reason and args.eval_interval == "epoch":
        yield f"--eval-interval epoch: {reason}; give a number of steps, or {otherwise}"


def trained_eval_split(args: Flags) -> str:
    """An error if --eval-split contains training data; empty otherwise."""
    if not (args.eval_interval and args.eval_split and args.num_steps) or args.dataset == "synthetic":
        return ""
    if is_eval_dataset(args.eval_split):  # files are compared when they are listed
        return ""
    for source in args.sources():
        trained = args.dataset_split or default_split(source.dataset, args.streaming)
        if splits_overlap(trained, args.eval_split):
            advice = "such as --dataset-split 'train[:90%]' --eval-split 'train[90%:]'"
            return f"--eval-split {args.eval_split}: it overlaps the training split {trained!r}; {advice}"
    return ""


def missing_files(args: Flags) -> Iterator[str]:
    """An error for each file and folder of the flags that does not exist."""
    if args.resume not in ("none", "auto") and (problem := no_checkpoint(args.resume)):
        yield f"--resume {args.resume}: {problem}"
    for source in args.sources() if args.trains() else []:
        if not is_local(source.dataset) and not may_be_on_the_hub(source.dataset):
            yield f"--dataset {source.dataset}: no such file or folder"
    eval_data = args.eval_split if args.eval_interval and not args.plan else None
    if is_eval_dataset(eval_data) and not is_local(eval_data) and not may_be_on_the_hub(eval_data):
        yield f"--eval-split {eval_data}: no such file or folder"


def may_be_on_the_hub(name: str) -> bool:
    """True if a name has the form of a hub id."""
    return re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?", name, re.ASCII) is not None


def model_problem(model: str) -> str:
    """A problem with --model; empty for a preset, a registered type, a folder or a possible hub id."""
    path = os.path.expanduser(model)
    if model in PRESETS or model in model_types() or os.path.isdir(path):
        return ""
    if os.path.lexists(path) or not may_be_on_the_hub(model):
        return "no such folder"
    near = "" if "/" in model else suggest(model, PRESETS)
    return f"no preset, folder or hub id{near}" if near else ""


def not_a_folder_name(name: str) -> str:
    """A problem with a name for a folder; empty for a good one."""
    if name.strip(". ") == "" or re.search(r"[/\\#?%:]", name) or not name.isprintable():
        return "not a plain folder name"
    if len(os.fsencode(name)) > 200:
        return "too long for a folder, more than 200 bytes"
    return ""
