"""Flags: all flags, the command line and files that set them, rules between them, and printed commands. Imports no
torch, so that --help and errors are printed at once.

    args = flags.parse_args()         exits with one line on a mistake
    args.explicit                     {field: value} of the flags on the command line and in --config
    flags.complete(explicit)          `Args` from explicit flags, such as those recorded in a checkpoint
    flags.record_flags(settings)      {"given": explicit ones, "flags": all}, for config.json and a manifest
    flags.flags_where(name, value)    the flags whose metadata in settings.py has this value
    flags.contradiction(args)         the first contradiction as an error; empty if there is none

A flag is one field of `Args` in settings.py; its contradictions are in rules.py.
"""

from harness.flags.adapters import adapter_folder, read_adapter_config
from harness.flags.checkpoints import checkpoint_folder, no_checkpoint
from harness.flags.choices import DATASETS, FIELD_SUFFIXES, Dataset, Optimizer
from harness.flags.commands import as_flags, as_words, run_flags, shell_command
from harness.flags.imports import IMPORTED, REGISTERED, describe_fault, describe_imports, model_types
from harness.flags.parser import complete, make_parser, parse_args
from harness.flags.rules import (
    contradiction,
    flags_without_effect,
    may_be_on_the_hub,
    misfits_float8,
    not_a_folder_name,
)
from harness.flags.schedules import SCHEDULES, Schedule
from harness.flags.settings import (
    ASSETS,
    FLAGS,
    LENGTHS,
    OPTIMIZERS,
    PRESETS,
    PROFILED_STEPS,
    TRACKERS,
    Args,
    Attention,
    Flags,
    Fp8Recipe,
    Precision,
    Settings,
    as_flag,
    batch_size_multiple,
    choose_lr,
    default_split,
    default_warmup,
    flags_where,
    is_eval_dataset,
    is_pattern,
    record_flags,
)
from harness.flags.sources import Source, mixture_problem, parse_sources, parse_stages, source_name, splits_overlap
