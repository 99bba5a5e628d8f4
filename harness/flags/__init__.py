"""Flags: every flag, the command line and the files that set them, the rules between them, and the commands that the
program prints. Imports no torch, so that --help and a wrong flag answer at once.

    settings = flags.parse_args()     a mistake ends the process with one line
    flags.complete(given)             the settings of flags that were given, such as those that a checkpoint records
    settings.explicit                    {field: value} of the flags that the command line and --config gave
    flags.record_flags(settings)      {"given": ..., "flags": ...}, for config.json and a checkpoint's manifest
    flags.flags_where(name, value)    the flags of which settings.py says so, such as what a resumed run may not change
    flags.contradiction(settings)     what does not go together, as an error; empty where all is well

A flag is one field of `Args` in settings.py, which says all of it; what it contradicts is a row in rules.py.
"""

from harness.flags.checkpoints import checkpoint_folder, folder_of_adapters, no_checkpoint, read_adapter_config
from harness.flags.commands import as_flags, as_words, run_flags, shell_command
from harness.flags.migration import TRAINERS
from harness.flags.parser import complete, make_parser, parse_args
from harness.flags.rules import contradiction, may_be_on_the_hub, misfits_float8, not_a_folder_name
from harness.flags.schedules import SCHEDULES
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
    batch_size_multiple,
    default_lr,
    default_warmup,
    flags_where,
    is_pattern,
    is_place,
    record_flags,
)
from harness.flags.sources import Source, Stage, name_of, sources_of, splits_overlap, stages_of

__all__ = [
    "ASSETS",
    "FLAGS",
    "LENGTHS",
    "OPTIMIZERS",
    "PRESETS",
    "PROFILED_STEPS",
    "SCHEDULES",
    "TRACKERS",
    "TRAINERS",
    "Args",
    "Attention",
    "Flags",
    "Fp8Recipe",
    "Precision",
    "Settings",
    "Source",
    "Stage",
    "as_flags",
    "as_words",
    "batch_size_multiple",
    "checkpoint_folder",
    "complete",
    "contradiction",
    "default_lr",
    "default_warmup",
    "flags_where",
    "folder_of_adapters",
    "is_pattern",
    "is_place",
    "make_parser",
    "may_be_on_the_hub",
    "misfits_float8",
    "name_of",
    "no_checkpoint",
    "not_a_folder_name",
    "parse_args",
    "read_adapter_config",
    "record_flags",
    "run_flags",
    "shell_command",
    "sources_of",
    "splits_overlap",
    "stages_of",
]
