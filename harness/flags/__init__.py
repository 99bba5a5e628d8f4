"""Flags: every flag, the command line and the files that set them, the rules between them, and the commands that the
program prints. Imports no torch, so that --help and a wrong flag answer at once.

    settings = flags.parse_args()     a mistake ends the process with one line
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
        "Settings": "settings",
        "ASSETS": "settings",
        "PRESETS": "settings",
        "OPTIMIZERS": "settings",
        "LENGTHS": "settings",
        "PROFILED_STEPS": "settings",
        "SCHEDULES": "schedules",
        "parse_args": "parser",
        "make_parser": "parser",
        "contradiction": "rules",
        "misfits_float8": "rules",
        "not_a_folder_name": "rules",
        "must_match": "settings",
        "reported": "settings",
        "record_flags": "settings",
        "default_warmup": "settings",
        "is_local": "settings",
        "as_words": "commands",
        "as_flags": "commands",
        "to_paste": "commands",
        "flags_of_run": "commands",
        "checkpoint_folder": "checkpoints",
        "no_checkpoint": "checkpoints",
        "Source": "sources",
        "Stage": "sources",
        "sources_of": "sources",
        "name_of": "sources",
        "same_dataset": "sources",
        "splits_overlap": "sources",
    },
)
