"""Rules: which flags contradict each other, and which have no effect in this run."""

import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from harness.flags.choices import constants_of
from harness.flags.commands import given
from harness.flags.flag_files import suggest
from harness.flags.resume import no_checkpoint
from harness.flags.settings import (
    COMPRESSIONS,
    OPTIMIZERS_FOLDER,
    PLAIN_SUFFIXES,
    PRESETS,
    PROFILED_STEPS,
    Settings,
    all_local,
    is_local,
)
from harness.flags.sources import splits_overlap, wrong_mixture

POLYNOMIAL_END = 1e-7  # learning rate at which transformers lets that schedule end
# Environment variables of accelerate launch, and the fields of the settings that decide the same in this program.
OF_ACCELERATE = {
    "ACCELERATE_USE_FSDP": "zero_stage",
    "ACCELERATE_USE_DEEPSPEED": "zero_stage",
    "ACCELERATE_MIXED_PRECISION": "precision",
    "ACCELERATE_DYNAMO_BACKEND": "compile",
}


# Flags that only some optimizers take: those name them in OWN_FLAGS of their files.
OPTIMIZER_FLAGS = ("adamw_lr", "muon_iteration", "muon_scale", "momentum_dtype")


def optimizer_constants(s: Settings) -> dict[str, Any]:
    """The constants of the optimizer's file."""
    return constants_of(OPTIMIZERS_FOLDER / f"{s.optimizer.replace('-', '_')}.py")


def is_plain_text(dataset: str) -> bool:
    """Whether a source is one file, or a pattern of files, whose format has no fields."""
    name, last_suffix = os.path.splitext(dataset.lower())
    if last_suffix not in COMPRESSIONS:
        name += last_suffix
    return name.endswith(tuple(PLAIN_SUFFIXES))


def without_effect(s: Settings) -> Iterator[str]:
    """A warning for each flag that was given and has no effect in this run; none for a plan, a measurement or the
    samples of a step, which take a run's flags as they are, nor for an export, which takes those of its checkpoint."""
    if s.plan or s.measure or s.show_samples or not s.num_steps:
        return
    writes = s.sample_prompt or s.sample_prompts or (s.demo and s.dataset != "synthetic")
    own_flags = optimizer_constants(s).get("OWN_FLAGS", ())
    of_others = [name for name in OPTIMIZER_FLAGS if name not in own_flags]
    # fmt: off
    idle = [
        (not s.eval_interval, "eval_steps eval_split", "nothing is evaluated without --eval-interval"),
        (not s.checkpoint_interval, "async_checkpoint", "without --checkpoint-interval no save is written beside the training"),
        (not s.checkpoint_interval and not s.keeps_last(), "keep_checkpoints", "only SIGTERM and SIGUSR1 save without --checkpoint-interval and --final-checkpoint"),
        (s.warmup_steps >= s.num_steps, "warmup_steps", f"the run ends after {s.num_steps:,} steps, before the learning rate reaches --lr"),
        (s.metrics_port is None, "metrics_host", "nothing listens without --metrics-port"),
        (s.log_with == "none", "project_name", "no tracker writes without --log-with"),
        (not s.export, "export_weights", "nothing is exported without --export"),
        (not writes, "sample_tokens", "nothing is written without --sample-prompt"),
        (s.dataset == "synthetic", "dataset_split eval_split skip_bad_records text_field dataset_config", "synthetic tokens are read from nowhere"),
        (all_local(s.dataset), "dataset_config", "only a data set of the hub has subsets"),
        (all(is_plain_text(source.dataset) for source in s.sources()), "text_field", "plain text has no fields"),
        (s.dataset == "synthetic" and not writes, "tokenizer", "nothing is tokenized with --dataset synthetic"),
        (s.dataset == "synthetic" and s.init == "random", "sample_prompt sample_prompts", "of synthetic tokens a model learns nothing that it could write"),
        (isinstance(s.dataset, str) and len(s.sources()) == 1, "mixture_stage", "one source has no weights to change"),
        (not s.streaming, "streams", "nothing is streamed without --streaming"),
        (s.gradient_accumulation_steps == 1, "defer_grad_sync", "one microbatch a step leaves nothing to defer"),
        (s.zero_stage == 1 and s.gradient_accumulation_steps > 1, "defer_grad_sync", "--zero-stage 1 does so by itself"),
        (True, " ".join(of_others), f"--optimizer {s.optimizer} takes no such number or choice"),
        (True, "plan_seconds", "only --plan looks for a configuration"),
        (not s.own_plan and s.batch_size != "auto", "plan_gpu plan_rates gpus_per_node", "nothing is planned with --no-own-plan"),
    ]
    # fmt: on
    given_fields = given(s.argv)
    for is_idle, names, why in idle:
        flags = [f"--{name.replace('_', '-')}" for name in names.split() if name in given_fields]
        if is_idle and flags:
            yield f"{', '.join(flags)}: {why}"


