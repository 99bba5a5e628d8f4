"""Commands: flags as words of a command line, and the one place that makes a command to be pasted into a shell."""

import shlex
from collections.abc import Mapping
from typing import Any

from harness.flags.settings import COLLECTED, Flags, as_flag


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Fields of the settings and their values as words of a command line."""
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
            for text in value if isinstance(value, list | tuple) else [value]:  # each has the flag again
                is_like_a_flag = str(text).startswith("-")
                words += [f"{flag}={text}"] if is_like_a_flag else [flag, str(text)]
    return words


def as_flags(values: Mapping[str, object]) -> str:
    """Fields of the settings and their values as flags, quoted for the shell."""
    return shlex.join(as_words(values))


def shell_command(launcher: str, given: Mapping[str, object] | None = None, **changes: object) -> str:
    """A command for the shell: the launcher with its script, quoted already, then flags by their fields and values."""
    return f"{launcher} {as_flags({**(given or {}), **changes})}".rstrip()


def run_flags(settings: Flags, *given_anew: str) -> dict[str, object]:
    """The flags that were given to a run, for a command that goes on with it, without the fields in `given_anew` and
    those that say which run it is."""
    left_out = {*given_anew, "resume", "run_name"}
    return {name: value for name, value in settings.explicit.items() if name not in left_out}
