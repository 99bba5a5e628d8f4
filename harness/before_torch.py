"""Before torch: what the script does before its heavy imports. They take seconds, warn, and can be interrupted: by then
mistakes in flags have been answered and signals are read. torch reads its allocator's settings when it is imported."""

from __future__ import annotations  # so that older interpreters get as far as the message about them

from typing import TYPE_CHECKING

from harness import base

if TYPE_CHECKING:
    from harness import flags


def begin(words: list[str] | None = None) -> flags.Args:
    """Parse flags, by default the command line's. A mistake in them ends the process at once, with no package installed
    too. Whoever runs the script from Python calls this before importing it: `train_fsdp.main(begin(words))` is then the
    same run as the command, in the same memory."""
    base.ignore_closed_pipes()  # a closed stdout ends no run
    base.refuse_old_python()  # an older one cannot read the next import
    from harness import flags

    args = flags.parse_args(words, before_import=set_up)
    if not args.import_:
        set_up(args)
    return args


def set_up(args: flags.Args) -> None:
    """Check the packages, listen to signals, and set what torch reads when it is imported."""
    base.refuse_missing_packages()
    from harness import job

    job.begin(args)