def not_followed(s: Settings) -> Iterator[str]:
    """Takes settings of accelerate out of the environment; a warning for each that contradicts this program's flags."""
    for name, field in OF_ACCELERATE.items():
        value, own = os.environ.pop(name, "").lower(), getattr(s, field)
        if field == "precision" and own is None:
            own = "bf16"  # on a GPU; the header says what it is on a CPU
        if value not in ("", "no", "false", "0", str(own)):
            flag = f"--{field.replace('_', '-')}"
            yield f"{name}={value} (of accelerate launch or its config) is not followed: this program goes by {flag}"


def contradiction(s: Settings) -> str | None:
    """The first of what does not go together in the settings; None where all is well."""
    profiled = PROFILED_STEPS if s.profile else 0
    measured = s.num_steps - s.perf_warmup_steps - profiled
    first_rank = not int(os.environ.get("RANK", 0))  # the others' disks, which may differ, are looked at later
    missing = no_checkpoint(s.resume) if s.resume not in ("none", "auto") and first_rank else ""
    trains = not (s.plan or s.measure) and s.num_steps > 0
    absent = missing_sources(s) if trains and first_rank else ""
    unread = unreadable(s.sample_prompts) if s.sample_prompts and first_rank else ""
    misfit = misfits_float8(s) if s.num_steps else ""
    optimizer = optimizer_constants(s)
    after_warmup = max(0, s.num_steps - s.warmup_steps)
    unmeasured = f"no step is left to measure; give --num-steps at least {s.num_steps - measured + 1}"
    # fmt: off
    wrong = [
        (s.precision != "fp8" and (s.fp8_recipe or s.fp8_emulate), "--fp8-recipe/--fp8-emulate: only with --precision fp8"),
        (misfit, misfit),
        (s.lr_scheduler == "constant" and s.warmup_steps, "--warmup-steps: the constant scheduler has no warmup; use constant_with_warmup"),
        (s.lr_scheduler == "polynomial" and s.lr <= POLYNOMIAL_END, f"--lr: the polynomial schedule ends at {POLYNOMIAL_END:g}, which {s.lr:g} is not above; give more, or linear"),
        *((value != default and s.lr_scheduler != "warmup_stable_decay", f"--{name}: only warmup_stable_decay has a decay phase; give --lr-scheduler warmup_stable_decay")
          for name, value, default in (("decay-steps", s.decay_steps, None), ("decay-shape", s.decay_shape, "cosine"))),
        (s.num_steps and (s.decay_steps or 0) > after_warmup, f"--decay-steps {s.decay_steps}: after the warmup there are {after_warmup}; give no more, or fewer --warmup-steps"),
        (s.export_weights == "ema" and not s.ema, "--export-weights ema: there is no average of the weights; give --ema with it, or with --num-steps 0 the checkpoint of a run that had it"),
        (mixture := wrong_mixture(s.dataset, s.mixture_stage), mixture),
        (leak := trained_eval_split(s), leak),
        (absent, absent),
        (unread, f"--sample-prompts {s.sample_prompts}: cannot be read ({unread})"),
        (s.document_mask and s.dataset == "synthetic", "--document-mask: synthetic tokens are no documents; use another --dataset"),
        (s.document_mask and s.attention in ("flash", "flash_attention_2"), f"--document-mask: not with {s.attention}; use flex_attention or sdpa"),
        (s.precision == "fp32" and s.attention in ("flash", "cudnn", "flash_attention_2"), f"--attention {s.attention}: takes no fp32; use sdpa, or another --precision"),
        (s.streaming and s.dataset == "synthetic", "--streaming: synthetic tokens are read from nowhere; use another --dataset"),
        (s.streaming and s.packing == "best-fit", "--packing best-fit: it needs the lengths of all documents, which a stream does not have; leave out --streaming"),
        (s.streaming and s.max_epochs, "--max-epochs: how large a stream is, is not known; leave out --streaming"),
        (s.zero_stage == 0 and s.dp_replicate_size > 1, "--dp-replicate-size: stage 0 replicates on every rank already"),
        (max(s.betas) > optimizer.get("MAX_BETA", 1), f"--betas: with {s.optimizer} at most {optimizer.get('MAX_BETA')}; rounded to bf16, a moment that moves by {1 - max(s.betas):.2g} of a difference stays where it is"),
        (s.precision in optimizer.get("SAME_AS_ADAMW_IN", ()), f"--optimizer: with {s.precision} the moments of adamw are bf16 already; leave {s.optimizer} out"),
        (s.activation_memory_budget is not None and (s.compile is False or s.activation_checkpointing != "none"), "--activation-memory-budget: needs --compile, without --activation-checkpointing"),
        (s.profile and measured < 1, f"--profile: {unmeasured}"),
        (s.min_mfu and measured < 1, f"--min-mfu: {unmeasured}"),
        *((name is not None and not_a_folder_name(name), f"{of}: {name!r} is {not_a_folder_name(name or '')}")
          for of, name in (("--run-name", s.run_name), ("--project-name", s.project_name))),
        (s.measure and s.plan, "--measure: it trains nothing and plans nothing; run --plan after it"),
        (s.measure and s.batch_size == "auto", "--batch-size: --measure times one size; give a number"),
        (s.num_steps == 0 and not (s.export or s.sample_prompt or s.sample_prompts or s.eval_interval), "--num-steps: 0 trains nothing; it goes with --eval-interval 1, --sample-prompt TEXT or --export DIR"),
        (s.num_steps == 0 and (s.eval_interval or not s.export) and s.resume == "none" and s.init == "random", "--num-steps: 0 trains nothing, and random weights have nothing to show; give --resume PATH, or --model DIR --init pretrained"),
        *((not s.plan and value, f"--{name}: only with --plan, without which this would train")
          for name, value in (("plan-gpus", s.plan_gpus), ("gpu-hour-usd", s.gpu_hour_usd), ("plan-details", s.plan_details))),
        (s.json and not s.plan and (s.num_steps or not s.eval_interval), "--json: only with --plan, or with --num-steps 0 and --eval-interval"),
        (problem := unknown_model(s.model), f"--model {s.model}: {problem}"),
        (s.num_steps == 0 and s.batch_size == "auto", "--batch-size: --num-steps 0 trains nothing; leave auto out"),
        (missing, f"--resume {s.resume}: {missing}"),
        (s.num_steps == 0 and s.resume == "auto", "--resume: --num-steps 0 takes one checkpoint, give its PATH"),
        (s.export and s.resume != "auto" and os.path.lexists(os.path.expanduser(s.export)), f"--export: {s.export} exists already; choose another folder or remove it"),
    ]
    # fmt: on
    for is_wrong, problem in wrong:
        if is_wrong:
            return problem
    return None


