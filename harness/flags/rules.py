"""Rules: which flags do not go together, and which can have no effect beside the others."""

import math
import os
import re
from collections.abc import Iterator
from typing import Any

from harness import base
from harness.flags.checkpoints import no_checkpoint
from harness.flags.choices import OPTIMIZERS, PLAIN_SUFFIXES
from harness.flags.names import suggest
from harness.flags.schedules import SCHEDULES
from harness.flags.settings import (
    FLAGS,
    LENGTHS,
    PRESETS,
    PROFILED_STEPS,
    Flags,
    as_flag,
    default_split,
    has_suffix,
    is_local,
    is_pattern,
    is_place,
)
from harness.flags.sources import splits_overlap, wrong_mixture

FLASH = ("flash", "flash_attention_2")


def contradiction(s: Flags) -> str:
    """The first of what does not go together in the settings, as an error; empty where all is well."""
    return next(contradictions(s), "")


def contradictions(s: Flags) -> Iterator[str]:
    """The table of what does not go together, and of flags without effect, each as an error; the first one counts."""
    lengths = [as_flag(name) for name in LENGTHS if name in s.explicit]
    if len(lengths) > 1:
        yield f"{lengths[1]}: {lengths[0]} is given too; leave out one of them"
    if s.resume == "auto" and s.num_steps == 0:
        yield "--resume: --num-steps 0 takes one checkpoint, give its PATH"
    if problem := unknown_model(s.model):
        yield f"--model {s.model}: {problem}"
    for name in ("run_name", "project_name"):
        value = getattr(s, name)
        if value is not None and (problem := not_a_folder_name(value)):
            yield f"{as_flag(name)}: {value!r} is {problem}"

    # What is trained on
    if problem := wrong_mixture(s.dataset, s.mixture_stage):
        yield problem
    if problem := trained_eval_split(s):
        yield problem
    if s.streaming and s.dataset == "synthetic":
        yield "--streaming: synthetic tokens are read from nowhere; use another --dataset"
    if s.streaming and s.packing in ("best-fit", "none"):
        needs = "it needs the lengths of all documents, which a stream does not have"
        yield f"--packing {s.packing}: {needs}; leave out --streaming"
    if s.num_tokens and s.packing == "none":
        problem = "with --packing none the padding, which is no token, is not known before the data are read"
        yield f"--num-tokens: {problem}; give --num-steps or --num-epochs"
    if s.streaming and s.max_epochs:
        yield "--max-epochs: how large a stream is, is not known; leave out --streaming"
    if s.num_steps and not s.plan:
        yield from without_epochs(s)
    if s.document_mask and s.dataset == "synthetic":
        yield "--document-mask: synthetic tokens are no documents; use another --dataset"

    # The model and its techniques
    if s.document_mask and s.attention in FLASH:
        yield f"--document-mask: not with {s.attention}; use flex_attention or sdpa"
    if s.precision == "fp32" and s.attention in (*FLASH, "cudnn"):
        yield f"--attention {s.attention}: takes no fp32; use sdpa, or another --precision"
    if s.precision != "fp8" and (s.fp8_recipe or s.fp8_emulate):
        yield "--fp8-recipe/--fp8-emulate: only with --precision fp8"
    if s.num_steps and (problem := misfits_float8(s)):
        yield problem
    yield from wrong_adapters(s)
    if s.zero_stage == 0 and s.dp_replicate_size > 1:
        yield "--dp-replicate-size: stage 0 replicates on every rank already"

    # Optimizer, schedule
    optimizer = OPTIMIZERS[s.optimizer]
    if max(s.betas) > optimizer.max_beta:
        why = f"rounded to bf16, a moment that moves by {1 - max(s.betas):.2g} of a difference stays where it is"
        yield f"--betas: with {s.optimizer} at most {optimizer.max_beta}; {why}"
    if s.precision in optimizer.same_as_adamw_in:
        yield f"--optimizer: with {s.precision} the moments of adamw are bf16 already; leave {s.optimizer} out"
    if problem := SCHEDULES[s.lr_scheduler].problem(s):
        yield problem
    if s.num_steps and "warmup_steps" in s.explicit and s.warmup_steps > s.num_steps:
        yield f"--warmup-steps {s.warmup_steps}: the run ends after {s.num_steps:,} steps; give at most so many"

    # What a run leaves
    measured = s.num_steps - s.perf_warmup_steps - (PROFILED_STEPS if s.profile else 0)
    for name in ("profile", "min_mfu"):
        if getattr(s, name) and measured < 1:
            enough = s.num_steps - measured + 1
            yield f"{as_flag(name)}: no step is left to measure; give --num-steps at least {enough}"

    # Without training
    if s.num_steps == 0 and not (s.export or s.sample_prompt or s.eval_interval):
        yield "--num-steps: 0 trains nothing; it goes with --eval-interval 1, --sample-prompt TEXT or --export DIR"
    if s.num_steps == 0 and (s.eval_interval or not s.export) and s.resume == "none" and s.init == "random":
        problem = "0 trains nothing, and random weights have nothing to show"
        yield f"--num-steps: {problem}; give --resume PATH, or --model DIR --init pretrained"
    if s.average_checkpoints and (s.num_steps or s.resume in ("none", "auto") or s.plan):
        yield "--average-checkpoints: goes with --num-steps 0 and --resume RUN, the folder of a run"
    if s.batch_size == "auto" and s.num_steps == 0:
        yield "--batch-size: auto is for a run that trains, or its plan; give a number"
    if s.json and not s.plan and (s.num_steps or not s.eval_interval):
        yield "--json: only with --plan, or with --num-steps 0 and --eval-interval"
    if s.plan_gpu and not base.choose_kind(s.plan_gpu)[0]:
        yield base.unlisted(s.plan_gpu)

    # Files that are not there, then what can have no effect
    if os.environ.get("RANK", "0") == "0":  # the others' disks, which may differ, are looked at later
        yield from missing_files(s)
    if s.trains():
        yield from without_effect(s)


