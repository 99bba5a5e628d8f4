"""Commands: flags as words of a command line, and commands for the shell."""

import shlex
from collections.abc import Mapping
from typing import Any

from harness.flags.imports import IMPORTED
from harness.flags.settings import COLLECTED, Flags, as_flag


def as_words(values: Mapping[str, Any]) -> list[str]:
    """{field of `Args`: value} as words of a command line."""
    words = []
    for field, value in values.items():
        flag = as_flag(field)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif field == "plan_gpus" and isinstance(value, list | tuple):
            words += [flag, ",".join(map(str, value))]
        elif field not in COLLECTED and isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            for text in value if isinstance(value, list | tuple) else [value]:  # the flag is repeated for each
                is_like_a_flag = str(text).startswith("-")
                words += [f"{flag}={text}"] if is_like_a_flag else [flag, str(text)]
    return words


def as_flags(values: Mapping[str, object]) -> str:
    """{field of `Args`: value} as flags, quoted for the shell."""
    return shlex.join(as_words(values))


def shell_command(launcher: str, explicit: Mapping[str, object] | None = None, **changes: object) -> str:
    """A command for the shell: `launcher`, quoted already, with its script, then this process's --import and `explicit`
    flags with `changes`."""
    imports = {"import_": tuple(IMPORTED)} if IMPORTED else {}
    return f"{launcher} {as_flags({**imports, **(explicit or {}), **changes})}".rstrip()


def run_flags(args: Flags, *replaced: str) -> dict[str, object]:
    """The explicit flags of a run for a command that resumes it, without those in `replaced`, --resume and
    --run-name."""
    left_out = {*replaced, "resume", "run_name"}
    return {name: value for name, value in args.explicit.items() if name not in left_out}