def misfits_float8(s: Settings) -> str:
    """Why float8 does not take the number of tokens of a microbatch; empty where it does, or where it is not known yet."""
    if s.sequence_length is None or s.batch_size == "auto" or s.batch_size % s.batch_step() == 0:
        return ""
    unit = 16 // math.gcd(16, s.batch_size)
    length = max(unit, round(s.sequence_length / unit) * unit)
    what = f"--precision fp8 ({s.fp8_recipe}) takes batch x sequence in multiples of 16, {s.batch_size} x {s.sequence_length} is none"
    batch = -(-s.batch_size // s.batch_step()) * s.batch_step()
    return f"--sequence-length {s.sequence_length}: {what}; give {length}, or --batch-size {batch}, or --fp8-recipe rowwise_with_gw_hp"


def trained_eval_split(s: Settings) -> str:
    """What is wrong with an --eval-split that holds what a run trains on, as an error; empty where nothing is."""
    if not (s.eval_interval and s.eval_split and s.num_steps) or s.dataset == "synthetic":
        return ""
    for source in s.sources():
        default = "train" if is_local(source.dataset) or s.streaming else "train[:5%]"
        trained = s.dataset_split or default
        if splits_overlap(trained, s.eval_split):
            problem = f"it is not apart from {trained!r}, which is trained on"
            return f"--eval-split {s.eval_split}: {problem}; such as --dataset-split 'train[:90%]' --eval-split 'train[90%:]'"
    return ""


def missing_sources(s: Settings) -> str:
    """The first source of --dataset that is neither on this machine nor may be on the hub, as an error; empty where
    there is none."""
    for source in s.sources():
        missing = missing_data(source.dataset)
        if missing:
            return f"--dataset {source.dataset}: {missing}"
    return ""


def missing_data(dataset: str) -> str:
    """Why a source is neither on this machine nor the name of a hub data set; empty where it may be."""
    path = os.path.expanduser(dataset)
    can_be_hub_id = dataset.count("/") <= 1 and not path.startswith(("/", ".")) and not path.endswith("/")
    if is_local(dataset) or can_be_hub_id:
        return ""
    return "no such file or folder"


def unreadable(file: str) -> str:
    """Why a file cannot be read; empty where it can."""
    try:
        with open(os.path.expanduser(file), "rb"):
            return ""
    except OSError as error:
        return error.strerror


def unknown_model(model: str) -> str:
    """Why a name is no model's; empty where it is a preset's or a folder's, or may be one of the hub."""
    path = pathlib.Path(model).expanduser()
    if model in PRESETS or os.path.isdir(path):
        return ""
    if os.path.lexists(path) or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        return "no such folder"
    near = "" if "/" in model else suggest(model, PRESETS)
    if near:
        return f"no preset, folder or hub id{near}"
    return ""


def not_a_folder_name(name: str) -> str:
    """Why a folder cannot have a name; empty where it can."""
    if name.strip(". ") == "" or re.search(r"[/\\#?%:]", name) or not name.isprintable():
        return "not a plain folder name"
    if len(os.fsencode(name)) > 200:
        return "too long for a folder, more than 200 bytes"
    return ""