def without_effect(s: Flags) -> Iterator[str]:
    """The part of the table for flags that were given and can have no effect in a run that trains. A plan, an export
    and a run of no step take a run's flags as they are."""

    def idle(fields: str, why: str) -> Iterator[str]:
        given = [as_flag(name) for name in fields.split() if name in s.explicit]
        if given:
            yield f"{', '.join(given)}: {why}; leave it out"

    for name in s.explicit:
        conditions = FLAGS[name].metadata["only_with"].split()
        if conditions and not any(is_met(s, condition) for condition in conditions):
            needed = " or ".join(map(as_words_of_condition, conditions))
            yield f"{as_flag(name)}: only with {needed}; give that too, or leave it out"
    if not s.saves_during_training() and not s.saves_final_checkpoint():
        yield from idle("keep_checkpoints", "no save is due without --checkpoint-interval and --final-checkpoint")
    if s.dataset == "synthetic":
        fields = "dataset_split eval_split skip_bad_records text_field dataset_config packing"
        yield from idle(fields, "synthetic tokens are read from nowhere")
        if s.init == "random":
            yield from idle("sample_prompt", "a model learns nothing to write from synthetic tokens")
    if s.packing == "none":
        yield from idle("document_mask", "with --packing none a sequence has one document")
    places = [source.dataset for source in s.sources()]
    if all(map(is_local, places)):
        yield from idle("dataset_config", "only a data set of the hub has subsets")
    if all(has_suffix(place, PLAIN_SUFFIXES) for place in places):
        yield from idle("text_field", "plain text has no fields")
    if len(places) == 1:
        yield from idle("mixture_stage", "one source has no weights to change")
    if s.gradient_accumulation_steps == 1:
        yield from idle("defer_grad_sync", "one microbatch a step leaves nothing to defer")
    if s.zero_stage == 1:
        yield from idle("defer_grad_sync", "--zero-stage 1 does so by itself")
    if not s.own_plan and s.explicit.get("batch_size") != "auto":
        yield from idle("plan_gpu gpus_per_node", "nothing is planned with --no-own-plan")


def is_met(s: Flags, condition: str) -> bool:
    """Whether a flag is set as an `only_with` asks: `field`, anything but off, or `field=value`."""
    name, _, wanted = condition.partition("=")
    value: Any = getattr(s, name)
    if wanted:
        return value == wanted
    return value not in (None, False, 0, "none")


def as_words_of_condition(condition: str) -> str:
    """A condition as words of a command line: `--lr-scheduler cosine`."""
    name, _, wanted = condition.partition("=")
    return f"{as_flag(name)} {wanted}".rstrip()


