"""Flags: every flag, the command line and the files that set them, the rules between them, and the commands that the
program prints. Imports no torch, so that --help and a wrong flag answer at once.

    settings = flags.parse_args()     a mistake ends the process with one line
    flags.complete(given)             the settings of flags that were given, such as those that a checkpoint records
    settings.given                    {field: value} of the flags that the command line and --config gave
    flags.record_flags(settings)      {"given": ..., "flags": ...}, for config.json and a checkpoint's manifest
    flags.must_match(settings)        {field: value} that a resumed run must have as its checkpoint has it
    flags.reported(settings)          {field: value} that may change at a resume, and is reported then
    flags.contradiction(settings)     what does not go together, as an error; empty where all is well

A flag is one field of `Settings` in settings.py, which says all of it; what it contradicts is a row in rules.py.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "settings": "Settings FLAGS ASSETS PRESETS OPTIMIZERS TRACKERS LENGTHS PROFILED_STEPS default_warmup is_local "
        "must_match reported record_flags",
        "parser": "parse_args make_parser complete",
        "rules": "contradiction misfits_float8 not_a_folder_name",
        "schedules": "SCHEDULES",
        "commands": "as_words as_flags to_paste flags_of_run",
        "checkpoints": "checkpoint_folder no_checkpoint",
        "sources": "Source Stage sources_of stages_of name_of splits_overlap",
    },
)