def wrong_adapters(s: Flags) -> Iterator[str]:
    """What does not go together with --lora-rank, and what needs it."""
    if s.export_weights and not s.lora_rank:
        yield "--export-weights: without --lora-rank an export has the whole model; leave it out"
    if not s.lora_rank:
        return
    if s.init == "random" and not s.plan:
        yield "--lora-rank: adapters of random weights serve for nothing; give --init pretrained"
    if s.precision == "fp8":
        yield "--lora-rank: not with --precision fp8; use bf16"
    if s.optimizer == "muon":
        yield "--lora-rank: not with --optimizer muon, whose updates are for whole weights; use adamw"
    if len(s.lora_targets or ()) > 1 and any(map(is_pattern, s.lora_targets)):
        yield "--lora-targets: a pattern stands alone; give names, or one pattern that matches all"


def misfits_float8(s: Flags) -> str:
    """Why float8 does not take the number of tokens of a microbatch, as an error; empty where it does, or where that
    number is not known yet."""
    if s.sequence_length is None or s.batch_size == "auto" or s.batch_size % s.batch_size_multiple() == 0:
        return ""
    unit = 16 // math.gcd(16, s.batch_size)
    length = max(unit, round(s.sequence_length / unit) * unit)
    batch = -(-s.batch_size // s.batch_size_multiple()) * s.batch_size_multiple()
    what = f"--precision fp8 ({s.fp8_recipe}) takes batch x sequence in multiples of 16"
    advice = f"give {length}, or --batch-size {batch}, or --fp8-recipe rowwise_with_gw_hp"
    return f"--sequence-length {s.sequence_length}: {what}, {s.batch_size} x {s.sequence_length} is none; {advice}"


def without_epochs(s: Flags) -> Iterator[str]:
    """An error for each flag that counts epochs, where the data have none."""
    why, otherwise = "", ""
    if s.streaming:
        why, otherwise = "how large a stream is, is not known", "leave out --streaming"
    elif s.dataset == "synthetic":
        why, otherwise = "random tokens have no end", "use another --dataset"
    elif len(s.sources()) > 1 and (s.mixture_stage or any(source.weight is not None for source in s.sources())):
        why, otherwise = "by weights each source is read at a rate of its own", "leave out the weights"
    if why and s.num_epochs:
        yield f"--num-epochs: {why}; give --num-steps or --num-tokens, or {otherwise}"
    if why and s.eval_interval == "epoch":
        yield f"--eval-interval epoch: {why}; give a number of steps, or {otherwise}"


def trained_eval_split(s: Flags) -> str:
    """What is wrong with an --eval-split that holds what a run trains on, as an error; empty where nothing is."""
    if not (s.eval_interval and s.eval_split and s.num_steps) or s.dataset == "synthetic":
        return ""
    if is_place(s.eval_split):  # its files are compared when they are listed
        return ""
    for source in s.sources():
        trained = s.dataset_split or default_split(source.dataset, s.streaming)
        if splits_overlap(trained, s.eval_split):
            advice = "such as --dataset-split 'train[:90%]' --eval-split 'train[90%:]'"
            return f"--eval-split {s.eval_split}: it is not apart from {trained!r}, which is trained on; {advice}"
    return ""


def missing_files(s: Flags) -> Iterator[str]:
    """An error for each file and folder of the flags that is not there."""
    if s.resume not in ("none", "auto") and (problem := no_checkpoint(s.resume)):
        yield f"--resume {s.resume}: {problem}"
    for source in s.sources() if s.trains() else []:
        if not is_local(source.dataset) and not may_be_on_the_hub(source.dataset):
            yield f"--dataset {source.dataset}: no such file or folder"
    place = s.eval_split if s.eval_interval and not s.plan else None
    if is_place(place) and not is_local(place) and not may_be_on_the_hub(place):
        yield f"--eval-split {place}: no such file or folder"


def may_be_on_the_hub(name: str) -> bool:
    """Whether the hub can have a model or data set of a name, by its form."""
    return name.count("/") <= 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/")


def unknown_model(model: str) -> str:
    """Why a name is no model's; empty where it is a preset's or a folder's, or may be one of the hub."""
    path = os.path.expanduser(model)
    if model in PRESETS or os.path.isdir(path):
        return ""
    if os.path.lexists(path) or not may_be_on_the_hub(model):
        return "no such folder"
    near = "" if "/" in model else suggest(model, PRESETS)
    return f"no preset, folder or hub id{near}" if near else ""


def not_a_folder_name(name: str) -> str:
    """Why a folder cannot have a name; empty where it can."""
    if name.strip(". ") == "" or re.search(r"[/\\#?%:]", name) or not name.isprintable():
        return "not a plain folder name"
    if len(os.fsencode(name)) > 200:
        return "too long for a folder, more than 200 bytes"
    return ""
